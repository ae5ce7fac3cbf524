"""Engines over other servers.

In reading order: client, http_stream, remote, vllm, sglang, update_lock.
"""
