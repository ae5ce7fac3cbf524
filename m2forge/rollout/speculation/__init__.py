"""Speculative decoding.

In reading order: drafting, verify, adaptive_depth.
"""
