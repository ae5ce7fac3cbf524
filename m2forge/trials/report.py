"""The report of trials: trials in; rates, a comparison and the cost out, as a table, a plot and a page.

A rate is over the trials of some tasks: mean perf, pass@1 (the share of trials with perf 1) and pass^k (k trials of a
task all succeed), each with its 95% confidence interval clustered by task. Trials that failed for reasons other than
the policy are counted apart. Two policies are compared on the tasks that both have tried.

Trials of one task resemble each other, so the interval comes from the sums of the tasks' residuals. With trials y of G
tasks, N in all, those of task g in C(g):

    mean     = Σ y / N
    variance = G / (G - 1) · Σ_g (Σ_{i in C(g)} (y_i - mean))² / N²
    margin   = z · sqrt(variance), z = 1.96

pass^k is the chance that k trials of a task all succeed: of a task with c successes in n trials the unbiased estimate
is C(c, k) / C(n, k). pass^1 is pass@1. Two policies are compared by the differences of their means, task by task.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path

from rich.console import Console
from rich.table import Table

from m2forge.errors import DataError, NotFoundError, RecordError
from m2forge.evaluate.report import Point, line_chart
from m2forge.files import whole_lines, write_atomic
from m2forge.records import JsonValue
from m2forge.trials.config import Price

LINES_FILE, REPORT_FILE, PLOT_FILE, PAGE_FILE = "trials.jsonl", "trials.json", "trials.svg", "trials.html"
Z = 1.959964
"""The 97.5% quantile of the standard normal distribution."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A line of `trials.jsonl`."""

    task: str
    family: str
    number: int
    """From 0 on, among the trials of its task."""
    perf: float | None
    """None if the infrastructure failed."""
    seconds: float
    infra: str | None = None
    """What failed, if it was not the policy."""
    failure: str | None = None
    """How the attempt ended because of the policy, if it did not end by itself."""
    reason: str = ""
    evidence: dict[str, JsonValue] = field(default_factory=dict)
    answer: str = ""
    num_calls: int = 0
    num_tokens: int = 0
    """Sampled tokens."""
    num_prompt_tokens: int = 0
    """Prompt tokens of all calls."""

    @property
    def is_solved(self) -> bool:
        return self.perf == 1


