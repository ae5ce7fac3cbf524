"""Writes a corpus folder.

In reading order: work (stored results of stages), document_table, surviving, tokenise, long_sample.
"""
