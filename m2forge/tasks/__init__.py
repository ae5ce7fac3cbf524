"""Tasks: families that generate and verify them, streams of each split, mixtures of domains, and the curriculum."""
