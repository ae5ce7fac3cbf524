"""Evaluation suites.

In reading order: suite over ruler (long context), exact_match and tool_call (prompt files).
"""
