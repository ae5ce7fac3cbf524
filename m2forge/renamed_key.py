"""Former keys of configurations: data in, the keys in it that were renamed since out, and the data under current keys.

A class names its former keys in `Config.renamed_keys`, and in `Config.renamed_values` those whose values changed with
them. A key counts as former if no class that its table can be has it as a field.
"""

import copy
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from m2forge.config_class import Config, TomlValue, all_inside, annotations_at, is_model, members

_LONGEST_VALUE = 80


@dataclass(frozen=True)
class Rename:
    table: tuple[str, ...]
    """Path of the table that holds the former key, as it is written."""
    key: str
    name: str
    """The current key, as in `Config.renamed_keys`."""
    value: TomlValue
    """As it is written."""
    current: TomlValue
    """The same under the current key."""


class Renames:
    """The former keys in some data, innermost first."""

    def __init__(self, kind: type[Config], data: Mapping[str, TomlValue]) -> None:
        self.found = list(_find_renames(kind, [kind], dict(data), ()))
        self._names = {(*rename.table, rename.key): rename.name for rename in self.found}

    def apply(self, data: Mapping[str, TomlValue]) -> tuple[dict[str, TomlValue], list[Rename]]:
        """A copy of the data under current keys, and the former keys whose current ones are there too: their values are
        left out."""
        result = copy.deepcopy(dict(data))
        clashes, moves = [], []
        for rename in self.found:
            value = _table_at(result, rename.table).pop(rename.key)
            if rename.current != rename.value:
                value = copy.deepcopy(rename.current)
            if "." in rename.name:
                moves.append((rename, value))
            elif rename.name in (table := _table_at(result, rename.table)):
                clashes.append(rename)
            else:
                table[rename.name] = value
        for rename, value in moves:
            *parents, name = rename.name.split(".")
            if name in (table := _table_at(result, parents)):
                clashes.append(rename)
            else:
                table[name] = value
        return result, clashes

    def current(self, path: tuple[str, ...]) -> tuple[str, ...]:
        """The current path of what is written at `path`."""
        current: tuple[str, ...] = ()
        for depth, part in enumerate(path, 1):
            name = self._names.get(path[:depth], part)
            current = tuple(name.split(".")) if name != part and "." in name else (*current, name)
        return current

    def written(self, path: tuple[str, ...]) -> tuple[str, ...]:
        """Where the value at a current path is written."""
        for former in self._names:
            current = self.current(former)
            if path[: len(current)] == current:
                return former + path[len(current) :]
        return path

    def problem(self, rename: Rename) -> str:
        current = ".".join(self.current((*rename.table, rename.key)))
        value = "" if rename.current == rename.value else f", its value {show(rename.current)}"
        return f"unknown key, value {show(rename.value)}; this key is now {current!r}{value}"


def _find_renames(
    kind: type[Config], annotations: list[object], value: TomlValue, path: tuple[str, ...]
) -> Iterator[Rename]:
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _find_renames(kind, all_inside(annotations, index), item, (*path, str(index)))
    if not isinstance(value, dict):
        return
    models = _fitting_models(annotations, value)
    for key, item in value.items():
        name = _current_name(models, key)
        inner = annotations_at(kind, tuple(name.split("."))) if "." in name and name != key else None
        if inner is None:
            inner = all_inside(models or annotations, name)
        yield from _find_renames(kind, inner, item, (*path, key))
        if name != key:
            yield Rename(path, key, name, item, _current_value(models, key, item))


def _fitting_models(annotations: list[object], table: Mapping[str, TomlValue]) -> list[type[Config]]:
    """The classes that `table` can be: those whose Literal fields, such as a kind, allow the values in it."""
    models = [member for annotation in annotations for member in members(annotation) if is_model(member)]
    return [model for model in models if _fits(model, table)]


def _fits(model: type[Config], table: Mapping[str, TomlValue]) -> bool:
    names = {name: key for key, name in _former_names(model).items()}
    for name, field in model.model_fields.items():
        value = table.get(name, table.get(names.get(name, name)))
        is_literal = typing.get_origin(field.annotation) is Literal
        if is_literal and value is not None and value not in typing.get_args(field.annotation):
            return False
    return True


def _current_name(models: Sequence[type[Config]], key: str) -> str:
    """The current name of a key in a table that can be any of `models`; the key itself if one of them has it."""
    if any(key in model.model_fields for model in models):
        return key
    return next((names[key] for model in models if key in (names := _former_names(model))), key)


def _current_value(models: Sequence[type[Config]], key: str, value: TomlValue) -> TomlValue:
    for model in models:
        if isinstance(value, str) and value in (values := model.renamed_values.get(key, {})):
            return values[value]
    return value


def _former_names(model: type[Config]) -> dict[str, str]:
    names: dict[str, str] = {}
    for base in reversed(model.__mro__):
        names |= vars(base).get("renamed_keys", {})
    return names


def _table_at(data: dict[str, TomlValue], path: Sequence[str]) -> dict[str, TomlValue]:
    """The table at `path`, created if it is not there; what cannot hold a table is left alone."""
    level: TomlValue = data
    for part in path:
        if isinstance(level, dict):
            level = level.setdefault(part, {})
        elif isinstance(level, list):
            level = level[int(part)]
    return level if isinstance(level, dict) else {}


def show(value: object) -> str:
    """A value in an error message, cut if it is long."""
    text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 1] + "…"
