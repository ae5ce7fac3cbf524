"""The whole ring in its own processes: agents act, the trainer learns, weights go back."""

import asyncio
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from sqlalchemy import select

from m2forge.agents.attempt import AttemptRunner
from m2forge.cluster.launcher import Launched
from m2forge.errors import EngineError
from m2forge.model.checkpoint import load_model
from m2forge.model.config_file import read_config
from m2forge.pool import queue as submission
from m2forge.pool.batch import fork
from m2forge.pool.lifecycle import UnitState
from m2forge.pool.pool import Pool, PoolWriter
from m2forge.pool.queue import count
from m2forge.pool.tables import fork_table, unit_table
from m2forge.records import Domain, PolicyVersion, Task
from m2forge.rl.config import RLConfig
from m2forge.rl.eval import read_results
from m2forge.rl.layout import Layout
from m2forge.rl.loop import Loop, Supply, run_rl
from m2forge.rl.servers import Server
from m2forge.rl.weight_updates import Replica
from m2forge.rollout.config import ServeConfig, ServerConfig
from m2forge.rollout.engine import NativeEngine
from m2forge.rollout.server.app import make_app
from m2forge.rollout.server.model_server import make_core
from m2forge.tasks.curriculum import Curriculum
from m2forge.tasks.runner import BrokenVerifierError, TaskRunner
from tests.rl import idle_run
from tests.rl.ring import AGENT, ROOT, command_of, processes_of, wait_until_gone
from tests.rl.scene import make_config, make_model
from tests.rollout.served import KEY, served
from tests.tasks.stream import draw_batch


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("scene"))


def make_run(model: Path, num_steps: int) -> RLConfig:
    return make_config(
        model,
        num_steps=num_steps,
        agent={
            "command": [sys.executable, str(AGENT)],
            "timeout_s": 60.0,
            "budget": {"max_calls": 2, "max_tokens": 32},
            "sandbox": {"inherits": ["PATH"], "timeout_s": 1000.0},
        },
        # A random policy solves nothing: what it is rewarded for is the form alone, and groups are trained as they are.
        pool={"window": {"queue": 8, "no_signal": "train"}},
        eval={"num_tasks": 4},
        weights={"anchor_every": 2},
    )


def trained_steps(config: RLConfig, run_dir: Path) -> list[int]:
    """Steps of the units that are learnt, in their order."""
    query = select(unit_table.c.step).where(unit_table.c.state == UnitState.TRAINED).order_by(unit_table.c.step)
    vocab_size = read_config(Path(config.model)).vocab_size
    with Pool(Layout(run_dir).pool(config.pool), vocab_size) as pool, pool.database.read() as connection:
        return list(connection.execute(query).scalars())


def test_terminated_it_says_one_line_and_leaves_nothing_behind(model: Path, tmp_path: Path) -> None:
    """In the midst of attempts, as a job in a shell's background, which Ctrl-C does not reach."""
    command, path = command_of(make_run(model, num_steps=3), tmp_path), tmp_path / "run" / "metrics.jsonl"
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    deaf = partial(signal.signal, signal.SIGINT, signal.SIG_IGN)
    with subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, preexec_fn=deaf) as loop:
        while loop.poll() is None and not path.exists():
            time.sleep(0.05)
        loop.terminate()
        _, said = loop.communicate(timeout=60)
    assert loop.returncode == 130, said.decode()
    assert not processes_of(tmp_path), "a process outlived its loop"
    lines = [line for line in said.decode().splitlines() if not line.startswith("run ") and "INFO" not in line]
    assert lines == ["m2forge: interrupted"], said.decode()


@pytest.mark.parametrize("num_tasks", [4, 0], ids=["while it checks", "while it learns"])
def test_an_agent_that_cannot_start_ends_the_run_with_one_error(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_tasks: int
) -> None:
    idle_run.use(monkeypatch)
    run = Loop.run
    monkeypatch.setattr(Loop, "run", lambda loop: asyncio.wait_for(run(loop), timeout=60))
    monkeypatch.setattr("m2forge.agents.worker_pool.RESTART_S", 0.0)
    config = make_run(model, num_steps=3)
    broken = config.agent.model_copy(update={"command": (sys.executable, "-c", "import no_such_module")})
    check = config.eval.model_copy(update={"num_tasks": num_tasks})
    with pytest.raises(EngineError, match="No module named 'no_such_module'"):
        run_rl(config.model_copy(update={"agent": broken, "eval": check}), tmp_path)
    wait_until_gone(tmp_path)
    assert not read_results(Layout(tmp_path / "run").evaluations), "no evaluation ran"


