"""Half-open spans of integers: `(start, stop)` covers start up to, but not including, stop."""

from spans.covering import contains, length
from spans.merging import merge

__all__ = ["contains", "length", "merge"]
