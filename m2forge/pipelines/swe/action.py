"""Actions of the build model: one JSON object in, edits of an environment out; anything else is refused.

    {"action": "add", "requirement": "attrs>=20"}       also replaces a requirement of the same name
    {"action": "pin", "requirement": "attrs==23.1.0"}
    {"action": "remove", "name": "attrs"}
    {"action": "set", "variable": "LANG", "value": "C.UTF-8"}

A requirement is a name of the index with versions: pip gets no URL, no option, no marker and nothing that it would take
for a file. A variable may not change which programs, modules, options or plugins a test run has: no action leaves a
test out.
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
_KEPT = re.compile(r"(?:PYTHON|PYTEST|LD_|GIT_|PIP_|COVERAGE|BASH)\w*|PATH|HOME|ENV|SHELL|IFS|VIRTUAL_ENV|M2FORGE\w*")
"""Variables that the environment sets itself, or by which a test run could be changed."""
_VALUE = re.compile(rf"[\w .,:/=@%+-]{{0,{MAX_REQUIREMENT}}}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Edits:
    """What actions changed about an environment."""

    requirements: tuple[str, ...] = ()
    """Added or replaced."""
    removed: tuple[str, ...] = ()
    """Normalised names."""
    variables: tuple[str, ...] = ()
    """NAME=VALUE."""

    def apply(self, requirements: Sequence[str]) -> list[str]:
        """Those of the rules that no action replaced or removed."""
        changed = {*self.removed, *map(requirement_name, self.requirements)}
        return [text for text in requirements if requirement_name(text) not in changed]


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


def apply_action(edits: Edits, value: JsonValue) -> Edits:
    """The edits with one action more; raises ValueError for a value that is no action."""
    if not isinstance(value, Mapping) or value.get("action") not in _ACTIONS:
        raise ValueError(f"expected an object with action: {', '.join(_ACTIONS)}")
    keys, act = _ACTIONS[str(value["action"])]
    if set(value) != {"action", *keys} or not all(isinstance(value[key], str) for key in keys):
        raise ValueError(f"{value['action']}: expected the keys action, {', '.join(keys)}, all of them texts")
    return act(edits, *(str(value[key]) for key in keys))


def _add(edits: Edits, text: str) -> Edits:
    wanted = read_requirement(text)
    name = requirement_name(wanted)
    others = tuple(one for one in edits.requirements if requirement_name(one) != name)
    return replace(edits, requirements=(*others, wanted), removed=tuple(one for one in edits.removed if one != name))


def _pin(edits: Edits, text: str) -> Edits:
    wanted = read_requirement(text)
    if [specifier.operator for specifier in Requirement(wanted).specifier] != ["=="]:
        raise ValueError(f"pin: expected NAME==VERSION, received {text!r}")
    return _add(edits, wanted)


def _remove(edits: Edits, name: str) -> Edits:
    gone = requirement_name(read_requirement(name))
    if gone == "pytest":
        raise ValueError("remove: tests need pytest")
    rest = tuple(text for text in edits.requirements if requirement_name(text) != gone)
    return replace(edits, requirements=rest, removed=tuple(dict.fromkeys((*edits.removed, gone))))


def _set(edits: Edits, name: str, value: str) -> Edits:
    if not _VARIABLE.fullmatch(name) or _KEPT.fullmatch(name):
        raise ValueError(f"set: the variable {name!r} may not be set")
    if not _VALUE.fullmatch(value):
        raise ValueError(f"set: expected a plain value of at most {MAX_REQUIREMENT} characters, received {value!r}")
    rest = tuple(text for text in edits.variables if text.partition("=")[0] != name)
    return replace(edits, variables=(*rest, f"{name}={value}"))


_ACTIONS: dict[str, tuple[tuple[str, ...], Callable[..., Edits]]] = {
    "add": (("requirement",), _add),
    "pin": (("requirement",), _pin),
    "remove": (("name",), _remove),
    "set": (("variable", "value"), _set),
}
