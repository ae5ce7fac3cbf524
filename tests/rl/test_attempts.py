"""Which failures count as the policy's doing, with perf 0, and which are retried."""

import asyncio
import contextlib
import json
import sys
import threading
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from m2forge.agents.attempt import (
    DEATHS_BEFORE_EXCLUSIVE,
    AttemptResult,
    AttemptRunner,
    Interrupted,
    JobError,
    WorkerLost,
)
from m2forge.agents.workspace import Workspaces
from m2forge.errors import EngineError
from m2forge.gateway.config import GatewayConfig
from m2forge.pool.config import PoolConfig
from m2forge.pool.pool import Pool, PoolWriter
from m2forge.pool.stored import TOOLS, Outcome, read_units
from m2forge.protocols import Chunk, Prompt
from m2forge.records import Reward, Submission
from m2forge.reward.config import RewardConfig
from m2forge.reward.judge import Judge
from m2forge.rl.attempts import ANSWER, AttemptCounts, JudgedAttempts, open_agent
from m2forge.rl.config import WorkerAgentConfig
from m2forge.rl.gateway_admin import GatewayAdmin
from m2forge.tasks.agent import Chain
from m2forge.tasks.catalog import find_family
from m2forge.tasks.config import VerifyConfig
from m2forge.tasks.library_family import GymFamily
from m2forge.tasks.runner import BrokenVerifierError, TaskRunner
from m2forge.text.message import Message, Tool, ToolCall
from tests.gateway.dialogue import minimax
from tests.gateway.live import ADMIN_KEY, Live, live
from tests.rl.test_eval_attempts import agents_of
from tests.tasks.hostile_worker import Hostile
from tests.tasks.test_runner import COMMAND as HOSTILE

# The words of a task's instruction are what it does: `call`s the policy, dies, or ends with an error of that kind.
PROGRAM = """
import json, os, sys, urllib.error, urllib.request
for line in sys.stdin:
    job = json.loads(line)
    for word in job["task"]["instruction"].split():
        if word in ("call", "use"):
            body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
            if word == "use":
                body |= {"max_tokens": 64, "tools": [{"type": "function", "function": {"name": "look"}}]}
            headers = {"Authorization": "Bearer " + job["api_key"], "Content-Type": "application/json"}
            url = job["base_url"] + "/chat/completions"
            try:
                urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)).read()
            except urllib.error.HTTPError:
                pass
        elif word == "die":
            os._exit(9)
        elif word == "killed":
            os.kill(os.getpid(), 9)
        elif word == "grow":
            bytearray(1 << 44)
        else:
            told = {"id": job["id"], "error": "no arguments in the call"}
            told |= {"kind": word} if word != "error" else {}
            print(json.dumps(told), flush=True)
"""
# Answers with its job and its environment.
TELLING = """
import json, os, sys
for line in sys.stdin:
    told = line + json.dumps(dict(os.environ)) + repr(sys.argv)
    print(json.dumps({"id": json.loads(line)["id"], "answer": told}), flush=True)
"""
TASK = Chain().draw(1, 0)


def attempt(
    gateway: Live, folder: Path, does: str, *, num_deaths: int = 0, starts: list[int] | None = None
) -> AttemptResult:
    config = WorkerAgentConfig(command=(sys.executable, "-c", PROGRAM), timeout_s=30.0)

    def num_starts() -> int:
        return starts.pop(0) if starts and len(starts) > 1 else (starts or [0])[0]

    async def scene() -> AttemptResult:
        async with agents_of(gateway, config, folder) as make_agents:
            agents = make_agents(num_starts)
            result = await agents.attempt("g0-0-1", replace(TASK, instruction=does), "g0", num_deaths)
            await agents.gateway.delete(["g0-0-1"])
            return result

    return asyncio.run(scene())


