"""Goals of refactorings: what rules find in a change, and the tests that check it."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from m2forge.pipelines.stage import Rejection
from m2forge.pipelines.swe.candidate import Candidate, Text, apply_to_tree, make_candidate
from m2forge.pipelines.swe.goal import add_goals, find_goals, goal_statement
from m2forge.pipelines.swe.structure import is_renamed
from tests.pipelines.swe import projects

TWICE = (
    "def mean(numbers):\n    total = 0\n    for number in numbers:\n        total += number\n"
    "    return total / len(numbers)\n\n\n"
    "def double(numbers):\n    total = 0\n    for number in numbers:\n        total += number\n    return 2 * total\n"
)
ONCE = (
    "def add(numbers):\n    return sum(numbers)\n\n\ndef mean(numbers):\n    return add(numbers) / len(numbers)\n\n\n"
    "def double(numbers):\n    return 2 * add(numbers)\n"
)
RENAMED = TWICE.replace("def double", "def twice")


@pytest.mark.parametrize(
    ("old", "new", "texts"),
    [
        ({"a.py": TWICE}, {"a.py": RENAMED}, ["`double` of `a.py` is named `twice`, and the old name is gone."]),
        ({"a.py": "def f(x):\n    return x\n"}, {"a.py": "f = abs\n"}, []),
        ({"a.py": TWICE}, {"a.py": TWICE + "twice = double\n"}, []),
        ({"a.py": TWICE}, {"a.py": TWICE.replace("total", "result")}, []),
        (
            {"a.py": TWICE, "b.py": ""},
            {"a.py": TWICE[: TWICE.index("def double")], "b.py": TWICE[TWICE.index("def double") :]},
            ["`double` is defined in `b.py` and no longer in `a.py`."],
        ),
        (
            {"a.py": "class A:\n    def b(self):\n        pass\n\n    def c(self):\n        pass\n"},
            {"a.py": "class A:\n    def c(self):\n        pass\n"},
            ["`a.py` has no `A.b` any more."],
        ),
        (
            {"a.py": TWICE},
            {"a.py": ONCE},
            [
                "`a.py` has a `add`, which `double` calls, and `double` is shorter than it is now.",
                "`a.py` has a `add`, which `mean` calls, and `mean` is shorter than it is now.",
            ],
        ),
    ],
)
def test_goals_are_what_a_change_does_to_definitions(
    old: Mapping[str, str], new: Mapping[str, str], texts: list[str]
) -> None:
    goals = find_goals(old, new)
    assert [goal.text for goal in goals] == texts
    assert all(goal.holds(new) and not goal.holds(old) for goal in goals)


def refactoring(new: str, message: str = "Refactor mean and double") -> Candidate:
    texts = (Text("commit", message),)
    old, changed = (projects.release({**projects.OLD, "sums.py": source}) for source in (TWICE, new))
    found = make_candidate("sums-1", "sums", old, changed, {"kind": "git"}, texts)
    assert isinstance(found, Candidate), found
    return found


def test_goal_tests_fail_at_the_base_and_pass_after(tmp_path: Path) -> None:
    added = add_goals(refactoring(ONCE))
    assert not isinstance(added, Rejection)
    candidate, ids, texts = added
    assert len(ids) == len(texts) == 2
    after = apply_to_tree(candidate.base, candidate.patch)
    # A function that is called and does nothing leaves its callers as long as they were.
    padded = TWICE.replace("    total = 0\n", "    add()\n    total = 0\n") + "\n\ndef add():\n    pass\n"
    sources = [candidate.base["sums.py"].content, after["sums.py"].content, padded.encode()]
    outcomes = []
    for number, source in enumerate(sources):
        tree = apply_to_tree(candidate.base, candidate.test_patch)
        root = tmp_path / str(number)
        for path, file in tree.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(source if path == "sums.py" else file.content)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *ids]
        outcomes.append(subprocess.run(command, cwd=root, capture_output=True).returncode)
    assert outcomes == [1, 0, 1]


def test_the_statement_lists_goals_and_no_line_of_the_patch() -> None:
    added = add_goals(refactoring(ONCE, "Refactor sums\n\n    return add(numbers) / len(numbers)\nAs in 1a2b3c4d5e6f."))
    assert not isinstance(added, Rejection)
    text = goal_statement(added[0], added[2]).text
    assert "- `a" not in text
    assert "`sums.py` has a `add`, which `mean` calls" in text
    assert "return add" not in text
    assert "1a2b3c4d5e6f" not in text


def test_a_refactoring_without_a_goal_is_rejected() -> None:
    rejected = add_goals(refactoring(TWICE.replace("total", "result")))
    assert isinstance(rejected, Rejection)
    assert rejected.reason == "no verifiable goal"


def test_source_alone_may_change_if_it_is_a_refactoring() -> None:
    assert refactoring(RENAMED, "Rename a function").test_patch == ""
    with pytest.raises(AssertionError, match="tests unchanged"):
        refactoring(RENAMED, "Handle empty lists")


def test_a_name_that_stays_is_not_renamed() -> None:
    new = "def total(values):\n    return sum(values)\n"
    assert is_renamed(new, "add_up", "total")
    assert not is_renamed(f"{new}\nadd_up = total\n", "add_up", "total")
    assert not is_renamed("def add_up(values):\n    return sum(values)\n", "add_up", "total")
