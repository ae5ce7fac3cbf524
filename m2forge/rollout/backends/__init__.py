"""Engines over other servers.

In reading order: client, remote, vllm, sglang, update_lock.
"""