@dataclass(frozen=True, slots=True)
class Rate:
    """What the trials of some tasks gave. `margin`: half the width of the 95% confidence interval; None if one task is
    all."""

    num_tasks: int
    num_trials: int
    num_infra: int
    perf: float | None
    perf_margin: float | None
    solved: float | None
    """pass@1: share of the trials with perf 1."""
    solved_margin: float | None
    pass_all: tuple[tuple[float, float | None], ...] = ()
    """pass^1, pass^2, … up to the number of trials, each with its margin."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """This policy against another one, over the tasks that both have tried."""

    num_tasks: int
    solved: float
    other_solved: float
    """pass@1 over these tasks, each task with the same weight."""
    difference: float
    margin: float | None
    num_better: int
    """Tasks whose pass@1 is higher with this policy; the others have the same with both, or a lower one."""
    num_worse: int


@dataclass(frozen=True, slots=True)
class TrialsReport:
    all: Rate
    by_family: dict[str, Rate]
    seconds: float
    """Sum over the trials."""
    num_calls: int
    num_tokens: int
    num_prompt_tokens: int = 0
    cost: float | None = None
    """By the configured price; None without one."""
    comparison: Comparison | None = None


def read_trials(path: Path, *, is_needed: bool = False) -> list[Trial]:
    """Skips a partial last line, left by a process that died while writing. A file that is not there has no trials,
    unless it is needed."""
    if not path.exists():
        if is_needed:
            raise NotFoundError(f"{path}: no trials; give the output folder of an evaluation with `trials`")
        return []
    trials = []
    for number, line in enumerate(whole_lines(path.read_bytes()), start=1):
        try:
            trials.append(Trial(**json.loads(line)))
        except (ValueError, TypeError) as error:
            raise RecordError(f"{path}, line {number}: not a trial ({error}); remove the line") from error
    return trials


def make_report(
    trials: Sequence[Trial], num_trials: int, price: Price | None = None, other: Sequence[Trial] | None = None
) -> TrialsReport:
    """`num_trials`: of each task. `other`: trials of another policy to compare with."""
    families = dict.fromkeys(trial.family for trial in trials)
    num_tokens, num_prompt_tokens = (
        sum(getattr(trial, name) for trial in trials) for name in ("num_tokens", "num_prompt_tokens")
    )
    cost = None
    if price is not None and (price.prompt or price.completion):
        cost = (price.prompt * num_prompt_tokens + price.completion * num_tokens) / 1e6
    return TrialsReport(
        all=rate_of(trials, num_trials),
        by_family={name: rate_of([trial for trial in trials if trial.family == name], num_trials) for name in families},
        seconds=sum(trial.seconds for trial in trials),
        num_calls=sum(trial.num_calls for trial in trials),
        num_tokens=num_tokens,
        num_prompt_tokens=num_prompt_tokens,
        cost=cost,
        comparison=None if other is None else compare(trials, other),
    )


def rate_of(trials: Sequence[Trial], num_trials: int) -> Rate:
    perfs = _perfs(trials)
    num = sum(map(len, perfs.values()))
    if not num:
        return Rate(len(perfs), 0, len(trials), None, None, None, None)
    solved = [[value == 1 for value in values] for values in perfs.values()]
    perf, share = clustered_mean(list(perfs.values())), clustered_mean(solved)
    passes = [found for k in range(1, num_trials + 1) if (found := pass_all(solved, k)) is not None]
    return Rate(
        len(perfs),
        num,
        len(trials) - num,
        perf.value,
        _finite(perf.margin),
        share.value,
        _finite(share.margin),
        tuple((found.value, _finite(found.margin)) for found in passes),
    )


def compare(trials: Sequence[Trial], other: Sequence[Trial]) -> Comparison:
    ours, theirs = _perfs(trials), _perfs(other)
    common = [task for task in ours if ours[task] and theirs.get(task)]
    if not common:
        raise DataError("trials.compare: no task was tried by both policies; give trials at the same tasks")
    pairs = [([float(v == 1) for v in ours[task]], [float(v == 1) for v in theirs[task]]) for task in common]
    means = [(sum(a) / len(a), sum(b) / len(b)) for a, b in pairs]
    difference = paired_difference([a for a, _ in pairs], [b for _, b in pairs])
    return Comparison(
        num_tasks=len(common),
        solved=sum(a for a, _ in means) / len(means),
        other_solved=sum(b for _, b in means) / len(means),
        difference=difference.value,
        margin=_finite(difference.margin),
        num_better=sum(a > b for a, b in means),
        num_worse=sum(a < b for a, b in means),
    )


def _perfs(trials: Sequence[Trial]) -> dict[str, list[float]]:
    """The perfs of each task's trials; of one that only failed for other reasons, none."""
    perfs: dict[str, list[float]] = {trial.task: [] for trial in trials}
    for trial in trials:
        if trial.perf is not None:
            perfs[trial.task].append(trial.perf)
    return perfs


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


# -- means and their intervals ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Mean:
    value: float
    margin: float
    """Half the width of the interval; NaN for a single task, which tells nothing of others."""


def clustered_mean(clusters: Sequence[Sequence[float]]) -> Mean:
    """`clusters`: the values of each task's trials; tasks without any do not count. Raises without a value."""
    clusters = [cluster for cluster in clusters if cluster]
    num = sum(map(len, clusters))
    mean = sum(map(sum, clusters)) / num
    if len(clusters) < 2:
        return Mean(mean, math.nan)
    residuals = [sum(value - mean for value in cluster) for cluster in clusters]
    variance = len(clusters) / (len(clusters) - 1) * sum(residual**2 for residual in residuals) / num**2
    return Mean(mean, Z * math.sqrt(variance))


def pass_all(clusters: Sequence[Sequence[bool]], k: int) -> Mean | None:
    """pass^k over tasks; those with fewer than k trials do not count. None if no task has k."""
    shares = [[math.comb(sum(trials), k) / math.comb(len(trials), k)] for trials in clusters if len(trials) >= k]
    return clustered_mean(shares) if shares else None


