"""Trials: a model, tasks and an agent in; the success rate with its confidence interval out.

    OUTPUT/trials.jsonl     a line for each trial: task, verdict with its evidence, or the failure of the infrastructure
    OUTPUT/trials.json      the report; trials.svg its plot, trials.html both and all tasks, for a browser
    OUTPUT/trials.toml      the resolved configuration

The model is sampled in this process, behind a gateway of its own, and the one attempt runner (`agents/attempt.py`)
makes the attempts. A trial that failed for reasons other than the policy is tried again up to `max_tries` times; then
it is infra, counted apart. Finished trials of a killed evaluation are not repeated: the same command goes on.
"""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from m2forge.agents.attempt import AttemptResult, AttemptRunner, Interrupted, Overrides, WorkerLost
from m2forge.agents.workspace import Workspaces
from m2forge.config import dump, write_resolved
from m2forge.errors import ConfigError, M2ForgeError, RunError
from m2forge.files import append_line
from m2forge.gateway.format import load_format
from m2forge.gateway.server import GatewayServer
from m2forge.key import make_key
from m2forge.model.config_file import read_config
from m2forge.model.hub import find_folder, pinned
from m2forge.observe.progress import Progress, progress
from m2forge.protocols import Engine
from m2forge.records import Task
from m2forge.rl.attempts import attempt_sandbox, cancel_all, gather, open_agent, require_agent
from m2forge.rl.child_main import FamilyToolHost
from m2forge.rl.gateway_admin import GatewayAdmin
from m2forge.tasks.family import family_name
from m2forge.tasks.runner import TaskRunner
from m2forge.trials.config import TrialEvalConfig, TrialsConfig
from m2forge.trials.report import LINES_FILE, Trial, TrialsReport, make_report, print_report, read_trials, write_report

CONFIG_FILE = "trials.toml"
MAX_INTERRUPTIONS = 20
"""Maximum interrupted attempts at one trial."""
OpenEngine = Callable[[Path, TrialsConfig], Engine]


def open_native(folder: Path, config: TrialsConfig) -> Engine:
    import torch

    from m2forge.rollout.config import ServeConfig
    from m2forge.rollout.engine import NativeEngine
    from m2forge.rollout.server.app import make_core

    if config.engine.num_threads is not None:
        torch.set_num_threads(config.engine.num_threads)
    serving = ServeConfig(device=config.engine.device, dtype=config.engine.dtype, rollout=config.engine.rollout)
    return NativeEngine(make_core(folder, serving))


def run_trials(
    config: TrialEvalConfig, *, open_engine: OpenEngine | None = None, console: Console | None = None
) -> TrialsReport:
    """Run the trials of `config`, except those that an earlier process has finished, and write the report.
    `open_engine`: what samples; None: the native engine."""
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
