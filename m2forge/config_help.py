"""Renders the keys of a configuration below a command's help: one block per TOML table, as wide as the terminal.

    [train.optimizer]
    kind = "adamw"                  "adamw" | "muon"
        muon: hidden matrices use Muon; embedding, head, norms and biases use AdamW.

A key stands with its default, or alone if it has none. Styles are for terminals only; a pipe gets plain text.
"""

import textwrap
from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from m2forge.config_class import Config
from m2forge.config_schema import Key, Table, read_schema

TYPE_COLUMN = 34
INDENT = 4
MAX_WIDTH = 120


def render_schema(kind: type[Config], option: str, console: Console) -> str:
    """Every key of `kind`, styled for `console`; `option` is the command's option that sets one."""
    with console.capture() as captured:
        for line in _lines(kind, option, min(console.width, MAX_WIDTH)):
            console.print(line, soft_wrap=True, highlight=False)
    return captured.get()


def _lines(kind: type[Config], option: str, width: int) -> Iterator[Text]:
    intro = (
        f"config keys by TOML table, with defaults; {option} TABLE.KEY=VALUE sets one, LIST.0.KEY=VALUE one of an item"
    )
    yield from _wrap(intro, width, 0, "")
    for table in read_schema(kind):
        if table.keys or table.doc or table.note:
            yield Text()
            yield from _table_lines(table, width)


def _table_lines(table: Table, width: int) -> Iterator[Text]:
    header = " with ".join(part for part in (table.header, table.kind) if part)
    if header:
        yield Text(header, style="bold cyan") + Text(f"  {table.note}" if table.note else "", style="yellow")
    yield from _wrap(table.doc, width, INDENT, "dim")
    for key in table.keys:
        yield from _key_lines(key, width)


def _key_lines(key: Key, width: int) -> Iterator[Text]:
    note = {None: ", required", "": ", not set"}.get(key.default, "")
    name = Text(key.name, style="bold")
    if key.default:
        name += Text(f" = {key.default}", style="green")
    if len(name) + 2 <= TYPE_COLUMN and TYPE_COLUMN + len(key.type + note) <= width:
        yield name + Text(" " * (TYPE_COLUMN - len(name))) + Text(key.type) + Text(note, style="yellow")
    else:
        yield name
        yield from _wrap(key.type + note, width, 2 * INDENT, "")
    yield from _wrap(key.doc, width, INDENT, "dim")


def _wrap(text: str, width: int, indent: int, style: str) -> Iterator[Text]:
    margin, width = " " * indent, max(width, 2 * indent + 20)
    for line in textwrap.wrap(text, width, initial_indent=margin, subsequent_indent=margin, break_on_hyphens=False):
        yield Text(line, style=style)
