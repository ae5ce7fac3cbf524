"""Reads documents from raw files.

In reading order: source (which files), file (one file of any format), document (what it yields), extra (optional
libraries).
"""
