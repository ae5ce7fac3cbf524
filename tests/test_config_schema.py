"""The schema of a configuration: every key with its type, default and docstring."""

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field

from m2forge.command_config import config_kinds
from m2forge.config import Config
from m2forge.config_schema import Key, Table, read_docs, read_schema


class Color(StrEnum):
    RED = "red"
    BLUE = "blue"


class Base(Config):
    size: Annotated[int, Field(gt=0, le=8)] = 4
    """Documented in the base
    class."""
    plain: float = 0.5


class Derived(Base):
    """A class of its own."""

    size: Annotated[int, Field(gt=0, le=8)] = 8
    color: Color | None = None
    """Not set: any."""


class Square(Config):
    kind: Literal["square"]
    seed: int = 0
    side: float = Field(gt=0)
    """Length of a side."""


class Circle(Config):
    kind: Literal["circle"]
    seed: int = 0
    radius: float = 1.0
    inner: Base | None = None


class Whole(Config):
    name: str = Field(pattern="^a+$")
    flag: bool = False
    folder: Path | None = None
    pair: tuple[float, float] = (0.5, 1.0)
    names: tuple[str, ...] = ("a", 'b"')
    weights: Mapping[str, Annotated[float, Field(ge=0)]] = {}
    window: int | Annotated[float, Field(gt=0, le=1)] = 0.25
    derived: Derived = Derived(plain=2.0)
    """A table with other defaults."""
    shapes: tuple[Annotated[Square | Circle, Field(discriminator="kind")], ...] = ()
    by_name: dict[str, Base] = Field(default_factory=dict)


def table(header: str, kind: str = "") -> Table:
    (found,) = [table for table in read_schema(Whole) if (table.header, table.kind) == (header, kind)]
    return found


def test_keys_have_type_choices_and_default() -> None:
    assert table("").keys == (
        Key("name", "str matching ^a+$", (), None, ""),
        Key("flag", "true | false", ("true", "false"), "false", ""),
        Key("folder", "path", (), "", ""),
        Key("pair", "[float, float]", (), "[0.5, 1.0]", ""),
        Key("names", "list of str", (), '["a", "b\\""]', ""),
        Key("weights", "table of float ≥ 0", (), "{}", ""),
        Key("window", "int or float > 0, ≤ 1", (), "0.25", ""),
    )


def test_docstrings_are_those_below_the_fields_and_of_bases() -> None:
    derived = table("[derived]")
    assert derived.doc == "A table with other defaults. A class of its own."
    assert derived.note == "without this table: plain = 2.0"
    assert derived.keys == (
        Key("size", "int > 0, ≤ 8", (), "8", "Documented in the base class."),
        Key("plain", "float", (), "0.5", ""),
        Key("color", '"red" | "blue"', ('"red"', '"blue"'), "", "Not set: any."),
    )


def test_kinds_share_one_entry_and_have_one_each() -> None:
    shared = table("[[shapes]]")
    assert shared.doc == 'One of: kind = "square", kind = "circle".'
    assert shared.note == "none by default"
    assert [key.name for key in shared.keys] == ["seed"]
    assert table("[[shapes]]", 'kind = "square"').keys == (Key("side", "float > 0", (), None, "Length of a side."),)
    assert [key.name for key in table("[[shapes]]", 'kind = "circle"').keys] == ["radius"]
    assert [key.name for key in table("[shapes.inner]").keys] == ["size", "plain"]


def test_tables_of_a_mapping_have_a_name() -> None:
    assert [key.name for key in table("[by_name.NAME]").keys] == ["size", "plain"]


def test_docstrings_of_a_class_inside_a_function_are_found() -> None:
    class Local(Config):
        x: int = 0
        """The x of a local class."""

    assert read_docs(Local) == {"x": "The x of a local class."}


@pytest.mark.parametrize("command", ["params", "corpus", "pretrain", "sft", "rl", "eval", "serve", "gateway"])
def test_every_key_of_the_commands_is_there(command: str) -> None:
    for kind in config_kinds(command).values():
        # What pydantic itself knows: all properties of all classes.
        schema = kind.model_json_schema()
        known = {name for part in (schema, *schema.get("$defs", {}).values()) for name in part.get("properties", {})}
        tables = read_schema(kind)
        printed = {key.name for table in tables for key in table.keys}
        printed |= {part for table in tables for part in table.path}
        printed |= {table.kind.partition(" = ")[0] for table in tables}
        assert known - printed == set()
