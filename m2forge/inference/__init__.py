"""Inference for users: `LLM` in Python, and the model server of `m2forge serve`."""
