"""Builds prompts.

In reading order: scored_sample, wording, prompt_file.
"""
