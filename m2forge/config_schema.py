"""The keys of a configuration class: for each TOML table its keys, their types, defaults and docstrings.

A docstring is the string below a field. Python drops it, so it is read from the source of the class when it is asked
for. The alternatives of a union (kinds) share one entry for what they have in common, and have one each for the rest.
"""

import ast
import inspect
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from itertools import pairwise
from pathlib import Path, PurePath
from types import NoneType
from typing import Annotated, Literal, TypeAlias, get_args, get_origin

from pydantic.fields import FieldInfo

from m2forge.config_class import Config, is_model, members

ITEM, NAME = "[]", "NAME"
"""Parts of a table's path: any item of a list, and any key of a mapping."""

TablePath: TypeAlias = tuple[str, ...]

_TYPES: dict[object, str] = {int: "int", float: "float", str: "str", bool: "true | false"}
_BOUNDS = {
    "gt": "> {}",
    "ge": "≥ {}",
    "lt": "< {}",
    "le": "≤ {}",
    "min_length": "length ≥ {}",
    "max_length": "length ≤ {}",
}


@dataclass(frozen=True)
class Key:
    name: str
    type: str
    """The type in words, with its bounds: `int > 0`, `"adamw" | "muon"`."""
    choices: tuple[str, ...]
    """All values, if there are few: those of Literals, enums and booleans, as TOML."""
    default: str | None
    """As TOML; None if the key is required, empty if it is not set by default."""
    doc: str


@dataclass(frozen=True)
class Table:
    path: TablePath
    kind: str
    """The key that selects this kind of table, such as `kind = "muon"`; empty if there is one kind only."""
    note: str
    """Whether the table is required, and what holds without it."""
    doc: str
    keys: tuple[Key, ...]

    @property
    def header(self) -> str:
        """As in a TOML file; empty for the root."""
        name = ".".join(part for part in self.path if part != ITEM)
        return f"[[{name}]]" if self.path[-1:] == (ITEM,) else f"[{name}]" if name else ""


def read_schema(kind: type[Config]) -> list[Table]:
    """The tables of `kind` in the order of its fields, its own keys first."""
    return list(_tables([kind], (), "", ""))


def read_docs(model: type[Config]) -> dict[str, str]:
    """The docstring of each field, those of base classes included."""
    docs: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if issubclass(base, Config) and (module := sys.modules.get(base.__module__)) is not None and module.__file__:
            docs |= _docs_by_class(module.__file__).get(base.__qualname__, {})
    return {name: doc for name, doc in docs.items() if name in model.model_fields}


def inner_models(annotation: object) -> list[tuple[TablePath, list[type[Config]]]]:
    """The tables that a value of this type holds: their path below it, and the classes that they can be."""
    alternatives = members(annotation)
    models = [member for member in alternatives if is_model(member)]
    found: list[tuple[TablePath, list[type[Config]]]] = [((), models)] if models else []
    for member in alternatives:
        arguments = [] if is_model(member) else [argument for argument in get_args(member) if argument is not Ellipsis]
        if _is_mapping(member):
            found += [((NAME, *path), inner) for path, inner in inner_models(arguments[-1])]
        elif _is_list(member):
            found += [((ITEM, *path), inner) for argument in arguments for path, inner in inner_models(argument)]
    return found


def is_plain(annotation: object) -> bool:
    """Whether a value of this type can be written as one key, not only as tables."""
    return bool(_plain(annotation))


# -- tables -----------------------------------------------------------------------------------------------------------


def _tables(models: Sequence[type[Config]], path: TablePath, note: str, doc: str) -> Iterator[Table]:
    if len(models) == 1:
        yield from _fields_of(models[0], models[0].model_fields, path, "", note, _join(doc, models[0].__doc__))
        return
    first, *others = models
    shared = {
        name: field
        for name, field in first.model_fields.items()
        if all(_describe(first, name) == _describe(other, name) for other in others)
    }
    tag = next((name for name in first.model_fields if all(_tag(model, name) for model in models)), None)
    kinds = [f"{tag} = {_tag(model, tag)}" if tag else model.__name__ for model in models]
    yield from _fields_of(first, shared, path, "", note, _join(doc, f"One of: {', '.join(kinds)}."))
    for model, kind in zip(models, kinds, strict=True):
        own = {name: field for name, field in model.model_fields.items() if name not in shared and name != tag}
        yield from _fields_of(model, own, path, kind, "", model.__doc__ or "")


def _fields_of(
    model: type[Config], fields: Mapping[str, FieldInfo], path: TablePath, kind: str, note: str, doc: str
) -> Iterator[Table]:
    keys = [key for name in fields if (key := _describe(model, name)) is not None]
    yield Table(path, kind, note, _flow(doc), tuple(keys))
    docs = read_docs(model)
    for name, field in fields.items():
        for below, models in inner_models(field.annotation):
            yield from _tables(models, (*path, name, *below), _note(field), docs.get(name, ""))


def _describe(model: type[Config], name: str) -> Key | None:
    """One key; None if the model has none of this name, or one that holds tables alone."""
    field = model.model_fields.get(name)
    if field is None or (inner_models(field.annotation) and not is_plain(field.annotation)):
        return None
    default = None if field.is_required() else to_toml(field.get_default(call_default_factory=True))
    text = " or ".join(dict.fromkeys(_name(member) for member in _plain(field.annotation)))
    bounds = _bounds(field.metadata)
    return Key(
        name, f"{text} {bounds}".strip(), choices(field.annotation), default, _flow(read_docs(model).get(name, ""))
    )


