"""The base class of every configuration, and a walk along the annotations of its classes."""

import typing
from collections.abc import Mapping, Sequence
from datetime import date, datetime, time
from types import UnionType
from typing import Annotated, ClassVar, TypeAlias, TypeGuard, TypeVar

from pydantic import BaseModel, ConfigDict

TomlValue: TypeAlias = str | int | float | bool | datetime | date | time | list["TomlValue"] | dict[str, "TomlValue"]


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

    renamed_keys: ClassVar[Mapping[str, str]] = {}
    """Former keys of this table → their current names: a bare name is a key of the same table, a dotted one counts from
    the root. Subclasses add to those of their bases."""
    renamed_values: ClassVar[Mapping[str, Mapping[str, TomlValue]]] = {}
    """Former keys of this table whose values changed too → each former value and the current one."""

    @classmethod
    def complete(cls, data: Mapping[str, TomlValue]) -> dict[str, TomlValue]:
        """Add to the merged keys of a configuration file what they imply, before they are validated."""
        return dict(data)


ConfigT = TypeVar("ConfigT", bound=Config)


def models_at(kind: type[Config], path: tuple[str | int, ...]) -> list[type[Config]]:
    """The types of the table at `path`: all models that a union allows there."""
    found = [member for annotation in annotations_at(kind, path) for member in members(annotation)]
    return [member for member in found if is_model(member)]


def annotations_at(kind: type[Config], path: tuple[str | int, ...]) -> list[object]:
    annotations: list[object] = [kind]
    for part in path:
        annotations = all_inside(annotations, part)
    return annotations


def all_inside(annotations: Sequence[object], part: str | int) -> list[object]:
    return [inner for annotation in annotations for inner in _inside(annotation, part)]


def _inside(annotation: object, part: str | int) -> list[object]:
    """The annotations one level down: a field of a model, the items of a list or the values of a dict."""
    found: list[object] = []
    for member in members(annotation):
        arguments = typing.get_args(member)
        if is_model(member):
            if part in member.model_fields:
                found.append(member.model_fields[str(part)].annotation)
        elif isinstance(part, int):
            found += arguments
        elif arguments:
            found.append(arguments[-1])
    return found


def members(annotation: object) -> list[object]:
    """The alternatives of a union, without `Annotated`."""
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        return members(typing.get_args(annotation)[0])
    if origin in (typing.Union, UnionType):
        return [inner for member in typing.get_args(annotation) for inner in members(member)]
    return [annotation]


def is_model(member: object) -> TypeGuard[type[Config]]:
    # A parametrised generic such as list[int] passes as a class until issubclass rejects it.
    return typing.get_origin(member) is None and isinstance(member, type) and issubclass(member, Config)
