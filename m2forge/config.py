"""TOML text in, frozen and validated pydantic models out, and back again.

Each package derives its configuration from `Config`. Nothing is coerced (an integer is accepted as a float, no other
type changes), an unknown key is an error that suggests the closest name, and all problems of one source are reported in
one `ConfigError`: source, dotted key, value received, what is expected. `dump` writes the resolved configuration,
defaults included, as TOML that loads back equal.

Several files stack: tables merge, every other value of a later file replaces that of the earlier ones, and overrides
come last. A key that was renamed is refused under its former name, except in what an earlier version wrote into a run's
directory, which `load_resolved` and `current_keys` read.
"""

import copy
import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, get_args, get_origin

import tomli_w
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from m2forge.config_class import Config, ConfigT, TomlValue, models_at
from m2forge.errors import ConfigError, suggest
from m2forge.files import write_atomic
from m2forge.renamed_key import Renames, show

__all__ = [
    "Config",
    "ConfigT",
    "Setting",
    "TomlValue",
    "build",
    "current_keys",
    "dump",
    "load",
    "load_resolved",
    "parse_overrides",
    "read_toml",
    "to_overrides",
    "write_resolved",
]

Overrides: TypeAlias = Mapping[tuple[str, ...], TomlValue]
Setting: TypeAlias = str | int | float | bool | Sequence["Setting"] | Mapping[str, "Setting"]
"""The value of a config key in Python; a mapping sets the keys of a table."""


def load(kind: type[ConfigT], path: Path | Sequence[Path], overrides: Sequence[str] = ()) -> ConfigT:
    """Load a file, or several, where later ones override earlier ones, with `overrides` such as `"model.layers=4"`
    on top."""
    paths = [path] if isinstance(path, Path) else path
    return _build(kind, [(str(path), read_toml(path)) for path in paths], overrides)


def load_resolved(kind: type[ConfigT], path: Path) -> ConfigT:
    """Load what `write_resolved` wrote, also under keys that were renamed since."""
    return build(kind, current_keys(kind, read_toml(path)), origin=str(path))


def build(
    kind: type[ConfigT], data: Mapping[str, TomlValue], overrides: Sequence[str] = (), origin: str = "configuration"
) -> ConfigT:
    """Validate `data` as a `kind`, with `overrides` applied. `origin` names the source of `data` in errors."""
    return _build(kind, [(origin, data)], overrides)


def current_keys(kind: type[Config], data: Mapping[str, TomlValue]) -> dict[str, TomlValue]:
    """`data` with every former key of `kind` and of its tables under its current name; all else stays as it is."""
    renames = Renames(kind, data)
    current, clashes = renames.apply(data)
    for rename in clashes:
        raise ConfigError(f"{'.'.join((*rename.table, rename.key))}: {renames.problem(rename)}, which is there too")
    return current


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


def to_overrides(settings: Mapping[str, Setting], table: str = "") -> Iterator[str]:
    """The settings as `--set` takes them: a dotted key and a TOML value each."""
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from to_overrides(value, f"{table}{key}.")
        else:
            yield f"{table}{key}={_toml_text(value)}"


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


def read_toml(path: Path) -> dict[str, TomlValue]:
    """The tables and values of a file, not validated."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text: {error}") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); give the path of a TOML file") from error


def _build(
    kind: type[ConfigT], files: Sequence[tuple[str, Mapping[str, TomlValue]]], overrides: Sequence[str]
) -> ConfigT:
    merged: dict[str, TomlValue] = {}
    for _, data in files:
        _merge(merged, data)
    parsed = parse_overrides(overrides)
    for path, value in parsed.items():
        _set_value(merged, path, value)
    renames = Renames(kind, merged)
    renamed, _ = renames.apply(merged)
    current = kind.complete(renamed)
    sources = _Sources(files, parsed, renames)
    problems = [
        sources.describe((*rename.table, rename.key), "extra_forbidden", renames.problem(rename))
        for rename in reversed(renames.found)
    ]
    try:
        # Strict validation of JSON accepts enums as strings and tuples as lists; that of objects does not.
        config = kind.model_validate_json(json.dumps(current, default=str))
    except ValidationError as error:
        problems += [_describe(kind, current, details, sources) for details in error.errors()]
    else:
        if not problems:
            return config
    unique = list(dict.fromkeys(problems))
    if len(unique) == 1:
        raise ConfigError(unique[0])
    raise ConfigError("\n  ".join([f"{' + '.join(name for name, _ in files)}: {len(unique)} problems", *unique]))


def _merge(data: dict[str, TomlValue], other: Mapping[str, TomlValue]) -> None:
    """Put a copy of `other` over `data`: tables merge, every other value replaces the one below."""
    for key, value in other.items():
        below = data.get(key)
        if isinstance(value, dict) and isinstance(below, dict):
            _merge(below, value)
        else:
            data[key] = copy.deepcopy(value)


def _to_toml(config: Config) -> str:
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))


def _toml_text(value: Setting) -> str:
    """A TOML value in one line. JSON's strings, numbers and booleans are TOML's too."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(key)} = {_toml_text(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ", ".join(map(_toml_text, value)) + "]"
    return json.dumps(value, default=str)


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


