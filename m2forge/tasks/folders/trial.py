"""`m2forge tasks run PATH…`: trials of agents at task folders; folders and agents in, a verdict for each trial out.

    oracle      runs the folder's own solution: every folder must have perf 1
    nop         does nothing: every folder must have perf 0
    COMMAND     a shell command in the sandbox; the instruction is its standard input

Each trial has sandboxes of its own. A sandbox that fails says nothing about the agent: the trial is retried, and after
`NUM_TRIES` failures it is `infra`, which is no verdict.
"""

import asyncio
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from m2forge.errors import DataError, EngineError, NotFoundError
from m2forge.protocols import Command, Sandbox
from m2forge.records import JsonValue, Verdict
from m2forge.sandbox.config import SandboxConfig
from m2forge.tasks.folders.environment import FolderEnvironment, prepare, resolved
from m2forge.tasks.folders.folder import SOLVE_NAME, Rejected, TaskFolder, read_folders
from m2forge.tasks.folders.task_image import owner_of_files
from m2forge.tasks.folders.task_toml import Step
from m2forge.tasks.folders.verification import verify_attempt

ORACLE, NOP = "oracle", "nop"
WANTED = {ORACLE: 1.0, NOP: 0.0}
"""The perf that an agent must have at every folder."""
NUM_TRIES = 3
MAX_PROBLEMS = 10
SOLUTION = "/solution"


@dataclass(frozen=True, slots=True)
class Trial:
    folder: Path
    agent: str
    number: int
    verdict: Verdict | None
    """None: the sandboxes failed."""
    seconds: float
    problem: str | None = None
    """What failed, or why the perf is 0."""

    @property
    def is_wrong(self) -> bool:
        wanted = WANTED.get(self.agent)
        return self.verdict is None or (wanted is not None and self.verdict.perf != wanted)

    def to_dict(self) -> dict[str, JsonValue]:
        verdict = self.verdict
        return {
            "folder": str(self.folder),
            "agent": self.agent,
            "trial": self.number,
            "perf": None if verdict is None else verdict.perf,
            "criteria": {} if verdict is None else dict(verdict.criteria),
            "evidence": {} if verdict is None else dict(verdict.evidence),
            "seconds": round(self.seconds, 3),
            "problem": self.problem,
        }


async def run_trials(
    paths: Sequence[Path],
    agents: Sequence[str],
    config: SandboxConfig,
    *,
    base_image: str | None = None,
    num_trials: int = 1,
    num_concurrent: int = 1,
    on_trial: Callable[[Trial], None] = lambda trial: None,
) -> tuple[list[Trial], list[Rejected]]:
    """Trials in the order of folders and agents, and folders that cannot be used."""
    folders, rejected = list[TaskFolder](), list[Rejected]()
    for path in paths:
        found, refused = await asyncio.to_thread(read_folders, path)
        folders, rejected = folders + found, rejected + refused
    slots = asyncio.Semaphore(num_concurrent)

    async def run(folder: TaskFolder) -> list[Trial]:
        async with slots:
            try:
                environment = await prepare(folder, config, base_image)
            except (DataError, NotFoundError) as error:
                rejected.append(Rejected(folder.path, str(error)))
                return []
            trials = []
            for agent in agents:
                for number in range(1, num_trials + 1):
                    trials.append(await _run_trial(environment, agent, number))
                    on_trial(trials[-1])
            return trials

    done = await asyncio.gather(*(run(folder) for folder in folders))
    return [trial for trials in done for trial in trials], rejected


async def _run_trial(environment: FolderEnvironment, agent: str, number: int) -> Trial:
    folder, started_s = environment.folder, time.perf_counter()
    problem = ""
    for _ in range(NUM_TRIES):
        try:
            verdict = await attempt(environment, agent)
        except (EngineError, OSError) as error:
            problem = f"infra: {error}"
        else:
            shown = verdict.evidence.get("problem")
            seconds = time.perf_counter() - started_s
            return Trial(folder.path, agent, number, verdict, seconds, None if shown is None else str(shown))
    return Trial(folder.path, agent, number, None, time.perf_counter() - started_s, problem)


async def attempt(environment: FolderEnvironment, agent: str) -> Verdict:
    """One attempt by an agent, and its verdict; with steps, of all of them together."""
    folder = environment.folder
    sandbox = await environment.open()
    try:
        verdicts: list[Verdict] = []
        for step in folder.steps or (None,):
            if step is not None:
                await _begin_step(environment, sandbox, step)
            await _act(environment, sandbox, agent, step)
            verdicts.append(await verify_attempt(environment, sandbox, step))
            if step is not None and _is_below(verdicts[-1], step):
                break
        return verdicts[0] if not folder.steps else _combined(folder, verdicts)
    finally:
        await sandbox.close()


