"""Parts for tests: what stands in for a policy where none is wanted."""
