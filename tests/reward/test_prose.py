"""What is prose and what is not."""

import pytest

from m2forge.reward.rule import prose


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("It's a well-known fact, I think (really).", "It's a well-known fact, I think (really)."),
        ("Use DataLoader", "Use  | "),
        ("the API, v2, a_b, a/b, x@y.z", "the  |   |   |   |   | "),
        ("a `b c` d", "a  |  d"),
        ("a\n```\nb\n```\nc", "a\n | \nc"),
        ("a\n~~~\nb", "a\n | "),
        ("a $x y$ b $$z\nw$$ c", "a  |  b  |  c"),
        (r"a \(x y\) b \[z w\] c", "a  |  b  |  c"),
        ("> a b\nc", " | \nc"),
        ('a "b c" d “e” f', "a  |  d  |  f"),
        ("a “ b ” ” c", "a  |  ” c"),
        ("a | b", "a | b"),
        ("a “ b", "a “ b"),
        ("用API加载", "用 | 加载"),
        ("cafe\u0301", "café"),
        ("", ""),
    ],
)
def test_code_formulas_and_quotations_are_taken_out(text: str, expected: str) -> None:
    assert prose(text) == expected
