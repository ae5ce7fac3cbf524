"""Losses, one per file, each stating its formula."""