async def _act(environment: FolderEnvironment, sandbox: Sandbox, agent: str, step: Step | None) -> None:
    folder = environment.folder
    own = folder.config.agent if step is None else step.agent
    timeout_s = own.timeout_sec or folder.config.agent.timeout_sec
    user = None if step is None or step.agent.user is None else str(step.agent.user)
    if agent == NOP:
        return
    if agent != ORACLE:
        instruction = folder.instruction(step).encode()
        await sandbox.run(Command(("/bin/sh", "-c", agent), stdin=instruction, timeout_s=timeout_s, user=user))
        return
    script = folder.solution(step)
    if script is None:
        raise DataError(f"{folder.part('solution', step) / SOLVE_NAME}: missing; the oracle runs it")
    await _upload_programs(sandbox, script.parent, SOLUTION)
    env = resolved(folder.config.solution.env, folder)
    await sandbox.run(Command((f"{SOLUTION}/{SOLVE_NAME}",), env=env, timeout_s=timeout_s, user=user))


async def _begin_step(environment: FolderEnvironment, sandbox: Sandbox, step: Step) -> None:
    """Copy the step's files into the workspace, and run its setup."""
    workdir = environment.folder.part("workdir", step)
    if workdir.is_dir():
        await sandbox.upload(workdir, sandbox.workspace)
    if (workdir / "setup.sh").is_file():
        outcome = await sandbox.run(Command(("/bin/sh", "setup.sh"), merges_stderr=True))
        if not outcome.is_success:
            raise DataError(f"{workdir / 'setup.sh'}: exited with {outcome.status}: {outcome.stdout.text()[-500:]}")


async def _upload_programs(sandbox: Sandbox, source: Path, target: str) -> None:
    """Upload a folder whose scripts are executable."""
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / "files"
        await asyncio.to_thread(shutil.copytree, source, copy, symlinks=True)
        for path in copy.rglob("*"):
            if not path.is_symlink():
                path.chmod(0o755 if path.is_dir() or path.suffix == ".sh" else path.stat().st_mode | 0o444)
        await sandbox.upload(copy, target, owner_of_files())


def _is_below(verdict: Verdict, step: Step) -> bool:
    if step.min_reward is None:
        return False
    wanted = step.min_reward if isinstance(step.min_reward, dict) else {"reward": step.min_reward}
    found = dict(verdict.criteria) | {"reward": verdict.perf}
    return any(found.get(name, -1.0) < value for name, value in wanted.items())


def _combined(folder: TaskFolder, verdicts: Sequence[Verdict]) -> Verdict:
    """The verdict of all steps: the last one's, or their mean, in which a step that was left out does not count."""
    names = [step.name for step in folder.steps]
    criteria = {name: verdict.perf for name, verdict in zip(names, verdicts, strict=False)}
    evidence: dict[str, JsonValue] = {name: dict(v.evidence) for name, v in zip(names, verdicts, strict=False)}
    perfs = [verdict.perf for verdict in verdicts]
    perf = perfs[-1] if folder.config.multi_step_reward_strategy == "final" else statistics.fmean(perfs)
    problems = [str(v.evidence["problem"]) for v in verdicts if "problem" in v.evidence]
    return Verdict(perf, evidence | ({"problem": problems[0]} if problems else {}), criteria=criteria)


def print_trials(trials: Sequence[Trial], rejected: Sequence[Rejected], console: Console) -> None:
    agents = list(dict.fromkeys(trial.agent for trial in trials))
    num_folders = len({trial.folder for trial in trials})
    table = Table(title=f"{num_folders} task folder{'s' if num_folders != 1 else ''}", title_justify="left")
    table.add_column("folder")
    for agent in agents:
        table.add_column(agent, justify="right")
    table.add_column("slowest", justify="right")
    for folder in dict.fromkeys(trial.folder for trial in trials):
        own = [trial for trial in trials if trial.folder == folder]
        cells = [_cell([trial for trial in own if trial.agent == agent]) for agent in agents]
        table.add_row(folder.name, *cells, f"{max(trial.seconds for trial in own):.2f} s")
    console.print(table)
    shown = [f"{trial.folder.name}: {trial.agent}: {trial.problem}" for trial in trials if trial.is_wrong]
    shown += [f"{item.path}: {item.problem}" for item in rejected]
    for line in shown[:MAX_PROBLEMS]:
        console.print(f"problem: {line}", markup=False, highlight=False)
    if len(shown) > MAX_PROBLEMS:
        console.print(f"and {len(shown) - MAX_PROBLEMS} more problems")


def _cell(trials: Sequence[Trial]) -> str:
    perfs = [trial.verdict.perf for trial in trials if trial.verdict is not None]
    text = f"{statistics.fmean(perfs):.3g}" if perfs else "–"
    return text if len(perfs) == len(trials) else f"{text} ({len(trials) - len(perfs)} infra)"
