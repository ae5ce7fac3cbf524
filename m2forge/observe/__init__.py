"""What a run shows of itself: log lines, metrics on disk, progress in the terminal."""
