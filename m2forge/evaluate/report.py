"""The evaluation report, saved as `eval.json` and loaded back equal; its plots and its tables.

A cell is the mean score of the samples of one suite at one size and depth, with its 95% confidence interval.

Plots: every suite with several depths gets a heat map of depth by length; all suites measured by length share one line
chart, and so do those measured by number of shots. Charts are self-contained SVG text without scripts, for light and
dark mode. Shares from 0 to 1 are shown as percentages. The text colour follows the viewer's colour scheme; the colour
scale runs from orange over near-white to blue, which stays readable for the colour-blind and in print.

Tables, for a terminal and for `table.txt`: a figure is a percentage with the half-width of its 95% Wilson interval. A
length beyond the model's context is marked with a star.
"""

import io
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Self
from xml.sax.saxutils import escape

from pydantic import BaseModel, ConfigDict, ValidationError
from rich.console import Console
from rich.table import Table
from rich.text import Text

from m2forge.errors import DataError, NotFoundError
from m2forge.evaluate.config import CHARTS
from m2forge.files import write_atomic
from m2forge.text.tokenizer import Tokenizer

JSON_FILE = "eval.json"
Z_95 = 1.959964
"""Two-sided 95% quantile of the normal distribution."""


class _Record(BaseModel):
    # JSON has no NaN: as strings, a diverged model still gets its report.
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings", protected_namespaces=())


class Cell(_Record):
    suite: str
    task: str
    length: int | None = None
    depth: float | None = None
    num_shots: int | None = None
    num_samples: int
    score: float
    """Mean share of correct answers, 0 to 1."""
    exact: float
    """Share of samples with every answer correct."""
    low: float
    high: float
    """95% Wilson interval of the score."""
    beyond_context: bool = False
    """Whether its samples are longer than the model's max_context."""

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2


class ModuleLoss(_Record):
    """Loss of an MTP module, measured at the positions where the hidden state it starts from exists."""

    depth: int
    """From 1: age of that hidden state in tokens."""
    nats_per_token: float
    agreement: float
    """Share of positions where its argmax token equals the main model's: where a draft would be accepted."""


class DomainLoss(_Record):
    domain: str
    num_tokens: int
    nats_per_token: float
    bits_per_byte: float | None
    """None if the tokenizer is unknown."""
    modules: tuple[ModuleLoss, ...] = ()


class Failure(_Record):
    """One failed completion, for inspection."""

    suite: str
    line: int
    """Line number in the prompt file."""
    completion: str
    reasons: tuple[str, ...]


class EvalReport(_Record):
    model: str
    num_parameters: int
    max_context: int
    seed: int
    cells: tuple[Cell, ...] = ()
    losses: tuple[DomainLoss, ...] = ()
    """Loss over all domains first, then one per domain."""
    failures: tuple[Failure, ...] = ()
    """The first few failures of each suite."""
    notes: tuple[str, ...] = ()
    """Caveats: skipped lines, random weights, lengths beyond the context."""

    @property
    def suites(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(cell.suite for cell in self.cells))

    def cells_of(self, suite: str) -> tuple[Cell, ...]:
        return tuple(cell for cell in self.cells if cell.suite == suite)

    def score(self, suite: str) -> float:
        """Mean over the samples of all cells of a suite."""
        cells = self.cells_of(suite)
        return sum(cell.score * cell.num_samples for cell in cells) / sum(cell.num_samples for cell in cells)

    def save(self, folder: Path) -> None:
        write_atomic(folder / JSON_FILE, self.model_dump_json(indent=1) + "\n")

    @classmethod
    def load(cls, folder: Path) -> Self:
        path = folder / JSON_FILE
        try:
            return cls.model_validate_json(path.read_bytes())
        except OSError as error:
            raise NotFoundError(
                f"{path}: cannot be read ({error.strerror}); give a folder that an eval wrote"
            ) from error
        except ValidationError as error:
            raise DataError(f"{path}: not an evaluation report ({error.error_count()} problems)") from error


