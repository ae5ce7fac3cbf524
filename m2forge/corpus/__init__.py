"""Builds scored, deduplicated, mixed token shards from documents, and reads them."""
