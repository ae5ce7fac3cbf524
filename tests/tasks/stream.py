"""Tasks drawn in the test's own process, as a runner's worker draws them."""

import asyncio

from m2forge.records import Task
from m2forge.tasks.catalog import find_family
from m2forge.tasks.curriculum import Assignment, Curriculum
from m2forge.tasks.task_set import Distinct, Split, TaskSet


async def draw_here(
    family: str, split: Split, seed: int, position: int, lowest: int, highest: int, id: str = ""
) -> Task:
    """As `TaskRunner.next_task`."""
    tasks = TaskSet(find_family(family), split, seed, position, family)
    return tasks.named(id) if id else tasks.next(lowest, highest)


def draw_batch(curriculum: Curriculum) -> list[Assignment]:
    return asyncio.run(curriculum.draw_batch(draw_here))


def distinct(stream: TaskSet, num: int, lowest: int, highest: int) -> list[Task]:
    """As `TaskRunner.distinct`."""
    found = Distinct("stream", "held_out", num, lowest, highest)
    while found.is_wanting:
        found.add(stream.next(lowest, highest))
    return found.tasks
