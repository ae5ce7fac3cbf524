"""HTTP connections and their limits.

In reading order: connection, limits.
"""
