"""Trials: a model, tasks and an agent in; the success rate with its confidence interval out.

    OUTPUT/trials.jsonl     a line for each trial: task, verdict with its evidence, or the failure of the infrastructure
    OUTPUT/trials.json      the report; trials.svg its plot, trials.html both and all tasks, for a browser
    OUTPUT/trials.toml      the resolved configuration

The model is sampled in this process, behind a gateway of its own, and the one attempt runner (`agents/attempt.py`)
makes the attempts. A trial that failed for reasons other than the policy is tried again up to `max_tries` times; then
it is infra, counted apart. Finished trials of a killed evaluation are not repeated: the same command resumes.

The report has rates, a comparison and the cost. A rate is over the trials of some tasks: mean perf, pass@1 (the share
of trials with perf 1) and pass^k (k trials of a task all succeed), each with its 95% confidence interval clustered by
task. Trials of one task resemble each other, so the interval comes from the sums of the tasks' residuals. With trials y
of G tasks, N in all, those of task g in C(g):

    mean     = Σ y / N
    variance = G / (G - 1) · Σ_g (Σ_{i in C(g)} (y_i - mean))² / N²
    margin   = z · sqrt(variance), z = 1.96

pass^k is the chance that k trials of a task all succeed: of a task with c successes in n trials the unbiased estimate
is C(c, k) / C(n, k). pass^1 is pass@1. Two policies are compared on the tasks that both have tried, by the differences
of their means, task by task.
"""

import asyncio
import json
import math
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.table import Table

from m2forge.agents.attempt import AttemptResult, AttemptRunner, Interrupted, Overrides, WorkerLost
from m2forge.agents.workspace import Workspaces
from m2forge.config import dump, write_resolved
from m2forge.errors import ConfigError, DataError, M2ForgeError, NotFoundError, RecordError, RunError
from m2forge.evaluate.report import Point, line_chart
from m2forge.files import append_line, whole_lines, write_atomic
from m2forge.gateway.format import load_format
from m2forge.gateway.server import GatewayServer
from m2forge.key import make_key
from m2forge.model.config_file import read_config
from m2forge.model.hub import find_folder, pinned
from m2forge.observe.progress import Progress, progress
from m2forge.protocols import Engine
from m2forge.records import JsonValue, Task
from m2forge.rl.attempts import attempt_sandbox, cancel_all, gather, open_agent, require_agent
from m2forge.rl.child_main import FamilyToolHost
from m2forge.rl.gateway_admin import GatewayAdmin
from m2forge.tasks.family import family_name
from m2forge.tasks.runner import TaskRunner
from m2forge.trials.config import Price, TrialEvalConfig, TrialsConfig

LINES_FILE, REPORT_FILE, PLOT_FILE, PAGE_FILE = "trials.jsonl", "trials.json", "trials.svg", "trials.html"
Z = 1.959964
"""The 97.5% quantile of the standard normal distribution."""
CONFIG_FILE = "trials.toml"
MAX_INTERRUPTIONS = 20
"""Maximum interrupted attempts at one trial."""
OpenEngine = Callable[[Path, TrialsConfig], Engine]


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
    """The failure, if the policy did not cause it."""
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
    """Rates over the trials of some tasks. `margin`: half the width of the 95% confidence interval; None if there is
    only one task."""

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


def open_native(folder: Path, config: TrialsConfig) -> Engine:
    import torch

    from m2forge.rollout.config import ServeConfig
    from m2forge.rollout.engine import NativeEngine
    from m2forge.rollout.server.model_server import make_core

    if config.engine.num_threads is not None:
        torch.set_num_threads(config.engine.num_threads)
    serving = ServeConfig(device=config.engine.device, dtype=config.engine.dtype, rollout=config.engine.rollout)
    return NativeEngine(make_core(folder, serving))


def run_trials(
    config: TrialEvalConfig, *, open_engine: OpenEngine | None = None, console: Console | None = None
) -> TrialsReport:
    """Run the trials of `config`, except those that an earlier process has finished, and write the report.
    `open_engine`: opens the sampling engine; None: the native engine."""
    config = pinned(config, config.output / CONFIG_FILE)
    assert config.trials is not None
    other = None if config.trials.compare is None else read_trials(config.trials.compare / LINES_FILE, is_needed=True)
    trials = asyncio.run(_run(config, config.trials, open_engine or open_native))
    report = make_report(trials, config.trials.num_trials, config.trials.price, other)
    write_report(config.output, report, trials, title=config.model)
    if console is not None:
        print_report(report, console)
    return report


async def _run(config: TrialEvalConfig, trials: TrialsConfig, open_engine: OpenEngine) -> list[Trial]:
    await require_agent(trials.agent)
    folder = find_folder(config.model, config.revision)
    load_format(folder, trials.gateway)
    with TemporaryDirectory() as scratch:
        async with TaskRunner(trials.verify, Path(scratch), trials.tasks) as runner:
            tasks = await draw_tasks(trials, runner)
            done = _resume(config)
            wanted = [
                (task, number) for number in range(trials.num_trials) for task in tasks if (task.id, number) not in done
            ]
            if wanted:
                async with _open_runner(config, trials, folder, runner, open_engine) as attempts:
                    await _run_all(config, trials, attempts, wanted)
    found = {(trial.task, trial.number): trial for trial in read_trials(config.output / LINES_FILE)}
    return [found[task.id, number] for task in tasks for number in range(trials.num_trials)]


