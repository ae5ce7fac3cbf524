"""Inference for users: `LLM` in Python, `m2forge chat` in a terminal, the model server of `m2forge serve`."""
