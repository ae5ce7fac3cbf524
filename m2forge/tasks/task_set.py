"""Endless streams of tasks, split into training and held-out tasks.

A hash of a task's family and instruction decides its split, never a seed, a position, or its tools' data. So an
instruction used in training never occurs in evaluation, whatever seeds they use. One instruction in `HELD_OUT_EVERY` is
held out. The line of a task file may decide its split instead.

A family with a fixed list of tasks repeats them: its stream is a permutation of the list after another, each task once.

A stream is a function of its seed, its position and the requested difficulties. Its state is its position.
"""

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, cast

from m2forge.errors import DataError, RecordError
from m2forge.records import Domain, JsonValue, Task
from m2forge.tasks.family import SPLIT_KEY, Family, Finite, Rejecting, family_name, labelled

Split: TypeAlias = Literal["train", "held_out"]

HELD_OUT_EVERY = 5
MAX_REJECTED = 10
"""Rejected tasks that are reported with their reason; the others are counted."""
MAX_DRAWS = 2000
"""Maximum tasks drawn in search of one of the right split, or of a distinct one."""


def split_of(task: Task) -> Split:
    if task.metadata.get(SPLIT_KEY) in ("train", "held_out"):
        return "train" if task.metadata[SPLIT_KEY] == "train" else "held_out"
    return split_by_hash(family_name(task), task.instruction)


def split_by_hash(family: str, instruction: str) -> Split:
    digest = hashlib.blake2b(f"{family}\0{instruction}".encode(), digest_size=8).digest()
    return "train" if int.from_bytes(digest, "big") % HELD_OUT_EVERY else "held_out"


@dataclass(frozen=True, slots=True)
class FamilyInfo:
    """What a run must know of a family before it draws tasks; JSON values, because a worker process finds it out."""

    name: str
    domain: Domain
    lowest: int
    """The lowest level."""
    highest: int
    counts: tuple[tuple[int, int, int], ...] | None = None
    """Level, and numbers of its train and held-out tasks, for a family with a fixed list of tasks; else None."""
    measured: tuple[str, ...] | None = None
    """Ids of the train tasks of a family whose difficulty is measured by pass rates; else None."""
    rejected: tuple[str, ...] = ()
    """Why tasks of a fixed list were left out, one message for each, up to `MAX_REJECTED`."""
    num_rejected: int = 0

    @classmethod
    def read(cls, fields: Mapping[str, JsonValue]) -> "FamilyInfo":
        """Build it from the JSON of `asdict`."""
        name, lowest, highest = fields["name"], fields["lowest"], fields["highest"]
        assert isinstance(name, str)
        assert isinstance(lowest, int)
        assert isinstance(highest, int)
        counts = cast("list[tuple[int, int, int]] | None", fields["counts"])
        measured = cast("list[str] | None", fields["measured"])
        rejected = cast("list[str]", fields["rejected"])
        return cls(
            *(name, Domain(str(fields["domain"])), lowest, highest),
            None if counts is None else tuple((level, num, held_out) for level, num, held_out in counts),
            None if measured is None else tuple(measured),
            tuple(rejected),
            cast("int", fields["num_rejected"]),
        )

    def num_listed(self, split: Split, lowest: int, highest: int) -> int | None:
        """Number of tasks of a split and a range of levels; None if the family generates them."""
        if self.counts is None:
            return None
        index = 1 if split == "train" else 2
        return sum(count[index] for count in self.counts if lowest <= count[0] <= highest)


def describe(family: Family) -> FamilyInfo:
    domain, lowest, highest = Domain(family.domain), family.levels[0], family.levels[-1]
    if not isinstance(family, Finite):
        return FamilyInfo(family.name, domain, lowest, highest)
    tasks = family.tasks
    counts = [
        (level, len(listed_tasks(tasks, "train", level, level)), len(listed_tasks(tasks, "held_out", level, level)))
        for level in family.levels
    ]
    measured = None
    if not family.has_levels:
        measured = tuple(task.id for task in tasks if split_of(task) == "train")
    rejected = tuple(family.rejected) if isinstance(family, Rejecting) else ()
    return FamilyInfo(
        *(family.name, domain, lowest, highest, tuple(counts), measured), rejected[:MAX_REJECTED], len(rejected)
    )


class TaskSet:
    """The stream of tasks of one family and split."""

    def __init__(self, family: Family, split: Split, seed: int, position: int = 0, key: str | None = None) -> None:
        """`position`: position of an earlier stream with the same arguments to resume from. `key`: the family's key in
        the run; None: its name."""
        if position < 0:
            raise RecordError(f"TaskSet: position: expected 0 or more, received {position}")
        self._family = family
        self._key = family.name if key is None else key
        self._split = split
        self._seed = seed
        self.position = position
        """Number of tasks drawn so far."""

    def next(self, lowest: int, highest: int) -> Task:
        """The next task, with a difficulty drawn uniformly from this range."""
        if isinstance(self._family, Finite):
            return self._next_listed(self._family.tasks, lowest, highest)
        name = self._family.name
        rng = random.Random(f"{self._seed}/{name}/{self._split}/{self.position}")
        for _ in range(MAX_DRAWS):
            difficulty = rng.randint(lowest, highest)
            task = labelled(self._family.draw(difficulty, rng.getrandbits(48)), self._family, self._key, difficulty)
            if split_of(task) == self._split:
                self.position += 1
                return task
        raise DataError(
            f"{name}: none of {MAX_DRAWS} tasks of difficulty {lowest} to {highest} belongs to the split "
            f"{self._split!r}; choose other difficulties"
        )

    def _next_listed(self, tasks: Sequence[Task], lowest: int, highest: int) -> Task:
        listed = listed_tasks(tasks, self._split, lowest, highest)
        if not listed:
            raise DataError(
                f"{self._family.name}: none of its {len(tasks)} tasks of difficulty {lowest} to {highest} belongs to "
                f'the split {self._split!r}; add tasks, or set "split" in their lines'
            )
        cycle, index = divmod(self.position, len(listed))
        random.Random(f"{self._seed}/{self._family.name}/{self._split}/cycle {cycle}").shuffle(listed)
        self.position += 1
        return labelled(listed[index], self._family, self._key, int(listed[index].difficulty))

    def named(self, id: str) -> Task:
        """The task of a fixed list with that id."""
        tasks = self._family.tasks if isinstance(self._family, Finite) else ()
        task = next((task for task in tasks if task.id == id), None)
        if task is None:
            raise DataError(f"{self._family.name}: no task {id!r}; was the file changed during the run?")
        return labelled(task, self._family, self._key, int(task.difficulty))


def listed_tasks(tasks: Sequence[Task], split: Split, lowest: int, highest: int) -> list[Task]:
    """The tasks of a fixed list in a split and a range of levels."""
    return [task for task in tasks if split_of(task) == split and lowest <= task.difficulty <= highest]


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
