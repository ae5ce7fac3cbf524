"""Losses, one file each, each stating its formula."""
