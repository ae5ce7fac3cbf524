"""Tasks of code review: what the agent sees, where a fault is, and what answers have as reward."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from m2forge.pipelines.swe.candidate import Candidate, apply_to_tree
from m2forge.pipelines.swe.code_review import (
    Review,
    clean_review,
    fault_lines,
    injected_review,
    natural,
    reversed_review,
)
from m2forge.pipelines.swe.mutation import mutations
from m2forge.pipelines.swe.review_answer import run, score
from tests.pipelines.swe import projects

CLAMPED = (
    projects.FIXED + "\n\ndef clamp(number, low, high):\n    if number < low:\n        return low\n    return high\n"
)
FAULT = {"file": "sums.py", "lines": [4, 5]}


@pytest.mark.parametrize(
    ("answer", "fault", "reward"),
    [
        ({"fault": False}, None, 1),
        ({"fault": True, "file": "sums.py", "line": 4}, None, 0),
        ({"fault": False}, FAULT, 0),
        ({"fault": True}, FAULT, 0),
        ({"fault": True, "file": "sums.py", "line": 5}, FAULT, 1),
        ({"fault": True, "file": "./sums.py", "line": 4}, FAULT, 1),
        ({"fault": True, "file": "sums.py", "line": 6}, FAULT, 0),
        ({"fault": True, "file": "other.py", "line": 4}, FAULT, 0),
        ({"fault": True, "file": "sums.py", "line": [4, 5, 6]}, FAULT, 0),
        ({"fault": True, "file": "sums.py", "line": "4"}, FAULT, 0),
        ({"fault": 1, "file": "sums.py", "line": 4}, FAULT, 0),
        ([{"fault": False}, {"fault": True, "file": "sums.py", "line": 4}], FAULT, 0),
        (None, None, 0),
    ],
)
def test_an_answer_needs_the_place_of_the_fault(answer: object, fault: dict[str, object] | None, reward: float) -> None:
    assert score(answer, fault) == reward


def reviews() -> list[Review]:
    """As many changes with a fault as without."""
    candidate = projects.candidate(CLAMPED)
    clean = clean_review(candidate)
    source = clean.files["sums.py"] or ""
    lines = fault_lines(clean.diff)["sums.py"]
    found = [plain for one in mutations("sums.py", source, lines) if (plain := natural(source, one)) is not None]
    faulty = [injected_review(candidate, "sums.py", mutation) for mutation in found]
    taken_back = reversed_review(projects.candidate())
    assert taken_back is not None
    faulty.append(taken_back)
    assert len(faulty) >= 5
    return [*faulty, *[clean] * len(faulty)]


def first_line(review: Review) -> dict[str, object]:
    return {"fault": True, "file": "sums.py", "line": min(fault_lines(review.diff)["sums.py"])}


def test_one_answer_for_all_changes_does_not_pay() -> None:
    generator = random.Random(0)

    def guess(review: Review) -> dict[str, object]:
        lines = sorted(fault_lines(review.diff)["sums.py"])
        place = {"fault": True, "file": "sums.py", "line": generator.choice(lines)}
        return generator.choice([place, {"fault": False}])

    def know(review: Review) -> dict[str, object]:
        lines = None if review.fault is None else review.fault["lines"]
        assert lines is None or isinstance(lines, list)
        return {"fault": False} if lines is None else {"fault": True, "file": "sums.py", "line": lines[0]}

    def mean(policy: Callable[[Review], object]) -> float:
        rewards = [score(policy(review), review.fault) for review in reviews() for _ in range(20)]
        return sum(rewards) / len(rewards)

    assert mean(know) == 1
    assert mean(lambda review: {"fault": False}) == 0.5
    assert mean(first_line) <= 0.5
    assert mean(guess) < 0.5
    assert mean(lambda review: None) == 0


def test_a_change_taken_back_shows_its_lines_alone() -> None:
    review = reversed_review(projects.candidate())
    assert review is not None
    assert review.fault == {"file": "sums.py", "lines": [2]}
    assert "+    return sum(numbers[1:])" in review.diff
    # The changelog would tell that a fix is taken back.
    assert "CHANGES" not in review.diff
    assert "tests/" not in review.diff


def test_removed_lines_are_at_their_neighbours() -> None:
    diff = "--- a/a.py\n+++ b/a.py\n@@ -1,4 +1,3 @@\n one\n-two\n three\n four\n@@ -9,2 +8,2 @@\n-nine\n+9\n ten\n"
    assert fault_lines(diff) == {"a.py": {1, 2, 8}}


def test_an_injected_fault_is_where_the_answer_says() -> None:
    candidate: Candidate = projects.candidate(CLAMPED)
    for review in (one for one in reviews() if one.kind == "injected"):
        assert review.fault is not None
        text = review.files["sums.py"] or ""
        after = apply_to_tree(candidate.base, candidate.patch)["sums.py"].content.decode()
        changed = [
            number
            for number, (old, new) in enumerate(zip(after.splitlines(), text.splitlines(), strict=True), 1)
            if old != new
        ]
        assert changed == review.fault["lines"]


@pytest.mark.parametrize(
    ("source", "kind", "texts"),
    [
        ("x = a == b\n", "compare", ["a != b"]),
        ("if a and b:\n    f()\n", "logic", ["a or b", "not (a and b)"]),
        ("if ready:\n    f()\n", "logic", ["not ready"]),
        ("x = y == (a or b)\n", "logic", ["a and b"]),
        ("x = a or b and c\n", "logic", []),  # Without brackets these are other programs.
        ("x = not a\n", "logic", []),
        ("x = 3\n", "constant", ["4"]),
        ("f(a)\n", "removed", []),
    ],
)
def test_mutations_are_spelled_as_by_a_person(source: str, kind: str, texts: list[str]) -> None:
    found = [natural(source, one) for one in mutations("a.py", source) if one.kind == kind]
    assert [one.text for one in found if one is not None] == texts


def test_a_review_that_is_a_link_or_no_json_has_nothing(tmp_path: Path) -> None:
    repository, tests = tmp_path / "repository", tmp_path / "tests"
    repository.mkdir()
    tests.mkdir()
    (tests / "fault.json").write_text("null")
    assert run(repository, tests) == 0
    (repository / "review.json").write_text("{")
    assert run(repository, tests) == 0
    (repository / "review.json").write_text(json.dumps({"fault": False}))
    assert run(repository, tests) == 1
    (repository / "review.json").rename(repository / "other.json")
    (repository / "review.json").symlink_to("other.json")
    assert run(repository, tests) == 0
