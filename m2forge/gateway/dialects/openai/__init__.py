"""OpenAI's APIs.

In reading order: chat, completions, responses_input, responses.
"""
