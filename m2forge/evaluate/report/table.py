"""The tables of a report, for a terminal and for `table.txt`.

A figure is a percentage with the half-width of its 95% Wilson interval. A length beyond the model's context is marked
with a star.
"""

import io
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from m2forge.evaluate.report.plot import MARKED, number
from m2forge.evaluate.report.report import Cell, DomainLoss, EvalReport, wilson


def show(report: EvalReport, console: Console) -> None:
    head = f"{report.model}: {report.num_parameters:,} parameters, context {number(report.max_context)}"
    console.print(Text(head))
    if report.losses:
        console.print(_loss_table(report.losses))
    for suite in report.suites:
        cells = report.cells_of(suite)
        if any(cell.depth is not None for cell in cells):
            console.print(_depth_table(suite, cells))
    if report.cells:
        console.print(_suite_table(report))
    for note in report.notes:
        console.print(Text(f"note: {note}"))


def render(report: EvalReport, width: int = 120) -> str:
    """The tables as plain text."""
    stream = io.StringIO()
    show(report, Console(file=stream, width=width, color_system=None, force_terminal=False))
    return stream.getvalue()


def _loss_table(losses: Sequence[DomainLoss]) -> Table:
    table = Table(title="held-out loss", title_justify="left")
    table.add_column("domain")
    depths = sorted({module.depth for loss in losses for module in loss.modules})
    for name in ("tokens", "nats/token", "bits/byte", *(f"MTP {depth}" for depth in depths)):
        table.add_column(name, justify="right")
    for loss in losses:
        modules = {
            module.depth: f"{module.nats_per_token:.3f}, {module.agreement:.0%} agree" for module in loss.modules
        }
        per_byte = "–" if loss.bits_per_byte is None else f"{loss.bits_per_byte:.3f}"
        cells = [f"{loss.num_tokens:,}", f"{loss.nats_per_token:.3f}", per_byte]
        table.add_row(loss.domain, *cells, *(modules.get(depth, "–") for depth in depths))
    return table


def _depth_table(suite: str, cells: Sequence[Cell]) -> Table:
    table = Table(title=f"{suite}, % right", title_justify="left")
    table.add_column("depth", justify="right")
    lengths = sorted({cell.length for cell in cells if cell.length is not None})
    for length in lengths:
        table.add_column(_size_label([cell for cell in cells if cell.length == length]), justify="right")
    for depth in sorted({cell.depth for cell in cells if cell.depth is not None}):
        here = {cell.length: cell for cell in cells if cell.depth == depth}
        shown = (_figure(here[length]) if length in here else "" for length in lengths)
        table.add_row(f"{depth:.0%}", *shown)
    return table


def _suite_table(report: EvalReport) -> Table:
    """One row per suite and size, depths pooled."""
    table = Table(title="all suites", title_justify="left")
    for name in ("suite", "size", "samples", "score, %", "all answers right, %"):
        table.add_column(name, justify="left" if name == "suite" else "right")
    for suite in report.suites:
        cells = report.cells_of(suite)
        for size in dict.fromkeys((cell.length, cell.num_shots) for cell in cells):
            there = [cell for cell in cells if (cell.length, cell.num_shots) == size]
            num_samples = sum(cell.num_samples for cell in there)
            score, exact = (
                sum(getattr(cell, field) * cell.num_samples for cell in there) / num_samples
                for field in ("score", "exact")
            )
            figures = _percent(score, num_samples), _percent(exact, num_samples)
            table.add_row(suite, _size_label(there), f"{num_samples}", *figures)
    return table


def _size_label(cells: Sequence[Cell]) -> str:
    first = cells[0]
    if first.num_shots is not None:
        return f"{first.num_shots} shots"
    return "–" if first.length is None else number(first.length) + MARKED * first.beyond_context


def _figure(cell: Cell) -> str:
    return f"{cell.score * 100:.0f} ±{cell.half_width * 100:.0f}"


def _percent(share: float, num_samples: int) -> str:
    low, high = wilson(share, num_samples)
    return f"{share * 100:.1f} ±{(high - low) * 50:.1f}"
