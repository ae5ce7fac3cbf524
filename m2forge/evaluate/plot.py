"""The plots of a report: which cells go into which chart.

Every suite with several depths gets a heat map of depth by length; all suites measured by length share one line chart,
and so do those measured by number of shots.
"""

from m2forge.evaluate.config import CHARTS
from m2forge.evaluate.report import Cell, EvalReport, wilson
from m2forge.evaluate.svg import MARKED, Point, heat_map, line_chart, number

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