def _set_value(data: dict[str, TomlValue], path: tuple[str, ...], value: TomlValue) -> None:
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
            raise ConfigError(f"--set {'.'.join(path)}: {where} is {show(level)}, not a table; it has no {part!r}")


def _describe(kind: type[Config], data: dict[str, TomlValue], details: ErrorDetails, sources: "_Sources") -> str:
    """One line for one problem: source, dotted key, value received, what is expected."""
    path = _path_in_data(kind, data, details)
    message = details["msg"]
    match details["type"]:
        case "extra_forbidden":
            known = {name for model in models_at(kind, path[:-1]) for name in model.model_fields}
            problem = f"unknown key, value {show(details['input'])}; {suggest(str(path[-1]), known)}"
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
    written = sources.renames.written(tuple(str(part) for part in path))
    return sources.describe(written or (kind.__name__,), details["type"], problem)


def _received(value: object) -> str:
    return f", received {show(value)}"


@dataclass(frozen=True)
class _Sources:
    """The files and overrides that a configuration was merged from."""

    files: Sequence[tuple[str, Mapping[str, TomlValue]]]
    overrides: Overrides
    renames: Renames

    def describe(self, path: tuple[str, ...], error_type: str, problem: str) -> str:
        """The problem with the key at `path`, after the source of that key."""
        return f"{self._find(path, error_type)}: {'.'.join(path)}: {problem}"

    def _find(self, path: tuple[str, ...], error_type: str) -> str:
        """The override that set the value at `path`, or that points into an unknown table; else the files."""
        for override in self.overrides:
            sets_it = path[: len(override)] == override and error_type != "missing"
            points_into_it = override[: len(path)] == path and error_type == "extra_forbidden"
            if sets_it or points_into_it:
                return f"--set {'.'.join(override)}"
        return " + ".join(self._files_of(path))

    def _files_of(self, path: tuple[str, ...]) -> list[str]:
        """The files that the innermost value around `path` is from: the last one, or all that a table merges."""
        owners: list[tuple[str, object]] = list(self.files)
        for part in path:
            inner = [(name, value[part]) for name, table in owners if part in (value := _as_table(table))]
            if not inner:
                break
            replaced = max((index for index, (_, value) in enumerate(inner) if not isinstance(value, dict)), default=-1)
            owners = inner[replaced + 1 :] or inner[-1:]
        return [name for name, _ in owners]


def _as_table(value: object) -> Mapping[str, object]:
    """A table, or a list keyed by its indices."""
    if isinstance(value, list):
        return {str(index): item for index, item in enumerate(value)}
    return value if isinstance(value, Mapping) else {}


def _path_in_data(kind: type[Config], data: TomlValue, details: ErrorDetails) -> tuple[str | int, ...]:
    """The location as the user wrote it: pydantic's own also names the union member it tried."""
    path: list[str | int] = []
    location = details["loc"]
    is_member_next = False
    for depth, part in enumerate(location):
        if is_member_next:
            is_member_next = False  # The kind of a table, which may equal one of its keys.
            continue
        if isinstance(data, dict) and part in data:
            data = data[str(part)]
        elif isinstance(data, list) and isinstance(part, int):
            data = data[part]
        elif not (details["type"] == "missing" and depth == len(location) - 1):
            continue
        path.append(part)
        is_member_next = isinstance(data, dict) and _has_kinds(kind, tuple(path))
    return tuple(path)


def _has_kinds(kind: type[Config], path: tuple[str | int, ...]) -> bool:
    """Whether a key of the table at `path` selects its class."""
    models = models_at(kind, path)
    first = models[0].model_fields if models else {}
    return len(models) > 1 and any(all(_is_tag(model, name) for model in models) for name in first)


def _is_tag(model: type[Config], name: str) -> bool:
    field = model.model_fields.get(name)
    return field is not None and get_origin(field.annotation) is Literal and len(get_args(field.annotation)) == 1
