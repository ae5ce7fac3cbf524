"""Evaluation: tasks, scores, a table and a plot."""
