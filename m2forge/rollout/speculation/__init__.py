"""Speculative decoding.

In reading order: verify, adaptive_depth.
"""