def make_cell(
    suite: str,
    task: str,
    scores: Sequence[float],
    exact: Sequence[bool],
    *,
    length: int | None = None,
    depth: float | None = None,
    num_shots: int | None = None,
    beyond_context: bool = False,
) -> Cell:
    mean = sum(scores) / len(scores)
    low, high = wilson(mean, len(scores))
    return Cell(
        suite=suite,
        task=task,
        length=length,
        depth=depth,
        num_shots=num_shots,
        num_samples=len(scores),
        score=mean,
        exact=sum(exact) / len(exact),
        low=low,
        high=high,
        beyond_context=beyond_context,
    )


def wilson(mean: float, num_samples: int) -> tuple[float, float]:
    """The 95% Wilson interval of a proportion. It is conservative for means of scores between 0 and 1, because such a
    score has at most the variance of a Bernoulli variable with the same mean."""
    z2_n = Z_95**2 / num_samples
    centre = (mean + z2_n / 2) / (1 + z2_n)
    half = Z_95 * math.sqrt(mean * (1 - mean) / num_samples + z2_n / (4 * num_samples)) / (1 + z2_n)
    # At 0 and 1 the bound equals the mean; rounding must not step past it.
    return max(0.0, min(mean, centre - half)), min(1.0, max(mean, centre + half))


UNKNOWN = "\N{REPLACEMENT CHARACTER}".encode()


def readable_bytes(tokenizer: Tokenizer, ids: Sequence[int], *, unknown: bytes = UNKNOWN) -> bytes:
    """The bytes of `ids`, with `unknown` for each id that the tokenizer does not have."""
    try:
        return tokenizer.decode_bytes(ids)
    except NotFoundError:
        if len(ids) == 1:
            return unknown
    return b"".join(readable_bytes(tokenizer, [token], unknown=unknown) for token in ids)


def readable_text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    return readable_bytes(tokenizer, ids).decode(errors="replace")


STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #222 }
  .title { font-size: 16px; font-weight: 600 }
  .axis { stroke: #888; stroke-width: 1 } .grid { stroke: #8884; stroke-width: 1 }
  .paper { fill: #fff }
  @media (prefers-color-scheme: dark) { text { fill: #ddd } .paper { fill: #16181c } }
"""
SCALE = ((0.0, (179, 88, 6)), (0.5, (244, 240, 232)), (1.0, (33, 102, 172)))
LINES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a8a8a", "#7a5195")
"""Okabe and Ito's palette, with two more colours."""
TITLE_SIGN, TEXT_SIGN = 10, 8
"""Width reserved per character, in pixels."""
MARKED = "*"

Point = tuple[float, float, float, float]
"""x, share, low, high."""


def heat_map(
    title: str,
    columns: Sequence[str],
    rows: Sequence[str],
    shares: Mapping[tuple[int, int], float],
    *,
    x_label: str,
    y_label: str,
    note: str = "",
) -> str:
    """`shares`: by (row, column); a missing cell stays empty."""
    cell_w, cell_h, left, top = 78, 38, 92, 60
    width = left + max(cell_w * len(columns) + 100, TITLE_SIGN * len(title), TEXT_SIGN * len(note))
    height = top + cell_h * len(rows) + 84
    parts = [_text(left, 28, title, kind="title")]
    for (row, column), share in sorted(shares.items()):
        x, y = left + column * cell_w, top + row * cell_h
        red, green, blue = _colour(share)
        ink = "#111" if 0.3 * red + 0.59 * green + 0.11 * blue > 140 else "#fff"
        tooltip = escape(f"{rows[row]}, {columns[column]}: {share:.1%}")
        parts.append(
            f'<rect class="cell" x="{x + 1}" y="{y + 1}" width="{cell_w - 2}" height="{cell_h - 2}" rx="3" '
            f'fill="rgb({red},{green},{blue})"><title>{tooltip}</title></rect>'
        )
        position = f'x="{x + cell_w / 2}" y="{y + cell_h / 2 + 5}" text-anchor="middle"'
        parts.append(f'<text {position} style="fill:{ink}">{share * 100:.0f}</text>')
    for row, label in enumerate(rows):
        parts.append(_text(left - 8, top + (row + 0.5) * cell_h + 5, label, anchor="end"))
    bottom = top + cell_h * len(rows)
    for column, label in enumerate(columns):
        parts.append(_text(left + (column + 0.5) * cell_w, bottom + 20, label, anchor="middle"))
    parts.append(_text(left + cell_w * len(columns) / 2, bottom + 44, x_label, anchor="middle"))
    middle = top + cell_h * len(rows) / 2
    parts.append(_text(20, middle, y_label, anchor="middle", is_vertical=True))
    parts.append(_text(left, bottom + 68, note))
    parts += _legend(left + cell_w * len(columns) + 24, top, max(cell_h * len(rows), 120))
    return _document(width, max(height, top + 150), parts)


def line_chart(
    title: str,
    lines: Mapping[str, Sequence[Point]],
    *,
    x_label: str,
    marked: Collection[float] = (),
    note: str = "",
) -> str:
    """One line per name over x, spaced by rank because lengths and counts double. `marked`: x values with a star."""
    left, top, plot_w, plot_h = 64, 50, 460, 260
    xs = sorted({point[0] for points in lines.values() for point in points})
    step = plot_w / max(1, len(xs) - 1)
    position = {x: left + (index * step if len(xs) > 1 else plot_w / 2) for index, x in enumerate(xs)}
    parts = [_text(left, 28, title, kind="title")]
    for percent in (0, 25, 50, 75, 100):
        y = top + plot_h * (1 - percent / 100)
        parts.append(f'<line class="grid" x1="{left}" y1="{y:.1f}" x2="{left + plot_w}" y2="{y:.1f}"/>')
        parts.append(_text(left - 8, y + 5, f"{percent}%", anchor="end"))
    labels = {x: number(x) + MARKED * (x in marked) for x in xs}
    parts += [_text(position[x], top + plot_h + 20, label, anchor="middle") for x, label in labels.items()]
    for index, (name, points) in enumerate(lines.items()):
        colour = LINES[index % len(LINES)]
        dots = [(position[x], *(top + plot_h * (1 - value) for value in values)) for x, *values in sorted(points)]
        parts.append(_line(dots, colour, name))
        parts.append(f'<rect x="{left + plot_w + 20}" y="{top + index * 22}" width="14" height="14" fill="{colour}"/>')
        parts.append(_text(left + plot_w + 40, top + index * 22 + 12, name))
    parts.append(_text(left + plot_w / 2, top + plot_h + 44, x_label, anchor="middle"))
    parts.append(_text(left, top + plot_h + 68, note))
    longest = max((len(name) for name in lines), default=0)
    height = max(top + plot_h + 84, top + 22 * len(lines) + 20)
    return _document(left + plot_w + 60 + TEXT_SIGN * longest, height, parts)


def number(value: float) -> str:
    """A length in short form: 512, 4K, 128K."""
    if value >= 1024 and value % 1024 == 0:
        return f"{value / 1024:.0f}K"
    return f"{value:g}" if value < 1_000_000 else f"{value / 1_000_000:g}M"


def _line(dots: Sequence[tuple[float, ...]], colour: str, name: str) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y, *_ in dots)
    bars = "".join(
        f'<line x1="{x:.1f}" y1="{low:.1f}" x2="{x:.1f}" y2="{high:.1f}" stroke="{colour}" stroke-opacity="0.45" '
        'stroke-width="2"/>'
        for x, _, low, high in dots
    )
    circles = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>' for x, y, *_ in dots)
    line = f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
    return f'<g class="line"><title>{escape(name)}</title>{bars}{line}{circles}</g>'


def _legend(x: float, y: float, height: float) -> list[str]:
    stops = "".join(
        f'<stop offset="{1 - at:g}" stop-color="rgb({red},{green},{blue})"/>'
        for at, (red, green, blue) in reversed(SCALE)
    )
    gradient = f'<linearGradient id="scale" x1="0" y1="0" x2="0" y2="1">{stops}</linearGradient>'
    bar = f'<rect class="legend" x="{x}" y="{y}" width="16" height="{height}" rx="3" fill="url(#scale)"/>'
    labels = [_text(x + 22, y + height * (1 - at) + (10 if at == 1 else 0), f"{at:.0%}") for at in (1.0, 0.5, 0.0)]
    return [f"<defs>{gradient}</defs>{bar}", *labels]


def _text(x: float, y: float, text: str, *, anchor: str = "start", kind: str = "", is_vertical: bool = False) -> str:
    if not text:
        return ""
    rotation = f' transform="rotate(-90 {x:g} {y:g})"' if is_vertical else ""
    named = f' class="{kind}"' if kind else ""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{named}{rotation}>{escape(text)}</text>'


def _colour(share: float) -> tuple[int, int, int]:
    share = min(1.0, max(0.0, share))
    (low, start), (high, end) = SCALE[:2] if share < SCALE[1][0] else SCALE[1:]
    weight = (share - low) / (high - low)
    red, green, blue = (round(a + (b - a) * weight) for a, b in zip(start, end, strict=True))
    return red, green, blue


def _document(width: float, height: float, parts: Sequence[str]) -> str:
    size = f'width="{width:g}" height="{height:g}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" {size}>'
    paper = f'<rect class="paper" {size}/>'
    return "\n".join([head, f"<style>{STYLE}</style>", paper, *filter(None, parts), "</svg>\n"])


LENGTH_FILE, SHOTS_FILE = (f"{name}.svg" for name in CHARTS)


def plots(report: EvalReport) -> dict[str, str]:
    """SVG text by file name."""
    charts = {}
    for suite in report.suites:
        cells = [cell for cell in report.cells_of(suite) if cell.depth is not None and cell.length is not None]
        if len({cell.depth for cell in cells}) > 1:
            charts[f"{suite}.svg"] = _heat_map(suite, cells, report)
    by_length = {suite: points for suite in report.suites if (points := _points(report, suite, "length"))}
    if by_length:
        beyond = {float(cell.length) for cell in report.cells if cell.length is not None and cell.beyond_context}
        charts[LENGTH_FILE] = line_chart(
            "Score by length",
            by_length,
            x_label="length in tokens",
            marked=beyond,
            note=_context_note(report, bool(beyond)),
        )
    by_shots = {suite: points for suite in report.suites if (points := _points(report, suite, "num_shots"))}
    if by_shots:
        charts[SHOTS_FILE] = line_chart("Score by number of examples", by_shots, x_label="examples in the prompt")
    return charts


def _heat_map(suite: str, cells: list[Cell], report: EvalReport) -> str:
    lengths = sorted({cell.length for cell in cells if cell.length is not None})
    depths = sorted({cell.depth for cell in cells if cell.depth is not None})
    beyond = {cell.length for cell in cells if cell.beyond_context}
    shares = {
        (depths.index(cell.depth), lengths.index(cell.length)): cell.score
        for cell in cells
        if cell.depth is not None and cell.length is not None
    }
    return heat_map(
        f"{suite}: share of right answers, %",
        [number(length) + MARKED * (length in beyond) for length in lengths],
        [f"{depth:.0%}" for depth in depths],
        shares,
        x_label="length in tokens",
        y_label="depth of the needle",
        note=_context_note(report, bool(beyond)),
    )


def _context_note(report: EvalReport, beyond: bool) -> str:
    return f"{MARKED} beyond the network's context of {number(report.max_context)}" if beyond else ""


def _points(report: EvalReport, suite: str, axis: str) -> list[Point]:
    """Means over depths, with the confidence interval of the pooled samples."""
    points = []
    cells = [cell for cell in report.cells_of(suite) if getattr(cell, axis) is not None]
    for x in sorted({getattr(cell, axis) for cell in cells}):
        there = [cell for cell in cells if getattr(cell, axis) == x]
        num_samples = sum(cell.num_samples for cell in there)
        mean = sum(cell.score * cell.num_samples for cell in there) / num_samples
        points.append((float(x), mean, *wilson(mean, num_samples)))
    return points


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
