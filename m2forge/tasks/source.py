"""Parses where a family comes from: the text of `source` in, its kind and parts out. It imports nothing that it names.

    chain                     an embedded family, by its name
    my_tasks.py:Stack         a class, or an instance, in a file
    package.module:Stack      the same in a module that Python can import
    tasks.jsonl               one task a line (`tasks/task_file.py`)
    reasoning-gym:NAME        a dataset of that library
    verifiers:ENV             an environment of that library
    folders:PATH              task folders (`tasks/folders/folder_family.py`)

A relative path counts from the working directory, as every path of a configuration does. Worker processes run in
another folder and receive sources with absolute paths.

A family's key identifies it in a run: its source, and for a JSONL file, task folders or an environment also the domain
under which the configuration lists it, because they may hold tasks of several domains: `tasks.jsonl#coding`.
"""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from m2forge.errors import ConfigError
from m2forge.records import Domain

GYM_PREFIX = "reasoning-gym:"
"""Prefix of the sources whose tasks and scorers come from the library reasoning-gym."""
VERIFIERS_PREFIX = "verifiers:"
"""Prefix of the sources whose tasks, rollouts and rubrics come from the library verifiers."""
FOLDERS_PREFIX = "folders:"
"""Prefix of the sources whose tasks are folders."""
FORMS = (
    f"a family's name, FILE.py:NAME, PACKAGE.MODULE:NAME, FILE.jsonl, {GYM_PREFIX}NAME, {VERIFIERS_PREFIX}ENV or "
    f"{FOLDERS_PREFIX}PATH"
)


class SourceKind(StrEnum):
    EMBEDDED = "embedded"
    FILE = "file"
    MODULE = "module"
    JSONL = "jsonl"
    GYM = "gym"
    VERIFIERS = "verifiers"
    FOLDERS = "folders"


PREFIXES = {
    GYM_PREFIX: SourceKind.GYM,
    VERIFIERS_PREFIX: SourceKind.VERIFIERS,
    FOLDERS_PREFIX: SourceKind.FOLDERS,
}


@dataclass(frozen=True, slots=True)
class Source:
    kind: SourceKind
    target: str
    """The family's name, the path, the module, the dataset or the environment."""
    attribute: str = ""
    """The name in a file or module."""
    domain: Domain | None = None
    """The domain that a key names."""


def parse_source(text: str) -> Source:
    """Parse a source, or a family's key."""
    path, mark, name = text.rpartition("#")
    domain = Domain(name) if mark and name in list(Domain) else None
    if domain is not None and path.endswith(".jsonl"):
        return Source(SourceKind.JSONL, path, domain=domain)
    for prefix, kind in PREFIXES.items():
        if text.startswith(prefix):
            named = text.removeprefix(prefix)
            if kind is not SourceKind.GYM and domain is not None:
                return Source(kind, path.removeprefix(prefix), domain=domain)
            if not named:
                raise ConfigError(f"source {text!r}: expected a name after {prefix!r}")
            return Source(kind, named)
    if text.endswith(".jsonl"):
        return Source(SourceKind.JSONL, text)
    if ":" in text:
        return parse_reference(text)
    if text.endswith(".py"):
        raise ConfigError(f"source {text!r}: expected the family's name after the file: {text}:NAME")
    if not text.isidentifier():
        raise ConfigError(f"source {text!r}: expected {FORMS}")
    return Source(SourceKind.EMBEDDED, text)


def parse_reference(text: str) -> Source:
    """Parse `FILE.py:NAME` or `PACKAGE.MODULE:NAME`."""
    target, _, name = text.rpartition(":")
    if not name.isidentifier() or not target:
        raise ConfigError(f"{text!r}: expected FILE.py:NAME or PACKAGE.MODULE:NAME")
    if target.endswith(".py"):
        return Source(SourceKind.FILE, target, name)
    if not all(part.isidentifier() for part in target.split(".")):
        raise ConfigError(f"{text!r}: expected FILE.py:NAME or PACKAGE.MODULE:NAME; a file's name ends in .py")
    return Source(SourceKind.MODULE, target, name)


def family_key(source: str, domain: Domain) -> str:
    """The key of the family that a configuration lists under a domain."""
    has_domains = parse_source(source).kind in (SourceKind.JSONL, SourceKind.VERIFIERS, SourceKind.FOLDERS)
    return f"{source}#{domain}" if has_domains else source


def located(text: str, folder: Path | None = None) -> str:
    """A source, key or reference with the absolute path of its file. `folder`: where relative paths begin; None: the
    working directory."""
    source = parse_source(text)
    if source.kind not in (SourceKind.FILE, SourceKind.JSONL, SourceKind.FOLDERS):
        return text
    path = (folder or Path.cwd()) / Path(source.target).expanduser()
    prefix = FOLDERS_PREFIX if source.kind is SourceKind.FOLDERS else ""
    return f"{prefix}{path}{text[len(prefix) + len(source.target) :]}"
