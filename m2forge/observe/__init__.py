"""Observability of a run: log lines, metrics on disk, progress in the terminal."""
