"""The hidden tests of `spans`."""

import random

import pytest
from spans import contains, length, merge


def test_spans_that_touch_are_one() -> None:
    assert merge([(1, 3), (3, 5)]) == [(1, 5)]


def test_a_span_inside_another_does_not_shorten_it() -> None:
    assert merge([(1, 9), (2, 4), (8, 12)]) == [(1, 12)]


def test_empty_spans_are_left_out() -> None:
    assert merge([(4, 4)]) == []
    assert merge([(1, 2), (2, 2), (5, 5), (6, 8)]) == [(1, 2), (6, 8)]


def test_spans_apart_stay_apart() -> None:
    assert merge([(7, 9), (1, 3), (-4, -2)]) == [(-4, -2), (1, 3), (7, 9)]


def test_a_span_that_ends_before_it_starts_is_refused() -> None:
    with pytest.raises(ValueError):
        merge([(1, 2), (5, 3)])
    assert merge([]) == []


def test_the_list_is_not_changed() -> None:
    spans = [(5, 6), (1, 3)]
    merge(spans)
    assert spans == [(5, 6), (1, 3)]


def test_random_spans_cover_what_they_did() -> None:
    generator = random.Random(0)
    for _ in range(200):
        starts = [generator.randrange(-10, 20) for _ in range(generator.randrange(8))]
        spans = [(start, start + generator.randrange(6)) for start in starts]
        covered = sorted({number for start, stop in spans for number in range(start, stop)})
        merged = merge(spans)
        assert [number for start, stop in merged for number in range(start, stop)] == covered
        assert length(spans) == len(covered)
        assert [number for number in range(-11, 27) if contains(merged, number)] == covered
