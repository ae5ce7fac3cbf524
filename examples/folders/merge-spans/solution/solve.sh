#!/bin/sh
set -e
cat > /workspace/spans/merging.py <<'END'
"""Merges spans that cover a common stretch."""

Span = tuple[int, int]


def merge(spans: list[Span]) -> list[Span]:
    """The fewest spans that cover the same integers, sorted."""
    merged: list[Span] = []
    for start, stop in sorted(spans):
        if stop < start:
            raise ValueError(f"expected a stop of {start} or more, received {stop}")
        if start == stop:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged
END
