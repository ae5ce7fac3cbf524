"""TOML text in, frozen and validated pydantic models out, and back again.

Each package derives its configuration from `Config`. Nothing is coerced (an integer is accepted as a float, no other
type changes), an unknown key is an error that suggests the closest name, and all problems of one source are reported in
one `ConfigError`: source, dotted key, value received, what is expected. `dump` writes the resolved configuration,
defaults included, as TOML that loads back equal.
"""

import copy
import json
import tomllib
import typing
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, datetime, time
from pathlib import Path
from types import UnionType
from typing import Annotated, ClassVar, TypeAlias, TypeGuard, TypeVar

import tomli_w
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from m2forge.errors import ConfigError, suggest
from m2forge.files import write_atomic

TomlValue: TypeAlias = str | int | float | bool | datetime | date | time | list["TomlValue"] | dict[str, "TomlValue"]
Overrides: TypeAlias = Mapping[tuple[str, ...], TomlValue]

_LONGEST_VALUE = 80


class Config(BaseModel):
    """Base of every configuration: strict, frozen, no unknown keys."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        validate_default=True,
        protected_namespaces=(),
        allow_inf_nan=False,
    )

    moved_keys: ClassVar[Mapping[str, str]] = {}
    """Removed keys of this table → the dotted key that replaces each, named in the error for the old one."""


ConfigT = TypeVar("ConfigT", bound=Config)


def load(kind: type[ConfigT], path: Path, overrides: Sequence[str] = ()) -> ConfigT:
    """Load `path` as a `kind`, with `overrides` such as `"model.layers=4"` applied."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text: {error}") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); give the path of a TOML file") from error
    return build(kind, data, overrides, origin=str(path))


def build(
    kind: type[ConfigT], data: Mapping[str, TomlValue], overrides: Sequence[str] = (), origin: str = "configuration"
) -> ConfigT:
    """Validate `data` as a `kind`, with `overrides` applied. `origin` names the source of `data` in errors."""
    parsed = parse_overrides(overrides)
    merged = copy.deepcopy(dict(data))
    for path, value in parsed.items():
        _place(merged, path, value)
    try:
        # Strict validation of JSON accepts enums as strings and tuples as lists; that of objects does not.
        return kind.model_validate_json(json.dumps(merged, default=str))
    except ValidationError as error:
        problems = [_describe(kind, merged, details, parsed, origin) for details in error.errors()]
    unique = list(dict.fromkeys(problems))
    if len(unique) == 1:
        raise ConfigError(unique[0])
    raise ConfigError("\n  ".join([f"{origin}: {len(unique)} problems", *unique]))


def parse_overrides(overrides: Iterable[str]) -> dict[tuple[str, ...], TomlValue]:
    """Parse `a.b=c` to `{("a", "b"): c}`. The value is TOML if it parses as such, else a bare string."""
    parsed: dict[tuple[str, ...], TomlValue] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        path = _parse_key(key)
        if not equals or not path:
            raise ConfigError(f"--set {override}: expected KEY=VALUE with a dotted key, such as model.layers=4")
        parsed[path] = _parse_value(text)
    return parsed


def dump(config: Config) -> str:
    """The resolved configuration as TOML. A field that is None is omitted, so its default must be None."""
    text = _to_toml(config)
    if _to_toml(build(type(config), tomllib.loads(text))) != text:
        raise ConfigError(
            f"{type(config).__name__} does not survive TOML: a field is None though its default is not; "
            "give the field the default None or another value"
        )
    return text


def write_resolved(config: Config, path: Path) -> None:
    """Write `dump(config)` to `path`, atomically."""
    write_atomic(path, dump(config))


def _to_toml(config: Config) -> str:
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))


def _parse_key(key: str) -> tuple[str, ...]:
    """The parts of a TOML key, including quoted ones; empty if it is not a key."""
    if "\n" in key:
        return ()
    try:
        level: dict[str, TomlValue] | TomlValue = tomllib.loads(f"{key} = 0")
    except tomllib.TOMLDecodeError:
        return ()
    path = []
    while isinstance(level, dict) and level:
        (part,) = level
        path.append(part)
        level = level[part]
    return tuple(path)


def _parse_value(text: str) -> TomlValue:
    try:
        document: dict[str, TomlValue] = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return document["value"] if len(document) == 1 else text