@pytest.mark.parametrize("num_tasks", [12, 0], ids=["while it evaluates", "while it learns"])
def test_a_verifier_that_raises_too_often_ends_the_run(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_tasks: int
) -> None:
    """At the eleventh error of 200 verdicts that are watched: 5% are ten."""
    idle_run.use(monkeypatch)
    run = Loop.run
    monkeypatch.setattr(Loop, "run", lambda loop: asyncio.wait_for(run(loop), timeout=60))
    command = (sys.executable, "-m", "tests.rl.raising_worker")
    monkeypatch.setattr("m2forge.rl.host.TaskRunner", partial(TaskRunner, command=command))
    answering = (
        "import json, sys\nfor line in sys.stdin: print(json.dumps({'id': json.loads(line)['id'], 'answer': '?'}))"
    )
    config = make_run(model, num_steps=3)
    agent = config.agent.model_copy(update={"command": (sys.executable, "-u", "-c", answering)})
    check = config.eval.model_copy(update={"num_tasks": num_tasks})
    with pytest.raises(BrokenVerifierError) as raised:
        run_rl(config.model_copy(update={"agent": agent, "eval": check}), tmp_path)
    message = str(raised.value)
    # Several verdicts are asked for at once: the error of a later one may be the first to arrive.
    found = re.match(
        r"chain: its verifier raised at (\d+) of the last (\d+) answers, more than 5% of 200; repair it", message
    )
    assert found is not None, message
    assert 11 <= int(found[1]) == int(found[2]) < 11 + config.agent.num_jobs
    assert "KeyError: 'a verifier that its author broke'" in message
    assert 'raising_worker.py", line' in message
    assert not read_results(Layout(tmp_path / "run").evaluations), "errors of a verifier are no result"
    assert not trained_steps(config, tmp_path / "run"), "nor are they rewards that are trained"
    wait_until_gone(tmp_path)


