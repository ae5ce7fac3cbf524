"""Tasks: families that make, serve and verify them, streams of each split, mixtures of domains, and the curriculum."""
