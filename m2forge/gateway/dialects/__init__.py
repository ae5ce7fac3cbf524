"""Vendor APIs: JSON in and out, no network.

In reading order: types (the neutral form and its fields), conversation, opaque_thinking, openai/, anthropic/.
"""
