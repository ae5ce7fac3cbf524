"""Opens families by their sources (`tasks/source.py`): embedded ones by name, and everything else that a source names.

In a run only worker processes open sources other than embedded names, because that runs users' code. Families of files
are imported when one is opened: with their configurations they take half of the time that a worker takes to start.
"""

from functools import cache
from pathlib import Path
from typing import cast

from m2forge.errors import ConfigError, NotFoundError, suggest
from m2forge.records import Domain, Task
from m2forge.tasks.agent import Chain, Copies, Gather
from m2forge.tasks.family import Family, family_key_of
from m2forge.tasks.library_family import GymFamily, VerifiersFamily
from m2forge.tasks.puzzle import Counters, Joins, Raises, Replies, StackProgram, Words
from m2forge.tasks.source import FORMS, Source, SourceKind, located, parse_source
from m2forge.tasks.user_code import load_object

EMBEDDED: tuple[Family, ...] = (
    Counters(),
    StackProgram(),
    Chain(),
    Gather(),
    Copies(),
    Words(),
    Replies(),
    Raises(),
    Joins(),
)
METHODS = ("draw", "verify", "tools", "call", "latency_s", "demonstrate")


def find_family(source: str) -> Family:
    """The family of a source, or of a key; relative paths count from the working directory."""
    parsed = parse_source(source)
    if parsed.kind is SourceKind.EMBEDDED:
        families = {family.name: family for family in EMBEDDED}
        if parsed.target not in families:
            raise NotFoundError(f"unknown task family {source!r}; {suggest(source, families)}; or give {FORMS}")
        return families[parsed.target]
    if parsed.kind is SourceKind.GYM:
        return GymFamily(parsed.target)
    return _open(located(source))


def family_of(task: Task) -> Family:
    """The family that generated the task."""
    return find_family(family_key_of(task))


@cache
def _open(source: str) -> Family:
    parsed = parse_source(source)
    match parsed.kind:
        case SourceKind.JSONL:
            from m2forge.tasks.task_file import JsonlFamily

            return JsonlFamily(Path(parsed.target), parsed.domain)
        case SourceKind.FOLDERS:
            from m2forge.tasks.folders.folder_family import FolderFamily

            return FolderFamily(Path(parsed.target), parsed.domain)
        case SourceKind.VERIFIERS:
            return VerifiersFamily(parsed.target, parsed.domain)
    return _user_family(source, parsed)


def _user_family(source: str, parsed: Source) -> Family:
    found = load_object(source)
    if isinstance(found, type):
        try:
            found = found()
        except Exception as error:
            raise ConfigError(
                f"{source}: {parsed.attribute}() raised {type(error).__name__}: {error}; a family is created without "
                "arguments"
            ) from error
    missing = [name for name in ("name", "domain", "levels", *METHODS) if not hasattr(found, name)]
    if missing:
        raise ConfigError(
            f"{source}: a family without {', '.join(missing)}; derive it from m2forge.Family, which has defaults for "
            "all but name, domain, levels, draw and verify"
        )
    family = cast("Family", found)
    name, domain, levels = cast("tuple[object, object, object]", (family.name, family.domain, family.levels))
    if not isinstance(name, str) or domain not in list(Domain):
        raise ConfigError(
            f"{source}: name and domain: expected text and one of {', '.join(Domain)}, received {name!r} and {domain!r}"
        )
    if not isinstance(levels, range) or not levels or levels.step != 1:
        raise ConfigError(f"{source}: levels: expected a range such as range(1, 4), received {levels!r}")
    return family