@pytest.mark.parametrize("does", ["call error", "call policy", "call call error", "call unknown"])
def test_an_error_after_the_policys_tokens_counts(tmp_path: Path, does: str) -> None:
    with live(minimax(), config=GatewayConfig(port=0)) as gateway:
        result = attempt(gateway, tmp_path, does)
    assert (result.answer, len(result.tree.samples)) == ("", does.count("call"))
    assert result.failure is not None
    assert "no arguments in the call" in result.failure


@pytest.mark.parametrize("does", ["error", "policy", "infra", "call infra"])
def test_an_error_of_the_infrastructure_is_retried(tmp_path: Path, does: str) -> None:
    with live(minimax(), config=GatewayConfig(port=0)) as gateway, pytest.raises(JobError, match="no arguments"):
        attempt(gateway, tmp_path, does)


def test_an_error_after_a_call_that_the_engine_failed_is_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails = iter([False, True])

    async def fail(prompt: Prompt) -> AsyncGenerator[Chunk, None]:
        if next(fails):
            raise EngineError("out of memory")
        async for chunk in generate(prompt):
            yield chunk

    with live(minimax(), config=GatewayConfig(port=0)) as gateway:
        generate = gateway.engine.generate
        monkeypatch.setattr(gateway.engine, "generate", fail)
        with pytest.raises(JobError, match="no arguments"):
            attempt(gateway, tmp_path, "call call error")


def test_an_error_during_a_process_restart_is_retried_free(tmp_path: Path) -> None:
    with live(minimax(), config=GatewayConfig(port=0)) as gateway, pytest.raises(Interrupted):
        attempt(gateway, tmp_path, "call error", starts=[0, 1])


def test_an_attempt_that_kills_workers_counts_once_it_ran_alone(tmp_path: Path) -> None:
    with live(minimax(), config=GatewayConfig(port=0)) as gateway:
        for num_deaths in range(DEATHS_BEFORE_EXCLUSIVE):
            with pytest.raises(WorkerLost):
                attempt(gateway, tmp_path, "call die", num_deaths=num_deaths)
        result = attempt(gateway, tmp_path, "call die", num_deaths=DEATHS_BEFORE_EXCLUSIVE)
        with pytest.raises(WorkerLost):
            attempt(gateway, tmp_path, "die", num_deaths=DEATHS_BEFORE_EXCLUSIVE)
    assert len(result.tree.samples) == 1
    assert "status 9" in (result.failure or "")


def test_an_attempt_whose_worker_is_killed_has_no_reward(tmp_path: Path) -> None:
    with live(minimax(), config=GatewayConfig(port=0)) as gateway:
        with pytest.raises(WorkerLost):
            attempt(gateway, tmp_path, "call killed")
        # It breaks the attempt, which a group survives `pool.max_failures` times, and so is not retried for ever.
        with pytest.raises(JobError, match=r"no other attempt was killed.*status -9") as caught:
            attempt(gateway, tmp_path, "call killed", num_deaths=DEATHS_BEFORE_EXCLUSIVE)
    assert not isinstance(caught.value, Interrupted)


def test_an_attempt_over_its_workers_memory_has_the_reason_limit(tmp_path: Path) -> None:
    with live(minimax(), config=GatewayConfig(port=0)) as gateway:
        result = attempt(gateway, tmp_path, "call grow", num_deaths=DEATHS_BEFORE_EXCLUSIVE)
    assert len(result.tree.samples) == 1
    assert (result.failure or "").startswith("limit: worker-0 ended with status 1")


def test_nothing_that_an_agent_gets_holds_the_verifiers_data(tmp_path: Path) -> None:
    """Neither its jobs nor its environment; but the tools work, which need it."""
    task = find_family("copies").draw(2, 7)
    config = WorkerAgentConfig(command=(sys.executable, "-c", TELLING), timeout_s=30.0)

    async def scene(gateway: Live) -> str:
        async with agents_of(gateway, config, tmp_path) as make_agents:
            return (await make_agents(lambda: 0).attempt("g0-0-1", task, "g0")).answer

    with live(minimax(), config=GatewayConfig(port=0)) as gateway:
        received = asyncio.run(scene(gateway))
    for name, value in task.metadata.items():
        assert f'"{name}"' not in received, name
        assert name in ("family", "start", "num_links") or str(value) not in received, name
    job = json.loads(received.splitlines()[0])
    assert job["task"] == {
        "id": task.id,
        "domain": "agent",
        "instruction": task.instruction,
        "difficulty": task.difficulty,
    }
    assert [tool["function"]["name"] for tool in job["tools"]] == ["look", "recall"]
    assert job["tools_url"] == f"{job['base_url']}/tools/call"


