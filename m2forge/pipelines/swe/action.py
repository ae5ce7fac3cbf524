"""Actions of the build model: one JSON object in, edits of an environment out; anything else is refused.

    {"action": "add", "requirement": "attrs>=20"}       also replaces a requirement of the same name
    {"action": "pin", "requirement": "attrs==23.1.0"}
    {"action": "remove", "name": "attrs"}
    {"action": "set", "variable": "LANG", "value": "C.UTF-8"}

A requirement is a name of the index with versions, of PyPI (`PYPI`) or of npm (`NPM`): pip and npm get no URL, no
option, no marker and nothing that they would take for a file. A toolchain without an index takes the last action alone.
A variable may not change which programs, modules, options or plugins a test run has, nor define macros: no action
leaves a test out.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from m2forge.records import JsonValue

MAX_REQUIREMENT = 200
"""Characters, as of a variable's value."""
_ARCHIVE = re.compile(r"\.(?:zip|whl|tar|tgz|tbz|txz|tlz|tar\.\w+)$", re.IGNORECASE)
_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]{0,63}")
_KEPT = re.compile(
    r"(?:PYTHON|PYTEST|LD_|GIT_|PIP_|COVERAGE|BASH|M2FORGE|NODE|NPM|MOCHA|AVA|TAP|GO|CGO_|CARGO|RUST|MAKE|CMAKE|CTEST"
    r"|GTEST|CMOCKA|CK_|TEST|AM_)\w*|PATH|HOME|ENV|SHELL|IFS|VIRTUAL_ENV|CC|CXX|CPP|AR|LD"
)
"""Variables that the environment sets itself, or by which a test run could be changed."""
_FLAGS = re.compile(r"(?:C|CXX|CPP|LD)FLAGS|LIBS")
_FLAG = re.compile(r"-(?:std=|W|f|O|I|L|l|g|m)[\w=+./-]*|-pthread")
"""Allowed values of a variable with compiler options."""
_VALUE = re.compile(rf"[\w .,:/=@%+-]{{0,{MAX_REQUIREMENT}}}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Edits:
    """An environment's changes by actions."""

    requirements: tuple[str, ...] = ()
    """Added or replaced."""
    removed: tuple[str, ...] = ()
    """Normalised names."""
    variables: tuple[str, ...] = ()
    """NAME=VALUE."""

    def apply(self, requirements: Sequence[str], name_of: Callable[[str], str]) -> list[str]:
        """Those of the rules that no action replaced or removed."""
        changed = {*self.removed, *map(name_of, self.requirements)}
        return [text for text in requirements if name_of(text) not in changed]


NO_EDITS = Edits()


def requirement_name(text: str) -> str:
    return canonicalize_name(Requirement(text).name)


def read_requirement(text: str) -> str:
    """A requirement of the index in normal form; raises ValueError for anything else that pip would understand."""
    if len(text) > MAX_REQUIREMENT:
        raise ValueError(f"expected a requirement of at most {MAX_REQUIREMENT} characters")
    try:
        requirement = Requirement(text)
    except InvalidRequirement as error:
        raise ValueError(f"expected NAME with versions, received {text!r}") from error
    shown = str(requirement)
    if requirement.url is not None or requirement.marker is not None:
        raise ValueError(f"expected no URL and no marker, received {text!r}")
    # pip takes a name like attrs.zip, or attrs===1.zip, for a file of the working directory.
    if _ARCHIVE.search(shown) or _ARCHIVE.search(requirement.name) or "===" in shown:
        raise ValueError(f"expected a requirement of the index, received {text!r}")
    return shown


_MODULE = re.compile(r"((?:@[a-z0-9~][\w.~-]*/)?[a-z0-9~][\w.~-]*)(?:@(\*|(?:\^|~|>=|<=|=)?\d[\w.+-]*))?", re.ASCII)


def read_module(text: str) -> str:
    """A requirement of npm in normal form; raises ValueError for anything else that npm would understand."""
    found = _MODULE.fullmatch(text) if len(text) <= MAX_REQUIREMENT else None
    if found is None or _ARCHIVE.search(text):
        raise ValueError(f"expected NAME or NAME@VERSION, received {text[:MAX_REQUIREMENT]!r}")
    return f"{found[1]}@{found[2] or '*'}"


def module_name(text: str) -> str:
    return text.rpartition("@")[0] or text


@dataclass(frozen=True, slots=True)
class Index:
    """The syntax of a package index's requirements."""

    read: Callable[[str], str]
    """A requirement in normal form; raises ValueError."""
    name_of: Callable[[str], str]
    exact: re.Pattern[str]
    """Searched in a requirement that one version alone fulfils."""
    examples: tuple[str, str]
    """A requirement, and one that one version alone fulfils."""
    needed: frozenset[str] = frozenset()
    """Names without which no test runs."""


PYPI = Index(
    read_requirement,
    requirement_name,
    re.compile(r"^[^<>=~!,]*==[^<>=~!,*]+$"),
    ("NAME>=VERSION", "NAME==VERSION"),
    frozenset({"pytest"}),
)
NPM = Index(read_module, module_name, re.compile(r"@\d+\.\d+\.\d+[\w.+-]*$"), ("NAME@^VERSION", "NAME@VERSION"))


def apply_action(edits: Edits, value: JsonValue, index: Index | None) -> Edits:
    """The edits with one action more; raises ValueError for a value that is no action."""
    known = [name for name in _ACTIONS if index is not None or name == "set"]
    if not isinstance(value, Mapping) or value.get("action") not in known:
        raise ValueError(f"expected an object with action: {', '.join(known)}")
    keys, act = _ACTIONS[str(value["action"])]
    if set(value) != {"action", *keys} or not all(isinstance(value[key], str) for key in keys):
        raise ValueError(f"{value['action']}: expected the keys action, {', '.join(keys)}, all of them texts")
    return act(edits, index, *(str(value[key]) for key in keys))


def _add(edits: Edits, index: Index, text: str) -> Edits:
    wanted = index.read(text)
    name = index.name_of(wanted)
    others = tuple(one for one in edits.requirements if index.name_of(one) != name)
    return replace(edits, requirements=(*others, wanted), removed=tuple(one for one in edits.removed if one != name))


def _pin(edits: Edits, index: Index, text: str) -> Edits:
    wanted = index.read(text)
    if not index.exact.search(wanted):
        raise ValueError(f"pin: expected {index.examples[1]}, received {text!r}")
    return _add(edits, index, wanted)


def _remove(edits: Edits, index: Index, name: str) -> Edits:
    gone = index.name_of(index.read(name))
    if gone in index.needed:
        raise ValueError(f"remove: tests need {gone}")
    rest = tuple(text for text in edits.requirements if index.name_of(text) != gone)
    return replace(edits, requirements=rest, removed=tuple(dict.fromkeys((*edits.removed, gone))))


def _set(edits: Edits, index: Index | None, name: str, value: str) -> Edits:
    if not _VARIABLE.fullmatch(name) or _KEPT.fullmatch(name):
        raise ValueError(f"set: the variable {name!r} may not be set")
    if not _VALUE.fullmatch(value):
        raise ValueError(f"set: expected a plain value of at most {MAX_REQUIREMENT} characters, received {value!r}")
    if _FLAGS.fullmatch(name) and not all(map(_FLAG.fullmatch, value.split())):
        raise ValueError(f"set: expected options like -std=gnu99 and no macros in {name}, received {value!r}")
    rest = tuple(text for text in edits.variables if text.partition("=")[0] != name)
    return replace(edits, variables=(*rest, f"{name}={value}"))


_ACTIONS: dict[str, tuple[tuple[str, ...], Callable[..., Edits]]] = {
    "add": (("requirement",), _add),
    "pin": (("requirement",), _pin),
    "remove": (("name",), _remove),
    "set": (("variable", "value"), _set),
}