@pytest.mark.parametrize("moment", ["inside", "after"])
def test_a_loop_that_dies_while_queueing_repeats_no_task(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Inside the transaction of its second batch of tasks, or right after it."""
    config, dies = make_run(model, num_steps=1), iter([False, True])

    async def fill() -> None:
        loop = Loop(Layout(tmp_path), config)
        async with PoolWriter(loop.pool) as writer, TaskRunner(config.verify, tmp_path / "verify") as runner:
            supply = Supply(config, loop.pool, writer, loop.curriculum, runner.next_task, loop._note)
            assert await supply.fill()
        loop.pool.close()

    def dying(method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            found = method(*given)
            if next(dies):
                raise ArithmeticError("dead")
            return found

        return run

    with monkeypatch.context() as patch:
        if moment == "inside":
            patch.setattr(submission, "count", dying(count))
        else:
            patch.setattr(Pool, "put", dying(Pool.put))
        with pytest.raises(ArithmeticError):
            asyncio.run(fill())
    asyncio.run(fill())
    curriculum = Curriculum(config.curriculum)
    expected = [given.task.id for _ in range(4) for given in draw_batch(curriculum)]
    with Pool(Layout(tmp_path).pool(config.pool), read_config(model).vocab_size) as pool:
        leases = pool.lease("test", 99)
        assert [lease.task.id for lease in leases] == [id for id in expected for _ in "ab"]
        assert {lease.context for lease in leases} == {2048}, "that of the domain's configuration"


def test_a_step_repeated_after_a_restore_is_pushed_and_evaluated(model: Path, tmp_path: Path) -> None:
    """The sampler serves a lost step, and the loop waits for its successor of the same number."""
    config, network = make_run(model, num_steps=5), load_model(model)

    def publish(value: float) -> PolicyVersion:
        with torch.no_grad():
            network.norm.weight.fill_(value)
        store = Layout(tmp_path).weight_store(config)
        store.discard_after(4)
        store.publish(network, 5)
        return PolicyVersion("run", 5, store.branch)

    async def run() -> None:
        loop, core = Loop(Layout(tmp_path), config), make_core(model, ServeConfig(device="cpu", lineage="run"))
        engine, checked = NativeEngine(core), list[PolicyVersion | None]()

        async def check(runner: AttemptRunner[TaskRunner]) -> None:
            checked.append(loop.served)

        loop.evaluations._evaluate = check  # type: ignore[method-assign]  # agents would have to attempt tasks
        async with served(make_app(engine, ServerConfig(), KEY)) as url, PoolWriter(loop.pool) as writer:
            child = SimpleNamespace(name="sampler", num_starts=1, keys=(KEY,), url=url)
            sampler = Server(cast("Launched", child))
            lost = publish(2.0)
            pushing = asyncio.create_task(loop.updates.run([sampler], writer))
            while loop.served != lost:
                await asyncio.sleep(0.01)
            assert (core.model.norm.weight == 2.0).all()
            pushing.cancel()
            again = publish(3.0)
            checking = asyncio.create_task(
                loop.evaluations.last(cast("AttemptRunner[TaskRunner]", None), loop._serves_newest)
            )
            await asyncio.sleep(0.1)
            assert not checking.done(), "the lost version must not be checked"
            with loop.pool.database.write() as connection:
                fork(connection, 4)
            async with loop.evaluations.pin:
                pushing = asyncio.create_task(loop.updates.run([sampler], writer))
                await asyncio.sleep(0.3)
                assert loop.served == lost, "a pinned evaluation keeps its version"
            await checking
            # A sampler that is started again says what it serves, also while no weight update may happen.
            async with loop.evaluations.pin:
                await engine.load(model, other := PolicyVersion("run", 4, "other"))
                child.num_starts = 2
                while loop.served != other:
                    await asyncio.sleep(0.01)
            while loop.served != again:
                await asyncio.sleep(0.01)
            with loop.pool.database.read() as connection:
                assert connection.execute(select(fork_table)).first() is None, "the sampler is on the lineage again"
            pushing.cancel()
            assert checked == [again]
            assert (await engine.state()).version == again != lost
            assert (core.model.norm.weight == 3.0).all()
        await engine.close()
        loop.pool.close()

    asyncio.run(asyncio.wait_for(run(), 120))


def test_a_version_removed_during_its_push_is_skipped(tmp_path: Path) -> None:
    """The trainer publishes the next ones meanwhile, and keeps only those. A folder that is whole and still refused
    ends the run."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1 << 16)
        writer.write(b"HTTP/1.1 500 Error\r\nconnection: close\r\n\r\nno tensor")
        writer.close()
        await writer.wait_closed()

    async def run() -> None:
        folder = tmp_path / "weights" / "step-00000001-aa"
        folder.mkdir(parents=True)
        (folder / "config.json").touch()
        version = PolicyVersion("run", 1, "aa")
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server:
            child = SimpleNamespace(name="sampler", num_starts=1, keys=(KEY,), url=url)
            replica = Replica(Server(cast("Launched", child)), tmp_path)
            with pytest.raises(EngineError, match=r"refused version 1 in .*: no tensor\. See .*sampler\.log"):
                await replica.load(version, folder)
            # As `WeightStore` removes a version: its other files are there for a moment longer.
            (folder / "config.json").unlink()
            await replica.load(version, folder)
            assert (replica.is_up, replica.lacks(version)) == (True, True)
            replica.close()

    asyncio.run(run())


def test_a_change_of_difficulty_is_logged(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    (tmp_path / "run").mkdir()
    loop = Loop(Layout(tmp_path / "run"), make_run(model, num_steps=3))
    levels = loop.curriculum.levels()
    task = Task("t", Domain.AGENT, "Do it.", difficulty=1.0, metadata={"family": "chain"})
    num_groups = loop.config.curriculum.pace.num_groups
    for _ in range(num_groups):
        assert "difficulty" not in caplog.text
        loop._note_group(task, 1.0)
    assert loop.curriculum.levels() != levels
    assert "chain: the curriculum now draws tasks of difficulty 2 to 3" in caplog.text
    loop.pool.close()
