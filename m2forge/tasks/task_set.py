"""Endless streams of tasks, split into training and held-out tasks.

A hash of a task's family and instruction decides its split, never a seed, a position, or its tools' data. So an
instruction used in training never occurs in evaluation, whatever seeds they use. One instruction in `HELD_OUT_EVERY` is
held out.

A stream is a function of its seed, its position and the requested difficulties. Its state is its position.
"""

import hashlib
import random
from typing import Literal, TypeAlias

from m2forge.errors import DataError, RecordError
from m2forge.records import Task
from m2forge.tasks.family import Family, family_name

Split: TypeAlias = Literal["train", "held_out"]

HELD_OUT_EVERY = 5
MAX_DRAWS = 2000
"""Maximum tasks drawn in search of one of the right split, or of a distinct one."""


def split_of(task: Task) -> Split:
    digest = hashlib.blake2b(f"{family_name(task)}\0{task.instruction}".encode(), digest_size=8).digest()
    return "train" if int.from_bytes(digest, "big") % HELD_OUT_EVERY else "held_out"


class TaskSet:
    """The stream of tasks of one family and split."""

    def __init__(self, family: Family, split: Split, seed: int, position: int = 0) -> None:
        """`position`: position of an earlier stream with the same arguments to resume from."""
        if position < 0:
            raise RecordError(f"TaskSet: position: expected 0 or more, received {position}")
        self._family = family
        self._split = split
        self._seed = seed
        self.position = position
        """Number of tasks drawn so far."""

    def next(self, lowest: int, highest: int) -> Task:
        """The next task, with a difficulty drawn uniformly from this range."""
        name = self._family.name
        rng = random.Random(f"{self._seed}/{name}/{self._split}/{self.position}")
        for _ in range(MAX_DRAWS):
            task = self._family.draw(rng.randint(lowest, highest), rng.getrandbits(48))
            if split_of(task) == self._split:
                self.position += 1
                return task
        raise DataError(
            f"{name}: none of {MAX_DRAWS} tasks of difficulty {lowest} to {highest} belongs to the split "
            f"{self._split!r}; choose other difficulties"
        )


class Distinct:
    """Collects `num` distinct tasks of a stream; raises if it has too few."""

    def __init__(self, family: str, split: Split, num: int, lowest: int, highest: int) -> None:
        self._family, self._split, self._num = family, split, num
        self._lowest, self._highest = lowest, highest
        self._tasks: dict[str, Task] = {}
        self._num_repeats = 0

    @property
    def is_wanting(self) -> bool:
        return len(self._tasks) < self._num

    @property
    def tasks(self) -> list[Task]:
        return list(self._tasks.values())

    def add(self, task: Task) -> None:
        self._num_repeats = self._num_repeats + 1 if task.id in self._tasks else 0
        if self._num_repeats > MAX_DRAWS:
            raise DataError(
                f"{self._family}: only {len(self._tasks)} different tasks of difficulty {self._lowest} to "
                f"{self._highest} exist in the split {self._split!r}, expected {self._num}; request fewer, or "
                "choose other difficulties"
            )
        self._tasks[task.id] = task
