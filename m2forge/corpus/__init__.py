"""Documents to scored, deduplicated, mixed token shards, and their readers."""