def paired_difference(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> Mean:
    """Mean over tasks of the difference of two policies' means; position by position the same task."""
    pairs = zip(ours, theirs, strict=True)
    return clustered_mean([[sum(a) / len(a) - sum(b) / len(b)] for a, b in pairs])


# -- a table, a plot, a page ------------------------------------------------------------------------------------------

COLUMNS = ("family", "tasks", "trials", "infra", "perf", "pass@1")


def print_report(report: TrialsReport, console: Console) -> None:
    columns, rows = _rows(report)
    table = Table(title="trials, with 95% confidence intervals", title_justify="left")
    for name in columns:
        table.add_column(name, justify="left" if name == "family" else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    for line in _sentences(report):
        console.print(line, highlight=False)


def write_report(folder: Path, report: TrialsReport, trials: Sequence[Trial], title: str) -> None:
    write_atomic(folder / REPORT_FILE, json.dumps(asdict(report), indent=2))
    plot = _plot(report)
    write_atomic(folder / PLOT_FILE, plot)
    write_atomic(folder / PAGE_FILE, _page(report, trials, plot, title))


def _rows(report: TrialsReport) -> tuple[list[str], list[list[str]]]:
    """The table's heading and lines. pass^k: that of all trials of a task."""
    k = max((len(rate.pass_all) for rate in report.by_family.values()), default=0)
    columns = [*COLUMNS, *([f"pass^{k}"] if k > 1 else [])]
    named = [*report.by_family.items(), ("all", report.all)] if len(report.by_family) > 1 else report.by_family.items()
    rows = []
    for name, rate in named:
        row = [name, str(rate.num_tasks), str(rate.num_trials), str(rate.num_infra)]
        row += [_shown(rate.perf, rate.perf_margin), _shown(rate.solved, rate.solved_margin)]
        if k > 1:
            row.append(_shown(*rate.pass_all[k - 1]) if len(rate.pass_all) >= k else "–")
        rows.append(row)
    return columns, rows


def _sentences(report: TrialsReport) -> list[str]:
    num, found = max(report.all.num_trials, 1), report.comparison
    cost = "" if report.cost is None else f", {report.cost / num:.4f} in price ({report.cost:,.2f} in all)"
    per_trial = (
        f"{report.seconds / num:.1f} s, {report.num_calls / num:.1f} calls, {report.num_prompt_tokens / num:,.0f} "
        f"prompt tokens and {report.num_tokens / num:,.0f} sampled tokens{cost} per trial; intervals are clustered by "
        "task"
    )
    lines = [per_trial]
    if found is not None:
        lines.append(
            f"against the other policy, {found.num_tasks} tasks: pass@1 {found.solved:.1%} and "
            f"{found.other_solved:.1%}, difference {_shown(found.difference, found.margin)}; "
            f"{found.num_better} tasks better, {found.num_worse} worse"
        )
    return lines


def _shown(value: float | None, margin: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.1%}" if margin is None else f"{value:.1%} ±{margin:.1%}"


def _plot(report: TrialsReport) -> str:
    lines: dict[str, list[Point]] = {}
    for name, rate in report.by_family.items():
        means = [Mean(value, margin or 0.0) for value, margin in rate.pass_all]
        lines[name] = [
            (float(k), mean.value, max(0.0, mean.value - mean.margin), min(1.0, mean.value + mean.margin))
            for k, mean in enumerate(means, start=1)
        ]
    return line_chart("pass^k", {name: points for name, points in lines.items() if points}, x_label="k")


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Trials of {title}</title>
<style>
:root {{ color-scheme: light dark }}
body {{ font: 15px system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }}
table {{ border-collapse: collapse; margin: 1rem 0 }}
th, td {{ padding: .25rem .7rem; text-align: right; border-bottom: 1px solid #8884 }}
th:first-child, td:first-child, .text {{ text-align: left }}
</style></head><body>
<h1>Trials of {title}</h1>
<p>95% confidence intervals, clustered by task. pass@1: share of the trials with perf 1. pass^k: k trials of a task all
succeed.</p>
{rates}
{sentences}
{plot}
<h2>Tasks</h2>
{tasks}
</body></html>
"""


def _page(report: TrialsReport, trials: Sequence[Trial], plot: str, title: str) -> str:
    by_task: dict[str, list[Trial]] = {}
    for trial in trials:
        by_task.setdefault(trial.task, []).append(trial)
    rows = []
    for task, tried in by_task.items():
        counted = [trial for trial in tried if trial.perf is not None]
        reasons = dict.fromkeys(trial.infra or trial.failure or trial.reason for trial in tried if not trial.is_solved)
        solved = f"{sum(trial.is_solved for trial in counted)} of {len(counted)}"
        seconds = sum(trial.seconds for trial in tried) / len(tried)
        shown = "; ".join(reason for reason in reasons if reason)[:200]
        rows.append([task, solved, str(len(tried) - len(counted)), f"{seconds:.1f}", shown])
    return _PAGE.format(
        title=escape(title),
        rates=_html_table(*_rows(report)),
        sentences="".join(f"<p>{escape(line)}</p>" for line in _sentences(report)),
        plot=plot,
        tasks=_html_table(["task", "solved", "infra", "seconds", "why not"], rows),
    )


def _html_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
