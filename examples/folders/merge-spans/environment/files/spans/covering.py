"""What a list of spans covers."""

from spans.merging import Span, merge


def length(spans: list[Span]) -> int:
    """How many integers the spans cover."""
    return sum(stop - start for start, stop in merge(list(spans)))


def contains(spans: list[Span], number: int) -> bool:
    return any(start <= number < stop for start, stop in spans)
