"""Evaluation suites.

In reading order: suite (long context) over ruler; completion over exact_match and tool_call;
held_out.
"""
