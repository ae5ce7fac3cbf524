"""Verified software engineering tasks from releases, commits and pull requests."""