@contextlib.asynccontextmanager
async def attempts_of(
    gateway_url: str, key: str, pool: Pool, folder: Path, command: Sequence[str] = ()
) -> AsyncGenerator[JudgedAttempts, None]:
    """`command`: of the workers that run families' code."""
    config = WorkerAgentConfig(command=(sys.executable, "-c", PROGRAM), timeout_s=30.0)
    verify, families = VerifyConfig(timeout_s=0.5), {"command": command} if command else {}
    async with (
        PoolWriter(pool) as writer,
        GatewayAdmin(gateway_url, key) as admin,
        open_agent(config, folder / "agents", minimax()) as agent,
        TaskRunner(verify, folder / "verify", **families) as runner,  # type: ignore[arg-type]  # one keyword
    ):
        attempt_runner = AttemptRunner(agent, admin, runner, Workspaces(folder / "workspaces"))
        yield JudgedAttempts(attempt_runner, pool, writer, Judge(RewardConfig()), minimax(), lambda task, rate: None)


def open_pool(folder: Path, **fields: object) -> Pool:
    url = f"sqlite:///{folder}/pool.db"
    return Pool(PoolConfig.model_validate({"url": url, **fields}), minimax().tokenizer.vocab_size)


def test_an_agent_error_on_the_policys_tokens_is_rewarded_with_0(tmp_path: Path) -> None:
    """And not dropped, though no attempt may break."""

    async def scene(gateway: Live, pool: Pool) -> None:
        pool.put([(replace(TASK, instruction="call error"), 2)], "queued")
        async with attempts_of(gateway.url, ADMIN_KEY, pool, tmp_path) as attempts:
            for lease in pool.lease("loop", 2):
                await attempts.run(lease)
            await attempts.judge_complete()
        assert (attempts.counts.num_errors, attempts.counts.num_broken, attempts.counts.num_groups) == (2, 0, 1)

    with (
        live(minimax(), config=GatewayConfig(port=0)) as gateway,
        open_pool(tmp_path, max_failures=1, window={"no_signal": "train"}) as pool,
    ):
        asyncio.run(scene(gateway, pool))
        with pool.database.read() as connection:
            (unit,) = read_units(connection, [1], pool.vocab_size)
    assert [len(episode.calls) for episode in unit.episodes] == [1, 1]
    assert all("no arguments in the call" in (episode.failure or "") for episode in unit.episodes)
    assert [episode.reward and episode.reward.perf for episode in unit.episodes] == [0.0, 0.0]


@pytest.mark.parametrize("called", ["look", "gone"])
def test_tools_that_an_agent_brings_are_no_unknown_tools(tmp_path: Path, called: str) -> None:
    """The family offers `lookup` alone, the agent `look`."""

    async def scene(gateway: Live, pool: Pool) -> None:
        pool.put([(replace(TASK, instruction="use error"), 2)], "queued")
        async with attempts_of(gateway.url, ADMIN_KEY, pool, tmp_path) as attempts:
            for lease in pool.lease("loop", 2):
                await attempts.run(lease)
            await attempts.judge_complete()

    says = [Message("assistant", "", "t", (ToolCall(called, {}),))] * 2
    with (
        live(minimax(), says, GatewayConfig(port=0), tools=[Tool(called)]) as gateway,
        open_pool(tmp_path, window={"no_signal": "train"}) as pool,
    ):
        asyncio.run(scene(gateway, pool))
        with pool.database.read() as connection:
            (unit,) = read_units(connection, [1], pool.vocab_size)
    for episode in unit.episodes:
        assert [tool["function"]["name"] for tool in json.loads(episode.artifacts[TOOLS])][-1] == "look"
        assert episode.reward is not None
        assert ("unknown_tool" in json.dumps(episode.reward.evidence)) == (called == "gone")


