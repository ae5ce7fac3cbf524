"""The families over digits: right answers, and mistakes as often as asked for."""

import random

import pytest

from m2forge.errors import DataError
from m2forge.records import Submission
from m2forge.tasks.catalog import family_of, find_family
from m2forge.tasks.demonstration import demonstrate
from m2forge.tasks.puzzle import Joins, Raises, Replies
from m2forge.tasks.task_set import TaskSet


def test_the_copy_is_out_of_date_at_as_many_links_as_the_level() -> None:
    family = Replies()
    for level in family.levels:
        task = family.draw(level, seed=level)
        old = str(task.metadata["old"])
        assert len(set(old)) == level
        for key in "0123456789":
            source, copy = (family.call(task, tool, {"key": key}) for tool in ("look", "recall"))
            assert (source != copy) == (key in old)
            assert copy in "0123456789"
    assert family.call(task, "look", {"key": "12"}).startswith("error: no key 12; keys are 0 to 9")
    assert family.call(task, "find", {"key": "1"}).startswith("error: no tool find")


@pytest.mark.parametrize(
    ("family", "instruction", "answer", "wrong"),
    [
        (Raises(), "Raise 6 3 4 7 1 by 1, modulo ten.", "7 4 5 8 2", "7 4 5 8 1"),
        (Joins(), "Join 7 7 4 5 6 by +.", "7+7+4+5+6", "7+7+4 5+6"),
    ],
    ids=["raises", "joins"],
)
def test_one_slip_makes_an_answer_wrong(family: Raises | Joins, instruction: str, answer: str, wrong: str) -> None:
    task = family.draw(3, 7)
    assert task.instruction == instruction
    assert [family.verify(task, Submission(text)).perf for text in (answer, wrong)] == [1.0, 0.0]


@pytest.mark.parametrize(("name", "num_steps"), [("replies", 0), ("raises", 2), ("joins", 1)])
@pytest.mark.parametrize("level", [1, 3])
def test_demonstrations_are_wrong_as_often_as_stated(name: str, num_steps: int, level: int) -> None:
    """A demonstration is right if none of its `num_steps + level` steps is a mistake. A wrong link of `replies` may
    still lead to the right end, so its share is a little lower; at 2,000 draws the standard error is 1.1 points."""
    rate, tasks = 0.3, TaskSet(find_family(name), "train", 5)
    num_wrong = 0
    for seed in range(2000):
        task = tasks.next(level, level)
        answer = demonstrate(task, random.Random(seed), rate)[-1].content
        num_wrong += family_of(task).verify(task, Submission(answer)).perf < 1
    stated = 1 - (1 - rate) ** (num_steps + level)
    slack = 0.06 if name == "replies" else 0.0
    assert stated - slack - 0.045 < num_wrong / 2000 < stated + 0.045


def test_a_family_without_mistakes_makes_none() -> None:
    task = TaskSet(find_family("chain"), "train", 0).next(1, 1)
    with pytest.raises(DataError, match="chain: its demonstrations make no mistakes"):
        demonstrate(task, random.Random(0), 0.5)
