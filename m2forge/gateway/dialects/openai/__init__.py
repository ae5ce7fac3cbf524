"""OpenAI's APIs.

In reading order: shared, chat, completions, responses_input, responses.
"""