def _place(data: dict[str, TomlValue], path: tuple[str, ...], value: TomlValue) -> None:
    """Set one override, creating tables as needed; existing lists are indexed."""
    level: TomlValue = data
    for depth, part in enumerate(path):
        last = depth == len(path) - 1
        where = ".".join(path[:depth])
        if isinstance(level, dict):
            if last:
                level[part] = value
            else:
                level = level.setdefault(part, {})
        elif isinstance(level, list):
            if not part.isdecimal() or int(part) >= len(level):
                raise ConfigError(f"--set {'.'.join(path)}: {where} is a list of {len(level)}, no item {part!r}")
            if last:
                level[int(part)] = value
            else:
                level = level[int(part)]
        else:
            raise ConfigError(f"--set {'.'.join(path)}: {where} is {_show(level)}, not a table; it has no {part!r}")


def _describe(
    kind: type[Config], data: dict[str, TomlValue], details: ErrorDetails, overrides: Overrides, origin: str
) -> str:
    """One line for one problem: source, dotted key, value received, what is expected."""
    path = _path_in_data(data, details)
    key = ".".join(str(part) for part in path) or kind.__name__
    message = details["msg"]
    match details["type"]:
        case "extra_forbidden":
            parent, name = path[:-1], str(path[-1])
            models = _models_at(kind, parent)
            moved = [model.moved_keys[name] for model in models if name in model.moved_keys]
            known = {field for model in models for field in model.model_fields}
            advice = f"this key is now {moved[0]!r}" if moved else suggest(name, known)
            problem = f"unknown key, value {_show(details['input'])}; {advice}"
        case "missing":
            problem = "missing; this key is required"
        case "value_error":
            # A rule over a whole table already names the fields it compares.
            received = "" if isinstance(details["input"], dict) else _received(details["input"])
            problem = message.removeprefix("Value error, ") + received
        case _:
            expected = message.removeprefix("Input should be ")
            expected = f"expected {expected}" if expected != message else message
            problem = expected + _received(details["input"])
    return f"{_source(path, details['type'], overrides, origin)}: {key}: {problem}"


def _received(value: object) -> str:
    return f", received {_show(value)}"


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 1] + "…"


def _source(path: tuple[str | int, ...], error_type: str, overrides: Overrides, origin: str) -> str:
    """The override that set the value at `path`, or that points into an unknown table; else the file."""
    texts = tuple(str(part) for part in path)
    for override in overrides:
        sets_it = texts[: len(override)] == override and error_type != "missing"
        points_into_it = override[: len(texts)] == texts and error_type == "extra_forbidden"
        if sets_it or points_into_it:
            return f"--set {'.'.join(override)}"
    return origin


def _path_in_data(data: TomlValue, details: ErrorDetails) -> tuple[str | int, ...]:
    """The location as the user wrote it: pydantic's own also names the union member it tried."""
    path: list[str | int] = []
    location = details["loc"]
    for depth, part in enumerate(location):
        if isinstance(data, dict) and part in data:
            data = data[str(part)]
        elif isinstance(data, list) and isinstance(part, int):
            data = data[part]
        elif not (details["type"] == "missing" and depth == len(location) - 1):
            continue
        path.append(part)
    return tuple(path)


def _models_at(kind: type[Config], path: tuple[str | int, ...]) -> list[type[Config]]:
    """The types of the table at `path`: all models that a union allows there."""
    annotations: list[object] = [kind]
    for part in path:
        annotations = [inner for annotation in annotations for inner in _inside(annotation, part)]
    members = [member for annotation in annotations for member in _members(annotation)]
    return [member for member in members if _is_model(member)]


def _inside(annotation: object, part: str | int) -> list[object]:
    """The annotations one level down: a field of a model, the items of a list or the values of a dict."""
    found: list[object] = []
    for member in _members(annotation):
        arguments = typing.get_args(member)
        if _is_model(member):
            if part in member.model_fields:
                found.append(member.model_fields[str(part)].annotation)
        elif isinstance(part, int):
            found += arguments
        elif arguments:
            found.append(arguments[-1])
    return found


def _members(annotation: object) -> list[object]:
    """The alternatives of a union, without `Annotated`."""
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        return _members(typing.get_args(annotation)[0])
    if origin in (typing.Union, UnionType):
        return [inner for member in typing.get_args(annotation) for inner in _members(member)]
    return [annotation]


def _is_model(member: object) -> TypeGuard[type[Config]]:
    # A parametrised generic such as list[int] passes as a class until issubclass rejects it.
    return typing.get_origin(member) is None and isinstance(member, type) and issubclass(member, Config)
