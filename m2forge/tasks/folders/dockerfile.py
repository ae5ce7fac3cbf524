"""Reads a Dockerfile: its text in, the base image and the instructions of its one stage out.

Only what a sandbox can do without a container runtime is read: FROM, COPY and ADD of files of the context, RUN,
WORKDIR, ENV, ARG and USER. Instructions that describe how a container is started (CMD, ENTRYPOINT, EXPOSE, LABEL, …)
do not matter to a sandbox. Several stages and remote sources are refused by name: they need `podman build`.
"""

import json
import posixpath
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from m2forge.errors import DataError

IGNORED = ("CMD", "ENTRYPOINT", "EXPOSE", "LABEL", "MAINTAINER", "HEALTHCHECK", "STOPSIGNAL", "VOLUME", "ONBUILD")
_VARIABLE = re.compile(r"\\\$|\$\{(\w+)(?::([-+])([^}]*))?\}|\$(\w+)")


class NeedsRuntimeError(DataError):
    """A Dockerfile that only a container runtime can build."""


@dataclass(frozen=True, slots=True)
class Copy:
    sources: tuple[str, ...]
    """Paths in the context, perhaps with wildcards."""
    target: str
    """An absolute path; with `/` at its end a folder."""
    owner: str | None


@dataclass(frozen=True, slots=True)
class Run:
    argv: tuple[str, ...]
    workdir: str
    user: str | None
    env: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Dockerfile:
    base: str
    steps: tuple[Copy | Run, ...] = ()
    workdir: str | None = None
    user: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)


def read_dockerfile(path: Path) -> Dockerfile:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    reader = _Reader(path)
    for number, line in _logical_lines(text):
        word, _, rest = line.partition(" ")
        reader.take(word.upper(), rest.strip(), number)
    return reader.finish()


def _logical_lines(text: str) -> list[tuple[int, str]]:
    """Instructions with the number of their first line; continued lines are joined, comments left out."""
    found: list[tuple[int, str]] = []
    parts: list[str] = []
    first = 0
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#") or (not parts and not line.strip()):
            continue
        first = first if parts else number
        is_continued = line.rstrip().endswith("\\")
        parts.append(line.rstrip().removesuffix("\\").strip() if is_continued else line.strip())
        if not is_continued:
            found.append((first, " ".join(part for part in parts if part)))
            parts = []
    if parts:
        found.append((first, " ".join(part for part in parts if part)))
    return found


class _Reader:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._base: str | None = None
        self._steps: list[Copy | Run] = []
        self._workdir: str | None = None
        self._user: str | None = None
        self._env: dict[str, str] = {}
        self._args: dict[str, str] = {}

    def take(self, name: str, rest: str, number: int) -> None:
        place = f"{self._path}:{number}"
        if "<<" in rest and name in ("RUN", "COPY", "ADD"):
            raise NeedsRuntimeError(f"{place}: here documents need podman")
        match name:
            case "FROM":
                self._take_from(self._expand(rest), place)
            case "ARG":
                key, _, value = rest.partition("=")
                self._args[key.strip()] = self._expand(_unquoted(value))
            case "ENV":
                self._env |= {key: self._expand(value) for key, value in _pairs(rest, place).items()}
            case "WORKDIR":
                self._workdir = posixpath.normpath(posixpath.join(self._workdir or "/", self._expand(_unquoted(rest))))
            case "USER":
                self._user = self._expand(rest)
            case "COPY" | "ADD":
                self._take_copy(rest, place)
            case "RUN":
                self._take_run(rest, place)
            case _ if name not in (*IGNORED, "SHELL"):
                raise NeedsRuntimeError(f"{place}: {name} needs podman")

    def finish(self) -> Dockerfile:
        if self._base is None:
            raise DataError(f"{self._path}: expected FROM, and there is none")
        return Dockerfile(self._base, tuple(self._steps), self._workdir, self._user, self._env)

    def _take_from(self, rest: str, place: str) -> None:
        words = [word for word in rest.split() if not word.startswith("--")]
        if self._base is not None:
            raise NeedsRuntimeError(f"{place}: several stages need podman")
        if not words:
            raise DataError(f"{place}: expected the name of an image after FROM")
        self._base = words[0]

    def _take_copy(self, rest: str, place: str) -> None:
        words = _words(rest, place)
        options = [word for word in words if word.startswith("--")]
        paths = [self._expand(word) for word in words if not word.startswith("--")]
        owner = next((option.partition("=")[2] for option in options if option.startswith("--chown=")), None)
        if unknown := [option for option in options if not option.startswith(("--chown=", "--link"))]:
            raise NeedsRuntimeError(f"{place}: {unknown[0]} needs podman")
        if len(paths) < 2 or any("://" in path or path.startswith("git@") for path in paths[:-1]):
            raise NeedsRuntimeError(f"{place}: expected files of the context and a target; other sources need podman")
        joined = posixpath.join(self._workdir or "/", paths[-1])
        target = posixpath.normpath(joined) + ("/" if paths[-1].endswith(("/", ".")) else "")
        self._steps.append(Copy(tuple(paths[:-1]), target, owner))

    def _take_run(self, rest: str, place: str) -> None:
        if rest.startswith("--"):
            raise NeedsRuntimeError(f"{place}: {rest.split()[0]} needs podman")
        argv: tuple[str, ...] = ("/bin/sh", "-c", rest)
        if rest.startswith("["):
            argv = tuple(_words(rest, place))
        self._steps.append(Run(argv, self._workdir or "/", self._user, self._args | self._env))

    def _expand(self, text: str) -> str:
        values = self._args | self._env

        def replace(match: re.Match[str]) -> str:
            if match[0] == "\\$":
                return "$"
            name, rule, other = match[1] or match[4], match[2], match[3] or ""
            value = values.get(name, "")
            return {"-": value or other, "+": other if value else ""}.get(rule or "", value)

        return _VARIABLE.sub(replace, text)


def _words(text: str, place: str) -> list[str]:
    try:
        if text.startswith("["):
            return [str(word) for word in json.loads(text)]
        return shlex.split(text)
    except ValueError as error:
        raise DataError(f"{place}: cannot be read: {error}") from error


def _pairs(text: str, place: str) -> dict[str, str]:
    words = _words(text, place)
    if words and "=" not in words[0]:
        return {words[0]: text.partition(words[0])[2].strip()}
    return {key: value for key, _, value in (word.partition("=") for word in words)}


def _unquoted(text: str) -> str:
    text = text.strip()
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text
