"""Serves one completion request.

In reading order: calls, body (with body_worker), generation, sample.
"""
