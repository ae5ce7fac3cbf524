"""Episodes and their records on disk.

In reading order: registry, episode, journal, closed_journal.
"""