def _tag(model: type[Config], name: str) -> str | None:
    """The only value of a Literal field, as TOML."""
    field = model.model_fields.get(name)
    arguments = get_args(field.annotation) if field and get_origin(field.annotation) is Literal else ()
    return to_toml(arguments[0]) if len(arguments) == 1 else None


def _note(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True)
    if default is None:
        return "not set by default"
    if isinstance(default, Config):
        values = default.model_dump(mode="json", exclude_none=True)
        own = {name: type(default).model_fields[name].get_default(call_default_factory=True) for name in values}
        changed = [f"{name} = {to_toml(values[name])}" for name in values if getattr(default, name) != own[name]]
        return f"without this table: {', '.join(changed)}" if changed else ""
    return "none by default" if not default else f"by default {to_toml(default)}"


# -- types ------------------------------------------------------------------------------------------------------------


def choices(annotation: object) -> tuple[str, ...]:
    """All values of a type, as TOML, if there are few; empty if there are many or some have no name."""
    found: list[str] = []
    for member in members(annotation):
        if member is bool:
            found += ["true", "false"]
        elif get_origin(member) is Literal:
            found += [to_toml(value) for value in get_args(member)]
        elif isinstance(member, type) and issubclass(member, Enum):
            found += [to_toml(value) for value in member]
        elif member is not NoneType:
            return ()
    return tuple(found)


def to_toml(value: object) -> str:
    """A value on one line; empty for None."""
    if isinstance(value, Enum):
        return to_toml(value.value)
    if isinstance(value, Config):
        value = value.model_dump(exclude_none=True)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{bare_key(str(key))} = {to_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple | frozenset | set):
        return "[" + ", ".join(to_toml(item) for item in value) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | PurePath):
        return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
    return "" if value is None else str(value)


def bare_key(name: str) -> str:
    """A key of a table, quoted if TOML requires it."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else to_toml(name)


def _plain(annotation: object) -> list[object]:
    """The alternatives that hold no table, without None; `Annotated` stays, for its bounds."""
    if get_origin(annotation) is Annotated:
        return [annotation] if _plain(get_args(annotation)[0]) else []
    alternatives = [annotation] if len(members(annotation)) == 1 else list(get_args(annotation))
    return [one for one in alternatives if one is not NoneType and not inner_models(one)]


def _name(annotation: object) -> str:
    if get_origin(annotation) is Annotated:
        inner, *metadata = get_args(annotation)
        return f"{_name(inner)} {_bounds(metadata)}".strip()
    alternatives = members(annotation)
    if len(alternatives) > 1:
        return " or ".join(_name(inner) for inner in get_args(annotation) if inner is not NoneType)
    if named := choices(annotation):
        return " | ".join(named)
    arguments = [argument for argument in get_args(annotation) if argument is not Ellipsis]
    if _is_mapping(annotation):
        return f"table of {_name(arguments[-1])}"
    if _is_list(annotation):
        is_fixed = get_origin(annotation) is tuple and Ellipsis not in get_args(annotation)
        return f"[{', '.join(map(_name, arguments))}]" if is_fixed else f"list of {_name(arguments[0])}"
    if isinstance(annotation, type) and issubclass(annotation, PurePath):
        return "path"
    return _TYPES.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _is_mapping(member: object) -> bool:
    origin = get_origin(member)
    return isinstance(origin, type) and issubclass(origin, Mapping)


def _is_list(member: object) -> bool:
    origin = get_origin(member)
    return isinstance(origin, type) and issubclass(origin, list | tuple | set | frozenset)


def _bounds(metadata: Iterable[object]) -> str:
    found = []
    for item in metadata:
        if isinstance(item, FieldInfo):
            found.append(_bounds(item.metadata))
        bounds = {name: value for name in _BOUNDS if (value := getattr(item, name, None)) is not None}
        found += [
            _BOUNDS[name].format(f"{value:g}" if isinstance(value, float) else value) for name, value in bounds.items()
        ]
        if pattern := getattr(item, "pattern", None):
            found.append(f"matching {pattern}")
    return ", ".join(text for text in found if text)


# -- docstrings -------------------------------------------------------------------------------------------------------


@lru_cache
def _docs_by_class(path: str) -> dict[str, dict[str, str]]:
    """The strings below the fields of each class of a source file, by qualified name."""
    docs: dict[str, dict[str, str]] = {}

    def visit(body: Sequence[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                docs[prefix + node.name] = dict(_docs_below(node.body))
                visit(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.FunctionDef):
                visit(node.body, f"{prefix}{node.name}.<locals>.")

    visit(ast.parse(Path(path).read_text(encoding="utf-8")).body, "")
    return docs


def _docs_below(body: Sequence[ast.stmt]) -> Iterator[tuple[str, str]]:
    for field, below in pairwise(body):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
            yield field.target.id, below.value.value


def _join(first: str, second: str | None) -> str:
    return "\n\n".join(text for text in (first, second or "") if text)


def _flow(text: str) -> str:
    """One line: the reader's console breaks it."""
    return " ".join(inspect.cleandoc(text).split())
