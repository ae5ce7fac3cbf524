"""Long episodes: the event loop goes on while they are stored, read back and judged."""

import asyncio
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from m2forge.agents.attempt import AttemptResult, AttemptRunner
from m2forge.pool.config import PoolConfig
from m2forge.pool.pool import Pool, PoolWriter
from m2forge.records import Call, FinishReason, PolicyVersion, Task, Verdict
from m2forge.reward.config import RewardConfig
from m2forge.reward.judge import Judge
from m2forge.rl.attempts import JudgedAttempts
from m2forge.tasks.catalog import family_of, find_family
from m2forge.tasks.runner import TaskRunner
from m2forge.tasks.task_set import TaskSet
from m2forge.text.message import Tool
from m2forge.tree.token_tree import TokenTree
from tests.gateway.dialogue import minimax
from tests.tasks.stall import MAX_STALL_S, watched_stalls

NUM_CALLS, NUM_NEW = 2000, 20


class OneLongEpisode:
    """In place of agents, their gateway and the families' workers: hands over what was recorded."""

    def __init__(self, tree: TokenTree) -> None:
        self._tree = tree
        self.gateway = self.tasks = self

    async def attempt(self, *args: object, **kwargs: object) -> AttemptResult:
        return AttemptResult("an answer", self._tree, None, Verdict(0.0))

    def delete_soon(self, name: str) -> None:
        pass

    async def tools(self, task: Task) -> tuple[Tool, ...]:
        return tuple(family_of(task).tools(task))


def long_tree(vocab_size: int) -> TokenTree:
    tree, rng = TokenTree(vocab_size), np.random.default_rng(0)
    path = rng.integers(0, vocab_size, NUM_NEW).astype(np.int32)
    for index in range(NUM_CALLS):
        response, added = (rng.integers(0, vocab_size, NUM_NEW).astype(np.int32) for _ in range(2))
        logprobs, versions = np.full(NUM_NEW, -1.0, np.float32), np.zeros(NUM_NEW, np.int32)
        call = Call(path, response, logprobs, versions, FinishReason.STOP, float(index), index + 0.5)
        tree.add(call, f"e/{index}", episode="e")
        path = np.concatenate((path, response, added))
    return tree


def longest_stall_s(folder: Path) -> float:
    """The longest stall of the event loop while an episode of 2,000 calls is stored and judged."""
    format = minimax()
    vocab_size = format.tokenizer.vocab_size
    tree, judged = long_tree(vocab_size), list[tuple[Task, float]]()
    task = TaskSet(find_family("chain"), "train", 0).next(1, 3)

    async def scene(pool: Pool) -> list[float]:
        async with PoolWriter(pool) as writer:
            agents = cast(AttemptRunner[TaskRunner], OneLongEpisode(tree))
            attempts = JudgedAttempts(
                agents, pool, writer, Judge(RewardConfig()), format, lambda *group: judged.append(group)
            )
            pool.put([(task, 1)])
            (lease,) = pool.lease("loop", 1)
            async with watched_stalls() as stalls:
                await attempts.run(lease)
                await attempts.judge_complete()
        return stalls

    with Pool(PoolConfig(url=f"sqlite:///{folder / 'pool.db'}"), vocab_size) as pool:
        stalls = asyncio.run(scene(pool))
        claimed = pool.claim(1, PolicyVersion("run", 0))
        assert claimed is not None
        (unit,) = pool.fetch(claimed)
    assert [found.id for found, _ in judged] == [task.id]
    assert unit.episodes[0].tree().calls() == tree.calls()
    assert len(stalls) > 20, "the work was too short to tell"
    return max(stalls)


@pytest.mark.slow
def test_an_episode_of_2000_calls_does_not_block_the_event_loop(tmp_path: Path) -> None:
    # Other processes may hold the processor once; work on the event loop would stall it every time.
    folders = [tmp_path / str(number) for number in range(3)]
    for folder in folders:
        folder.mkdir()
    assert any(longest_stall_s(folder) < MAX_STALL_S for folder in folders)


class SlowFamily(OneLongEpisode):
    """Lists its tools, which judging needs, when it may."""

    def __init__(self, tree: TokenTree, may_judge: asyncio.Event) -> None:
        super().__init__(tree)
        self._may_judge = may_judge

    async def tools(self, task: Task) -> tuple[Tool, ...]:
        await self._may_judge.wait()
        return await super().tools(task)


def test_an_attempt_ends_before_its_group_is_judged(tmp_path: Path) -> None:
    """Its lease is over when it is stored, and renewing leases must not cancel a slow verdict."""
    format, judged = minimax(), list[tuple[Task, float]]()
    task = TaskSet(find_family("chain"), "train", 0).next(1, 3)

    async def scene(pool: Pool) -> None:
        may_judge = asyncio.Event()
        agents = cast(AttemptRunner[TaskRunner], SlowFamily(TokenTree(pool.vocab_size), may_judge))
        async with PoolWriter(pool) as writer:
            attempts = JudgedAttempts(
                agents, pool, writer, Judge(RewardConfig()), format, lambda *group: judged.append(group)
            )
            pool.put([(task, 1)])
            (lease,) = pool.lease("loop", 1)
            judging = asyncio.create_task(attempts.judge_ended())
            async with asyncio.timeout(60):
                await attempts.run(lease)
                assert not judged
                may_judge.set()
                while not judged:
                    await asyncio.sleep(0.01)
            judging.cancel()

    with Pool(PoolConfig(url=f"sqlite:///{tmp_path / 'pool.db'}"), format.tokenizer.vocab_size) as pool:
        asyncio.run(scene(pool))
    assert [found.id for found, _ in judged] == [task.id]
