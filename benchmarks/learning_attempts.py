"""Models behind gateways, side by side, and how long agents take with each: no trainer, nothing is learnt.

Each model has a sampler, a gateway and an agent program of its own, all processes as in a run of the loop. Attempts
take turns over the models, task by task, a few at once: other load on the machine affects all models alike, and
no request waits long for a token.
"""

import asyncio
import itertools
import math
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

from m2forge.agents.attempt import AttemptRunner
from m2forge.agents.workspace import Workspaces
from m2forge.cluster.local import LocalLauncher
from m2forge.errors import M2ForgeError
from m2forge.model.checkpoint import load_model
from m2forge.model.convert import find_companions
from m2forge.records import Task
from m2forge.rl.attempts import open_agent
from m2forge.rl.config import RLConfig
from m2forge.rl.gateway_admin import GatewayAdmin
from m2forge.rl.layout import Layout
from m2forge.rl.loop import count_starts
from m2forge.rl.servers import make_servers
from m2forge.tasks.runner import TaskRunner
from m2forge.text.format import make_format
from m2forge.text.tokenizer import load_tokenizer
from m2forge.train.run_dir import open_run

MODULE = "m2forge.rl.child_main"


@dataclass(frozen=True)
class Timed:
    """An attempt."""

    is_solved: bool
    is_broken: bool
    """Failed for a reason other than the policy; counts as not solved, and its time counts."""
    time_s: float
    """Wall-clock time from the task to the answer."""
    num_turns: int
    """Number of the policy's turns."""
    tools_s: float
    """Time spent in tools; the calls of one turn run in parallel."""


@dataclass(frozen=True)
class Summary:
    TITLES: ClassVar = ("success", "±", "s per success", "s per attempt", "in tools, s", "turns")

    success: float
    margin: float
    """Half of the 95% interval of the success."""
    success_s: float
    """Time of all attempts, also those that failed, over successes."""
    time_s: float
    tools_s: float
    num_turns: float
    """Means over attempts."""
    num_broken: int

    @classmethod
    def of(cls, attempts: Sequence[Timed]) -> "Summary":
        num, num_solved = len(attempts), sum(attempt.is_solved for attempt in attempts)
        total_s = sum(attempt.time_s for attempt in attempts)
        return cls(
            success=num_solved / num,
            margin=1.96 * math.sqrt(num_solved * (num - num_solved) / num**3),
            success_s=total_s / max(1, num_solved),
            time_s=total_s / num,
            tools_s=sum(attempt.tools_s for attempt in attempts) / num,
            num_turns=sum(attempt.num_turns for attempt in attempts) / num,
            num_broken=sum(attempt.is_broken for attempt in attempts),
        )

    def cells(self) -> tuple[str, ...]:
        """The cells of a table row under `TITLES`."""
        shares = (f"{value:.1%}" for value in (self.success, self.margin))
        times = (f"{value:.3f}" for value in (self.success_s, self.time_s, self.tools_s))
        return (*shares, *times, f"{self.num_turns:.2f}")


def time_attempts(
    models: Mapping[str, Path], config: RLConfig, tasks: Sequence[Task], num_at_once: int
) -> dict[str, list[Timed]]:
    """Every task attempted once with each model. `config`: of agents, sampler and gateway."""
    with tempfile.TemporaryDirectory() as name:
        return asyncio.run(_time_attempts(models, config, tasks, num_at_once, Path(name)))


async def _time_attempts(
    models: Mapping[str, Path], config: RLConfig, tasks: Sequence[Task], num_at_once: int, folder: Path
) -> dict[str, list[Timed]]:
    async with AsyncExitStack() as stack:
        agents = {
            name: await stack.enter_async_context(_served(config, model, folder / str(place)))
            for place, (name, model) in enumerate(models.items())
        }
        for each in agents.values():
            await each.gateway.wait_until_up("first")
            # The first attempt waits for the program to start.
            await _attempt(each, tasks[0], "first")
        seats = asyncio.Semaphore(num_at_once)

        async def attempt(name: str, index: int) -> Timed:
            async with seats:
                return await _attempt(agents[name], tasks[index], f"attempt-{index}")

        turns = [(name, index) for index in range(len(tasks)) for name in models]
        timed = await asyncio.gather(*(attempt(*turn) for turn in turns))
    return {name: [each for turn, each in zip(turns, timed, strict=True) if turn[0] == name] for name in models}


async def _attempt(runner: AttemptRunner[TaskRunner], task: Task, name: str) -> Timed:
    started_s = time.monotonic()
    try:
        tried = await runner.attempt(name, task, group="")
    except M2ForgeError:
        return Timed(False, True, time.monotonic() - started_s, 0, 0.0)
    time_s = time.monotonic() - started_s
    runner.gateway.delete_soon(name)
    is_solved = tried.failure is None and tried.verdict.perf == 1
    calls = sorted(
        (tried.tree.call(index) for index in range(len(tried.tree.samples))), key=lambda call: call.started_s
    )
    # Between two calls the agent does nothing else.
    tools_s = sum(later.started_s - call.finished_s for call, later in itertools.pairwise(calls))
    return Timed(is_solved, False, time_s, len(calls), tools_s)


@asynccontextmanager
async def _served(config: RLConfig, model: Path, folder: Path) -> AsyncIterator[AttemptRunner[TaskRunner]]:
    layout = Layout(folder)
    folder.mkdir()
    open_run(folder, config, None)
    layout.weight_store(config, find_companions(model)).publish(load_model(model), 0)
    format = make_format(config.gateway.format, load_tokenizer(model))
    launcher = LocalLauncher(layout.log, layout.processes)
    servers = await make_servers(launcher, layout, config)
    children = [server.child for server in servers.all]
    (gateway,) = servers.gateways
    keeping = [asyncio.create_task(child.supervise()) for child in children]
    try:
        async with (
            GatewayAdmin(
                gateway.url,
                gateway.key,
                budget=config.agent.budget,
                sampling=config.agent.sampling.record(),
            ) as admin,
            open_agent(config.agent, layout.agents, format) as agent,
            TaskRunner(config.verify, folder / "verify", config.curriculum.family_keys) as runner,
        ):
            workspaces = Workspaces(layout.workspaces)
            yield AttemptRunner(agent, admin, runner, workspaces, partial(count_starts, servers))
    finally:
        await asyncio.gather(*(child.stop() for child in children))
        await asyncio.gather(*keeping)
        await launcher.close()
