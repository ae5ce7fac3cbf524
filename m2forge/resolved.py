"""A resolved configuration as TOML, with a comment at each value that is not the default.

    group_size = 16  # default: 8

Unlike `config.dump`, whose output is a file, this is for reading; it loads back equal too.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pydantic_core import PydanticUndefined

from m2forge.config_class import Config
from m2forge.config_schema import bare_key, to_toml


@dataclass(frozen=True)
class Line:
    text: str
    note: str = ""
    """The default, if the value differs from it; `required` if there is none."""

    def __str__(self) -> str:
        return f"{self.text}  # {self.note}" if self.note else self.text


def resolved_lines(config: Config) -> Iterator[Line]:
    """The lines of `config`; keys that are not set are left out."""
    yield from _table(config, None, ())


def _table(config: Config, default: object, path: Sequence[str]) -> Iterator[Line]:
    """`default`: what the table is if it is left out; its own class's defaults hold where that is another class."""
    tables: list[tuple[str, object, object]] = []
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        usual = field.get_default(call_default_factory=True)
        if type(default) is type(config):
            usual = getattr(default, name)
        if _holds_tables(value):
            tables.append((name, value, usual))
        elif value is not None:
            yield Line(f"{name} = {to_toml(value)}", "" if _same(value, usual) else _note(usual))
    for name, value, usual in tables:
        full_path = (*path, bare_key(name))
        if isinstance(value, Config):
            yield from _section(f"[{'.'.join(full_path)}]", value, usual, full_path)
        elif isinstance(value, Mapping):
            for key, item in value.items():
                inner = (*full_path, bare_key(str(key)))
                below = usual.get(key, PydanticUndefined) if isinstance(usual, Mapping) else PydanticUndefined
                yield from _section(f"[{'.'.join(inner)}]", item, below, inner)
        elif isinstance(value, Sequence):
            for item in value:
                yield from _section(f"[[{'.'.join(full_path)}]]", item, PydanticUndefined, full_path)


def _section(header: str, config: Config, default: object, path: Sequence[str]) -> Iterator[Line]:
    yield Line("")
    yield Line(header, "default: not set" if default is None else "")
    yield from _table(config, default, path)


def _holds_tables(value: object) -> bool:
    if isinstance(value, Mapping):
        return bool(value) and all(isinstance(item, Config) for item in value.values())
    if isinstance(value, list | tuple):
        return bool(value) and all(isinstance(item, Config) for item in value)
    return isinstance(value, Config)


def _same(value: object, usual: object) -> bool:
    return value == usual and to_toml(value) == to_toml(usual)


def _note(usual: object) -> str:
    if usual is PydanticUndefined:
        return "required"
    return "default: not set" if usual is None else f"default: {to_toml(usual)}"
