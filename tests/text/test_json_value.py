"""JSON that can be written again, and how deep it may be."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2forge.text.message import MAX_DEPTH, is_deeper, parse_json

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
)


@given(VALUES)
def test_what_was_written_is_read(value: object) -> None:
    assert parse_json(json.dumps(value)) == value
    assert parse_json(json.dumps(value, ensure_ascii=False)) == value


def test_json_at_the_depth_limit_is_read() -> None:
    parse_json("[" * MAX_DEPTH + "]" * MAX_DEPTH)
    parse_json('{"a": "' + "[" * 500 + '"}')
    parse_json("[" * 300 + "]" * 300, max_depth=300)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[" * 100_000, "nested deeper than 100"),
        ("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "nested deeper than 100"),
        ("NaN", "NaN is not a JSON number"),
        ("[-Infinity]", "-Infinity is not a JSON number"),
        ("1e999", "1e999 is not a JSON number"),
        ('"\\ud800"', "surrogates not allowed"),
        ("{", "Expecting"),
    ],
)
def test_what_could_not_be_written_again_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_json(text)


@given(VALUES, st.integers(0, 5))
def test_depth_is_that_of_the_deepest_brackets(value: object, depth: int) -> None:
    def measured(value: object) -> int:
        if isinstance(value, dict | list):
            return 1 + max(map(measured, value.values() if isinstance(value, dict) else value), default=0)
        return 0

    assert is_deeper(value, depth) == (measured(value) > depth)  # type: ignore[arg-type]  # a JSON value
