"""Looks up families by name: the embedded ones, and `reasoning-gym:NAME` for datasets of that library."""

from m2forge.errors import NotFoundError, suggest
from m2forge.records import Task
from m2forge.tasks.agent import Chain, Copies, Gather
from m2forge.tasks.coding import StackProgram
from m2forge.tasks.config import GYM_PREFIX
from m2forge.tasks.family import Family, family_name
from m2forge.tasks.general import Words
from m2forge.tasks.gym import GymFamily
from m2forge.tasks.reasoning import Counters

EMBEDDED: tuple[Family, ...] = (Counters(), StackProgram(), Chain(), Gather(), Copies(), Words())


def find_family(name: str) -> Family:
    if name.startswith(GYM_PREFIX):
        return GymFamily(name.removeprefix(GYM_PREFIX))
    families = {family.name: family for family in EMBEDDED}
    if name not in families:
        raise NotFoundError(f"unknown task family {name!r}; {suggest(name, [*families, f'{GYM_PREFIX}NAME'])}")
    return families[name]


def family_of(task: Task) -> Family:
    """The family that generated the task."""
    return find_family(family_name(task))
