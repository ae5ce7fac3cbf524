"""Verification of written tests: which count, and when they tell right code from wrong."""

import ast

import pytest

from m2forge.pipelines.swe.testing import respell
from m2forge.pipelines.swe.written_tests import RUNNER_FILES, counted, judge, outcomes

P, F, S = "passed", "failed", "skipped"
FILE = "tests/test_a.py"
OLD = "def test_old():\n    assert f(1) == 1\n"
NEW = OLD + "\n\nclass TestNew:\n    def test_new(self):\n        assert f(2) == 2\n"
A, B = f"{FILE}::test_old", f"{FILE}::TestNew::test_new"


def test_only_tests_that_the_base_lacks_count() -> None:
    assert counted({A, B}, {A}, {FILE: OLD}, {FILE: NEW}) == {B}
    # Other words, other parameters, another file.
    assert counted({A}, {A}, {FILE: OLD}, {FILE: OLD.replace("1", "3")}) == {A}
    assert counted({f"{A}[1]", f"{A}[2]"}, {f"{A}[1]"}, {FILE: OLD}, {FILE: OLD}) == {f"{A}[2]"}
    assert counted({A}, set(), {}, {FILE: OLD}) == {A}
    assert counted({A}, {A}, {FILE: OLD}, {FILE: f"# More.\n{OLD}"}) == set()


def test_a_changed_test_of_a_base_class_counts_where_it_runs() -> None:
    old = "class Base:\n    def test_a(self): assert 1\n    def test_b(self): pass\n\nclass TestOne(Base): pass\n"
    ids = {f"{FILE}::TestOne::test_a", f"{FILE}::TestOne::test_b"}
    assert counted(ids, ids, {FILE: old}, {FILE: old.replace("1", "2")}) == {f"{FILE}::TestOne::test_a"}
    own = old.replace("(Base): pass", "(Base):\n    def test_a(self): pass")
    assert counted(ids, ids, {FILE: own}, {FILE: own.replace("1", "2")}) == set()


@pytest.mark.parametrize(
    ("right", "wrong", "mutants", "is_rewarded"),
    [
        ([{B: P}, {B: P}], [{B: F}], [{B: F}, {B: F}, {B: P}], True),
        ([{B: P}, {B: P}], [{}], [{}, {B: F}, {B: P}], True),  # It cannot be imported there.
        ([{B: P}, {B: P}], [{B: P}], [{B: F}, {B: F}, {B: F}], False),  # Passes everywhere but at mutants.
        ([{B: P}, {B: P}], [{B: F}], [{B: F}, {B: P}, {B: P}], False),  # Finds too few.
        ([{B: P}, {B: F}], [{B: F}], [{B: F}, {B: F}, {B: F}], False),  # Fails at a spelling.
        ([{B: F}, {B: F}], [{B: F}], [{B: F}, {B: F}, {B: F}], False),  # Fails everywhere.
        ([{B: S}, {B: S}], [{B: F}], [{B: F}, {B: F}, {B: F}], False),
        ([{B: P}, {B: P}], [{B: F}], [{B: S}, {B: S}, {B: S}], False),
        ([{A: P}, {A: P}], [{A: F}], [{A: F}, {A: F}, {A: F}], False),  # An older test.
        ([{B: P}, None], [{B: F}], [{B: F}, {B: F}, {B: F}], False),  # Over time.
        ([{B: P}, {B: P}], [None], [{B: F}, {B: F}, {B: F}], False),
        ([{B: P}, {B: P}], [{B: F}], [{B: F}, None, None], False),
        ([{B: P, A: F}, {B: P, A: F}], [{B: F}], [{B: F}, {B: F}, {B: F}], True),  # An older test that always fails.
        ([{}, {}], [{}], [{}, {}, {}], False),
    ],
)
def test_written_tests_must_tell_right_from_wrong(
    right: list[dict[str, str] | None],
    wrong: list[dict[str, str] | None],
    mutants: list[dict[str, str] | None],
    is_rewarded: bool,
) -> None:
    runs = {"right": right, "wrong": wrong, "mutants": mutants}
    assert judge(runs, {A}, {FILE: OLD}, {FILE: NEW}, 2) is is_rewarded


def test_a_report_gives_ids_of_pytest_and_no_entities() -> None:
    report = (
        '<testsuites><testcase classname="tests.test_a.TestNew" name="test_new"/>'
        '<testcase classname="tests.test_a" name="test_old"><failure/></testcase>'
        '<testcase classname="tests.test_b" name="test_other"/></testsuites>'
    )
    assert outcomes(report.encode(), [FILE]) == {A: F, B: P}
    assert outcomes(f"<!DOCTYPE a>{report}".encode(), [FILE]) == {}
    assert outcomes(b"", [FILE]) == {}


@pytest.mark.parametrize("path", ["conftest.py", "tests/conftest.py", "pytest.ini", "tests/sitecustomize.py", "a.pth"])
def test_files_that_decide_how_tests_run_are_left_out(path: str) -> None:
    assert RUNNER_FILES.search(path)
    assert not RUNNER_FILES.search(FILE)


def test_another_spelling_is_the_same_program() -> None:
    source = (
        "import math\n\nclass A:\n    size: int = 3\n    def __init__(self, x):\n        super().__init__()\n"
        "        self.x: int = x  # kept\n    async def later(self):\n        return self.x\n"
        "def f(a, *rest, key=1):\n    total = sum(rest) + math.floor(a)\n    def inner():\n        nonlocal total\n"
        "        total += key\n        return [value * 2 for value in rest if value != key]\n"
        "    match a:\n        case int(real=3) | math.pi:\n            return total\n"
        "    if a > key:\n        return inner()\n"
        "    return A(f'{a}').x, total\n"
    )
    other = respell("a.py", source)
    assert "sum(rest)" not in other
    assert "value * 2" not in other
    assert "kept" not in other
    results = []
    for text in (source, other):
        space: dict[str, object] = {}
        exec(compile(ast.parse(text), "a.py", "exec"), space)
        f = space["f"]
        assert callable(f)
        results.append([f(3), f(4, 1, 2), f(0, 5, key=7), f(4, 4, key=1)])
    assert results[0] == results[1]
    assert respell("a.txt", source) == source
    assert respell("broken.py", "def f(") == "def f("
