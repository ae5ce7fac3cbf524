"""The data pool: episodes in groups, queued, recorded call by call, ordered by a window, trained once."""
