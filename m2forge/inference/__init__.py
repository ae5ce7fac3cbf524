"""Inference for users: `LLM` in Python."""
