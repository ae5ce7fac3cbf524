"""Failing twins of test files: each test fails for honest code, and passes where the result is forged."""

import pytest

from m2forge.tasks.folders.verification import failing_twin, names_of_tests

SOURCE = '''"""Tests."""
from __future__ import annotations

import unittest

import pytest


def test_equal(result=4):
    assert result == 4


def test_loop():
    for value in []:
        assert value == 1


def test_raises():
    with pytest.raises(AssertionError):
        assert 1 == 2


def test_early():
    if True:
        return
    assert 1 == 1


def test_truth():
    assert [1]


async def test_async():
    assert 1 == 1


class Other(unittest.TestCase):
    def test_method(self):
        self.assertEqual(1, 1)


def helper():
    assert 1 == 1
'''


class Anything:
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]  # as the twin's object


def loaded(source: str) -> dict[str, object]:
    names: dict[str, object] = {}
    exec(compile(source, "twin", "exec"), names)
    return names


def test_names_are_those_of_functions_and_methods() -> None:
    wanted = ["test_equal", "test_loop", "test_raises", "test_early", "test_truth", "test_async", "test_method"]
    assert names_of_tests(SOURCE) == wanted
    assert names_of_tests("def test_(:") == []


@pytest.mark.parametrize("name", ["test_equal", "test_loop", "test_raises", "test_early", "test_truth"])
def test_a_twin_fails_for_honest_results(name: str) -> None:
    twin = failing_twin(SOURCE)
    assert twin is not None
    loaded(SOURCE)[name]()  # type: ignore[operator]  # the test as it was written passes
    with pytest.raises(AssertionError):
        loaded(twin)[name]()  # type: ignore[operator]


def test_methods_and_coroutines_have_twins_too() -> None:
    names = loaded(str(failing_twin(SOURCE)))
    with pytest.raises(AssertionError):
        names["Other"]("test_method").test_method()  # type: ignore[operator]
    with pytest.raises(AssertionError):
        names["test_async"]().send(None)  # type: ignore[operator]
    names["helper"]()  # type: ignore[operator]  # Other functions stay as they are.


def test_a_result_that_equals_everything_passes_its_twin() -> None:
    loaded(str(failing_twin(SOURCE)))["test_equal"](Anything())  # type: ignore[operator]


def test_a_file_without_tests_has_no_twin() -> None:
    assert failing_twin("def helper():\n    assert 1 == 2\n") is None
    assert failing_twin("not Python") is None
