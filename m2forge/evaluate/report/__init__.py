"""Writes results.

In reading order: report, table, plot.
"""
