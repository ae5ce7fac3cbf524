"""Builds prompts.

In reading order: sample, wording, text_wording, prompt_file.
"""