def test_an_attempt_whose_worker_died_begins_again_at_no_cost(tmp_path: Path) -> None:
    async def scene(gateway: Live, pool: Pool) -> AttemptCounts:
        pool.put([(replace(TASK, instruction="die"), 1)], "queued")
        async with attempts_of(gateway.url, ADMIN_KEY, pool, tmp_path) as attempts:
            for _ in range(2):
                (lease,) = pool.lease("loop", 1)
                await attempts.run(lease)
            assert pool.lease("loop", 1), "the group was dropped"
        return attempts.counts

    with live(minimax(), config=GatewayConfig(port=0)) as gateway, open_pool(tmp_path, max_failures=1) as pool:
        counts = asyncio.run(scene(gateway, pool))
    assert (counts.num_interrupted, counts.num_broken) == (2, 0)


def test_a_verifier_that_raises_too_often_ends_the_judging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("m2forge.tasks.runner.NUM_WATCHED", 20)  # of which more than one raises

    async def scene(pool: Pool) -> None:
        pool.put([(Hostile().draw(1, seed), 1) for seed in range(2)], "queued")
        for lease in pool.lease("loop", 2):
            pool.finish(lease, Outcome(artifacts={ANSWER: "raise"}))
        async with attempts_of("http://127.0.0.1:1", "key", pool, tmp_path, HOSTILE) as attempts:
            await attempts.judge_complete()

    with open_pool(tmp_path) as pool, pytest.raises(BrokenVerifierError, match="raised at 2 of the last 2 answers"):
        asyncio.run(scene(pool))


def test_a_hostile_answer_is_judged_in_time_after_a_restart(tmp_path: Path) -> None:
    """What a loop that died had stored: the next loop judges it, and an answer that no verifier finishes is wrong."""
    task = GymFamily("coin_flip").draw(0, 1)
    right = str(GymFamily("coin_flip").verify(task, Submission("")).evidence["expected"])
    format, before = minimax(), set(threading.enumerate())
    config = WorkerAgentConfig(command=("true",))

    async def judge() -> list[Reward | None]:
        with Pool(PoolConfig(url=f"sqlite:///{tmp_path}/pool.db"), format.tokenizer.vocab_size) as pool:
            if not pool.note():
                pool.put([(task, 3)], "queued")
                ended = (("1e99999999", None), (right, None), (right, "time ran out"))
                for lease, (answer, failure) in zip(pool.lease("loop", 3), ended, strict=True):
                    pool.finish(lease, Outcome(failure=failure, artifacts={ANSWER: answer}))
            async with (
                PoolWriter(pool) as writer,
                GatewayAdmin("http://127.0.0.1:1", "key") as admin,
                open_agent(config, tmp_path / "agents", format) as agent,
                TaskRunner(VerifyConfig(), tmp_path / "verify") as runner,
            ):
                attempt_runner = AttemptRunner(agent, admin, runner, Workspaces(tmp_path / "workspaces"))
                judge = Judge(RewardConfig())
                async with JudgedAttempts(
                    attempt_runner, pool, writer, judge, format, lambda task, rate: None
                ) as attempts:
                    await attempts.judge_complete()
            assert not {thread for thread in threading.enumerate() if thread.name.startswith("episodes")} - before
            assert attempts.counts.num_groups == 1
            with pool.database.read() as connection:
                (unit,) = read_units(connection, [1], pool.vocab_size)
        return [episode.reward for episode in unit.episodes]

    hostile, fine, failed = asyncio.run(judge())
    assert hostile is not None
    assert fine is not None
    assert failed is not None
    assert (hostile.perf, fine.perf, failed.perf) == (0.0, 1.0, 0.0)
    verifier = hostile.evidence["verifier"]
    assert isinstance(verifier, Mapping)
    assert verifier["reason"] == "limit"
