"""Streams: the same tasks for the same seed, resumed anywhere, and enough different ones to measure on."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2forge.errors import DataError, RecordError
from m2forge.records import Task
from m2forge.tasks.agent import Chain
from m2forge.tasks.catalog import EMBEDDED
from m2forge.tasks.family import Family, make_task
from m2forge.tasks.puzzle import Counters
from m2forge.tasks.task_set import Split, TaskSet, split_of
from tests.tasks.stream import distinct

SPLITS: tuple[Split, ...] = ("train", "held_out")


@given(
    family=st.sampled_from(EMBEDDED),
    split=st.sampled_from(SPLITS),
    seed=st.integers(0, 2**32),
    num_before=st.integers(0, 6),
)
def test_a_stream_goes_on_from_its_position(family: Family, split: Split, seed: int, num_before: int) -> None:
    stream = TaskSet(family, split, seed)
    tasks = [stream.next(1, 3) for _ in range(8)]
    again = TaskSet(family, split, seed)
    assert [again.next(1, 3) for _ in range(num_before)] == tasks[:num_before]
    resumed = TaskSet(family, split, seed, again.position)
    assert [resumed.next(1, 3) for _ in range(8 - num_before)] == tasks[num_before:]
    assert {split_of(task) for task in tasks} == {split}
    assert {task.difficulty for task in tasks} <= {1, 2, 3}


def test_streams_of_other_seeds_are_others() -> None:
    first, second = TaskSet(Counters(), "train", 1), TaskSet(Counters(), "train", 2)
    ids = {stream.next(3, 3).id for stream in (first, second) for _ in range(200)}
    assert len(ids) == 400


def test_all_difficulties_asked_for_come_alike() -> None:
    stream = TaskSet(Counters(), "train", 0)
    levels = [stream.next(2, 5).difficulty for _ in range(800)]
    # Each is due 200 times; five standard deviations.
    assert all(140 < levels.count(level) < 260 for level in (2, 3, 4, 5))


@pytest.mark.parametrize("family", EMBEDDED, ids=lambda family: family.name)
def test_every_family_has_two_hundred_easier_held_out_tasks(family: Family) -> None:
    held_out = distinct(TaskSet(family, "held_out", 0), 200, 1, 3)
    train = distinct(TaskSet(family, "train", 0), 2000, 1, 3)
    assert len({task.id for task in held_out}) == 200
    assert not {task.instruction for task in held_out} & {task.instruction for task in train}
    assert not {task.id for task in held_out} & {task.id for task in train}


class Same(Counters):
    """A family with a single task."""

    def draw(self, difficulty: int, seed: int) -> Task:
        return make_task(self, difficulty, "Say yes.", {})


def test_a_family_that_runs_out_of_tasks_says_so() -> None:
    other: Split = "held_out" if split_of(Same().draw(1, 0)) == "train" else "train"
    with pytest.raises(DataError, match="none of 2000 tasks of difficulty 1 to 1 belongs to the split"):
        TaskSet(Same(), other, 0).next(1, 1)
    with pytest.raises(DataError, match="only 1 different tasks"):
        distinct(TaskSet(Same(), split_of(Same().draw(1, 0)), 0), 2, 1, 1)


def test_a_position_before_the_beginning_is_refused() -> None:
    with pytest.raises(RecordError, match="position: expected 0 or more, received -1"):
        TaskSet(Chain(), "train", 0, -1)
