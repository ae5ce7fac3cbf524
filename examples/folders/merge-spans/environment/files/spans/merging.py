"""Merges spans that cover a common stretch."""

Span = tuple[int, int]


def merge(spans: list[Span]) -> list[Span]:
    """The fewest spans that cover the same integers, sorted."""
    spans.sort()
    merged: list[Span] = []
    for start, stop in spans:
        if merged and start < merged[-1][1]:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return merged
