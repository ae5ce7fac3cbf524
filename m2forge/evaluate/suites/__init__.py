"""Evaluation suites.

In reading order: suite (long context) over haystack and word_count; completion over exact_match and tool_call;
held_out.
"""
