"""Injected bugs: which faults count, and what the agent sees of the tests."""

import ast

import pytest

from m2forge.pipelines.swe.injection import broken_tests, without_functions
from m2forge.pipelines.swe.toolchains.toolchain import Outcomes, TestRun

P, F = Outcomes.PASSED, Outcomes.FAILED


@pytest.mark.parametrize(
    ("run", "broken"),
    [
        (TestRun({"a": F, "b": P, "c": P, "d": P}), ["a"]),
        (TestRun({"a": P, "b": P, "c": P, "d": P}), None),
        (TestRun({"a": F, "b": F, "c": F, "d": P}), None),
        (TestRun({"a": F, "b": P, "c": P}), None),
        (TestRun({"a": F, "b": P, "c": P, "d": P}, problem="unfinished: timeout"), None),
    ],
)
def test_a_fault_breaks_some_tests_and_not_most(run: TestRun, broken: list[str] | None) -> None:
    assert broken_tests(("a", "b", "c", "d"), run) == broken


def test_failing_functions_are_taken_out_of_visible_tests() -> None:
    source = (
        "import x\n\n@mark\n@other(\n    1\n)\ndef test_a():\n    pass\n\ndef test_b():\n    pass\n\n"
        "class TestC:\n    def test_a(self):\n        pass\n"
    )
    pruned = without_functions(source, {"test_a"})
    ast.parse(pruned)
    assert "test_a" not in pruned
    assert "@mark" not in pruned
    assert "test_b" in pruned
    assert without_functions(source, {"none"}) == source
    assert without_functions("def test_a(", {"test_a"}) == "def test_a("