async def draw_tasks(config: TrialsConfig, runner: TaskRunner) -> list[Task]:
    """Distinct tasks of all sources, in the order of the sources."""
    tasks: list[Task] = []
    for index, source in enumerate(config.tasks):
        info = await runner.describe(source)
        num = config.num_tasks // len(config.tasks) + (index < config.num_tasks % len(config.tasks))
        listed = info.num_listed(config.split, info.lowest, info.highest)
        if listed == 0:
            raise ConfigError(
                f"trials.tasks: {source}: it has no task of the split {config.split!r}; set another split"
            )
        num = num if listed is None else min(num, listed)
        tasks += await runner.distinct(source, config.split, config.seed, num, info.lowest, info.highest)
    return list({task.id: task for task in tasks}.values())


def _resume(config: TrialEvalConfig) -> set[tuple[str, int]]:
    """Write the configuration; returns the trials that an earlier process has finished with it."""
    path, lines = config.output / CONFIG_FILE, config.output / LINES_FILE
    text = dump(config)
    if lines.exists() and path.exists() and path.read_text(encoding="utf-8") != text:
        raise ConfigError(
            f"output {config.output} holds trials of another configuration ({path}); give another folder, or remove "
            f"{lines} to start over"
        )
    config.output.mkdir(parents=True, exist_ok=True)
    write_resolved(config, path)
    return {(trial.task, trial.number) for trial in read_trials(lines) if trial.infra is None}


@asynccontextmanager
async def _open_runner(
    config: TrialEvalConfig, trials: TrialsConfig, folder: Path, runner: TaskRunner, open_engine: OpenEngine
) -> AsyncGenerator[AttemptRunner[TaskRunner], None]:
    """The attempt runner over an engine and a gateway of its own."""
    network, admin_key, serving = read_config(folder), make_key(), trials.gateway
    if "port" not in serving.model_fields_set:
        serving = serving.model_copy(update={"port": 0})  # Any free one.
    format = load_format(folder, trials.gateway)
    engine = await asyncio.to_thread(open_engine, folder, trials)
    try:
        gateway = GatewayServer(
            engine,
            format,
            serving,
            context=min(trials.engine.rollout.max_context or network.max_context, network.max_context),
            vocab_size=network.vocab_size,
            admin_key=admin_key,
            tool_host=FamilyToolHost(runner),
        )
        agent = trials.agent
        async with (
            gateway,
            GatewayAdmin(gateway.url, admin_key, budget=agent.budget, sampling=agent.sampling.record()) as admin,
            open_agent(agent, config.output / "agents", format) as opened,
        ):
            workspaces = Workspaces(config.output / "workspaces", attempt_sandbox(agent))
            yield AttemptRunner(opened, admin, runner, workspaces)
    finally:
        await engine.close()


async def _run_all(
    config: TrialEvalConfig,
    trials: TrialsConfig,
    runner: AttemptRunner[TaskRunner],
    wanted: Sequence[tuple[Task, int]],
) -> None:
    slots, writing = asyncio.Semaphore(trials.agent.num_jobs), asyncio.Lock()
    watching = asyncio.create_task(runner.agent.watch())

    async def run(task: Task, number: int, bar: Progress) -> None:
        async with slots:
            trial = await run_trial(runner, task, number, trials)
        async with writing:
            await asyncio.to_thread(append_line, config.output / LINES_FILE, json.dumps(asdict(trial)))
        bar.advance()

    with progress(len(wanted), "trials") as bar:
        running = asyncio.create_task(gather(run(task, number, bar) for task, number in wanted))
        try:
            # An agent that counts as broken ends the evaluation.
            await asyncio.wait((running, watching), return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                await watching
            await running
        finally:
            await cancel_all((running, watching))


async def run_trial(runner: AttemptRunner[TaskRunner], task: Task, number: int, config: TrialsConfig) -> Trial:
    started_s = time.monotonic()
    num_deaths = num_failed = 0
    problem = ""
    for attempt in range(MAX_INTERRUPTIONS):
        id = f"trial-{task.id}-{number}-{int(time.time() * 1e6)}-{attempt}"
        try:
            overrides = Overrides(context=config.context)
            result = await runner.attempt(id, task, group="", num_deaths=num_deaths, overrides=overrides)
        except Interrupted as error:
            num_deaths += isinstance(error, WorkerLost)
            problem = str(error)
        except RunError:
            raise
        except M2ForgeError as error:
            num_failed, problem = num_failed + 1, str(error)
            if num_failed >= config.max_tries:
                break
        else:
            runner.gateway.delete_soon(id)
            return _finished(task, number, result, time.monotonic() - started_s)
    return Trial(task.id, family_name(task), number, None, time.monotonic() - started_s, infra=problem)


def _finished(task: Task, number: int, result: AttemptResult, seconds: float) -> Trial:
    verdict = result.verdict
    return Trial(
        task=task.id,
        family=family_name(task),
        number=number,
        perf=verdict.perf,
        seconds=seconds,
        failure=result.failure,
        reason=verdict.reason,
        evidence=dict(verdict.evidence),
        answer=result.answer,
        num_calls=len(result.tree.samples),
        num_tokens=sum(sample.num_response for sample in result.tree.samples),
        num_prompt_tokens=sum(sample.num_prompt for sample in result.tree.samples),
    )


# -- rates and the comparison -----------------------------------------------------------------------------------------


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
    """The perfs of each task's trials, without those that failed for other reasons."""
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
    """Half the width of the interval; NaN for a single task, from which no interval follows."""


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
