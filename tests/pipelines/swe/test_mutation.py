"""Mutants: each is one small fault, and what tests cannot see is left alone."""

import ast
from pathlib import Path

import pytest

from m2forge.pipelines.swe import mutation
from m2forge.pipelines.swe.mutation import mutations


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("x = a == b", "x = (a != b)"),
        ("x = a and b", "x = ((a) or (b))"),
        ("x = not a", "x = (bool(a))"),
        ("x = 'ä', a + b", "x = 'ä', (a - b)"),
        ("x = True", "x = False"),
        ("x = 3", "x = (3 + 1)"),
        ("if a:\n    b", "if (not (a)):\n    b"),
        ("def f():\n    return a", "def f():\n    return None"),
        ("f(a)", "pass"),
        ("a.b = c", "pass"),
        ("x = f(a, b)", "x = f(b, b)"),
    ],
)
def test_one_fault_replaces_one_node(before: str, after: str) -> None:
    assert after in [one.apply(before) for one in mutations("a.py", before)]


def test_every_mutant_of_a_file_parses_and_differs() -> None:
    source = Path(mutation.__file__).read_text(encoding="utf-8")
    found = mutations("mutation.py", source)
    assert len(found) > 50
    for one in found:
        mutant = one.apply(source)
        assert mutant != source
        ast.parse(mutant)


@pytest.mark.parametrize(
    "source",
    [
        "raise ValueError('a' + b)",
        "def f(a: int | None): 'text'",
        "@d(1)\ndef f(): 'text'",
        "__version__ = 3",
        "from a import b",
        "if TYPE_CHECKING:\n    x = 1",
        "x = f'{a + b}'",
        "x = 'a %s' % b",
        "x = (",
    ],
)
def test_what_tests_do_not_see_is_left_alone(source: str) -> None:
    assert mutations("a.py", source) == []


def test_only_asked_lines_are_mutated() -> None:
    assert {one.line for one in mutations("a.py", "x = 1\ny = 2\nz = 3\n", {2})} == {2}
    assert mutations("a.txt", "x = 1\n") == []
