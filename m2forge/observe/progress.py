"""Progress of a long job on standard error, with its latest metrics.

In a terminal this is a live bar; elsewhere (a log file, CI) one plain line every `PLAIN_INTERVAL_S` seconds and one at
the end, so that a log stays readable.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from m2forge.observe.console import stderr_console

PLAIN_INTERVAL_S = 10.0


class Progress(Protocol):
    """A running job."""

    def advance(self, count: int = 1, fields: Mapping[str, float | str] | None = None) -> None:
        """Add `count` finished units. `fields` are shown beside the count, until replaced."""


@contextmanager
def progress(total: int | None, description: str, console: Console | None = None) -> Iterator[Progress]:
    """Show the progress of a job of `total` units (None: unknown) while the block runs."""
    console = console or stderr_console()
    if not console.is_terminal:
        lines = _PlainLines(total, description, console)
        try:
            yield lines
        finally:
            lines.show()
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[shown]}", markup=False),
    )
    with RichProgress(*columns, console=console) as rich_progress:
        yield _Bar(rich_progress, total, description)


class _Bar:
    def __init__(self, rich_progress: RichProgress, total: int | None, description: str) -> None:
        self._progress = rich_progress
        self._task = rich_progress.add_task(description, total=total, shown="")
        self._fields: dict[str, float | str] = {}

    def advance(self, count: int = 1, fields: Mapping[str, float | str] | None = None) -> None:
        self._fields.update(fields or {})
        self._progress.update(self._task, advance=count, shown=_render(self._fields))


class _PlainLines:
    def __init__(self, total: int | None, description: str, console: Console) -> None:
        self._total = total
        self._description = description
        self._console = console
        self._done = 0
        self._fields: dict[str, float | str] = {}
        self._started_s = self._shown_s = time.monotonic()

    def advance(self, count: int = 1, fields: Mapping[str, float | str] | None = None) -> None:
        self._done += count
        self._fields.update(fields or {})
        if time.monotonic() - self._shown_s >= PLAIN_INTERVAL_S:
            self.show()

    def show(self) -> None:
        self._shown_s = time.monotonic()
        of_total = "" if self._total is None else f"/{self._total}"
        line = f"{self._description} {self._done}{of_total}, {self._shown_s - self._started_s:.0f} s"
        shown = _render(self._fields)
        self._console.print(f"{line}  {shown}" if shown else line, markup=False, highlight=False, soft_wrap=True)


def _render(fields: Mapping[str, float | str]) -> str:
    return "  ".join(f"{name} {value if isinstance(value, str) else f'{value:.4g}'}" for name, value in fields.items())
