"""What an attempt is not judged by: that a process died meanwhile."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncGenerator, Callable
from itertools import count
from pathlib import Path

import pytest

from m2forge.agents.attempt import TIMEOUT, AttemptResult, AttemptRunner, Interrupted, JobError, Overrides
from m2forge.agents.workspace import Workspaces
from m2forge.errors import RecordError
from m2forge.gateway.config import GatewayConfig
from m2forge.gateway.episodes.closed_journal import journal_ids
from m2forge.records import PolicyVersion, Sampling, Task
from m2forge.rl.attempts import Slots, open_agent
from m2forge.rl.config import AgentConfig, WorkerAgentConfig
from m2forge.rl.eval import EvalResult, eval_overrides, evaluate, read_results, write_result
from m2forge.rl.gateway_admin import GatewayAdmin
from m2forge.tasks.catalog import find_family
from m2forge.tasks.config import VerifyConfig
from m2forge.tasks.runner import TaskRunner
from m2forge.tasks.task_set import TaskSet
from tests.gateway.dialogue import minimax
from tests.gateway.live import ADMIN_KEY, Live, live
from tests.rl.scene import make_config
from tests.tasks.stream import distinct

# Dies at its first three jobs, each time before it answers.
DYING = """
import json, pathlib, sys
for line in sys.stdin:
    deaths = pathlib.Path("deaths")
    num = len(deaths.read_text()) if deaths.exists() else 0
    if num < 3:
        deaths.write_text("x" * (num + 1))
        sys.exit(1)
    print(json.dumps({"id": json.loads(line)["id"], "answer": "?"}), flush=True)
"""
SILENT = """
import json, sys
for line in sys.stdin:
    if "cancel" in line:
        print(json.dumps({"id": json.loads(line)["id"], "cancelled": True}), flush=True)
"""
STUCK = "import sys, time; sys.stdin.readline(); time.sleep(60)"
COMPLAINING = """
import json, sys
for line in sys.stdin:
    print(json.dumps({"id": json.loads(line)["id"], "error": "no"}), flush=True)
"""


@contextlib.asynccontextmanager
async def agents_of(
    gateway: Live, config: AgentConfig, folder: Path
) -> AsyncGenerator[Callable[[Callable[[], int]], AttemptRunner[TaskRunner]], None]:
    """Agents of a gateway, by how often its processes have been started."""
    async with (
        GatewayAdmin(gateway.url, ADMIN_KEY, budget=config.budget, sampling=config.sampling.record()) as admin,
        open_agent(config, folder / "agents", minimax()) as agent,
        TaskRunner(VerifyConfig(), folder / "verify") as runner,
    ):
        workspaces = Workspaces(folder / "workspaces")
        yield lambda num_starts: AttemptRunner(agent, admin, runner, workspaces, lambda name: num_starts())


def run_check(program: str, folder: Path) -> EvalResult:
    config = WorkerAgentConfig(command=(sys.executable, "-c", program), jobs_per_worker=4)
    tasks = distinct(TaskSet(find_family("chain"), "held_out", 1), 4, 1, 3)

    async def scene(gateway: Live) -> EvalResult:
        async with agents_of(gateway, config, folder) as make_agents:
            return (await evaluate(make_agents(lambda: 0), tasks, PolicyVersion("run", 0), Slots(4)))[0]

    with live(minimax(), config=GatewayConfig(port=0, journal=str(folder / "journal"))) as gateway:
        found = asyncio.run(scene(gateway))
    assert not journal_ids(folder / "journal"), "what was recorded is let go"
    return found


def test_tasks_of_a_check_are_attempted_anew_when_the_agent_dies(tmp_path: Path) -> None:
    found = run_check(DYING, tmp_path)
    assert (found.num_tasks, found.num_broken, found.success) == (4, 0, 0.0)


def test_tasks_that_the_agent_cannot_do_are_broken(tmp_path: Path) -> None:
    assert run_check(COMPLAINING, tmp_path).num_broken == 4


def test_a_timeout_counts_unless_a_process_restarted_meanwhile(tmp_path: Path) -> None:
    config = WorkerAgentConfig(command=(sys.executable, "-c", SILENT), timeout_s=1.0)
    task: Task = TaskSet(find_family("chain"), "held_out", 1).next(1, 3)

    async def scene(gateway: Live) -> AttemptResult:
        async with agents_of(gateway, config, tmp_path) as make_agents:
            with pytest.raises(Interrupted, match="while a process restarted"):
                await make_agents(count().__next__).attempt("g0-0-1", task, "g0")
            return await make_agents(lambda: 0).attempt("g0-0-2", task, "g0")

    with live(minimax(), config=GatewayConfig(port=0)) as gateway:
        assert asyncio.run(scene(gateway)).failure == TIMEOUT


def test_a_timeout_in_a_stuck_worker_before_any_call_is_infra(tmp_path: Path) -> None:
    config = WorkerAgentConfig(command=(sys.executable, "-c", STUCK), timeout_s=1.0, cancel_s=0.2)
    task: Task = TaskSet(find_family("chain"), "held_out", 1).next(1, 3)

    async def scene(gateway: Live) -> None:
        async with agents_of(gateway, config, tmp_path) as make_agents:
            with pytest.raises(JobError, match="worker that was stuck"):
                await make_agents(lambda: 0).attempt("g0-0-1", task, "g0")

    with live(minimax(), config=GatewayConfig(port=0)) as gateway:
        asyncio.run(scene(gateway))


def test_attempts_at_held_out_tasks_have_their_domains_context(tmp_path: Path) -> None:
    task: Task = TaskSet(find_family("chain"), "held_out", 1).next(1, 3)
    config = make_config(tmp_path, eval={"sampling": {"temperature": 0.5}})
    assert eval_overrides(config, task) == Overrides(Sampling(temperature=0.5), 2048)


def test_a_torn_last_line_is_ignored_and_cut_before_the_next(tmp_path: Path) -> None:
    path = tmp_path / "checks.jsonl"
    first, second = (EvalResult(step, 4, 0.5, 0.1, {"chain": 0.5}, 0, 1.0) for step in (0, 5))
    write_result(path, first)
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:30])
    assert read_results(path) == [first]
    write_result(path, second)
    assert read_results(path) == [first, second]
    path.write_bytes(b"{}\n" + whole)
    with pytest.raises(RecordError, match=r"checks\.jsonl, line 1: not an evaluation"):
        read_results(path)
