"""Tasks, calls and rewards for the tests, and the way of an episode from the queue to its reward."""

from collections.abc import Sequence

import numpy as np

from m2forge.pool.config import PoolConfig, WindowConfig
from m2forge.pool.pool import Pool
from m2forge.pool.record import Append
from m2forge.pool.stored import Lease, Outcome
from m2forge.records import Call, Domain, FinishReason, PolicyVersion, Reward, Task

VOCAB_SIZE = 70_000


class Clock:
    """Stands still until it is told."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def task(index: int = 0, difficulty: float = 0.0, domain: Domain = Domain.AGENT) -> Task:
    return Task(f"task{index}", domain, "Do it.", difficulty, {"answer": index})


def version(step: int, lineage: str = "run") -> PolicyVersion:
    return PolicyVersion(lineage, step)


def reward(total: float) -> Reward:
    return Reward(0.0, 0.0, total, total, {"seen": [total]})


def windowed(config: PoolConfig, **fields: object) -> PoolConfig:
    return config.model_copy(update={"window": WindowConfig.model_validate(config.window.model_dump() | fields)})


def calls(seed: int, num_calls: int, step: int = 0, num_new: int = 20) -> list[Call]:
    """An agent's calls: each prompt is what came before, and something new."""
    draw = np.random.default_rng(seed)
    path = draw.integers(0, VOCAB_SIZE, num_new, dtype=np.int32)
    made = []
    for index in range(num_calls):
        response = draw.integers(0, VOCAB_SIZE, num_new, dtype=np.int32)
        logprobs = -draw.random(num_new, dtype=np.float32)
        versions = np.full(num_new, step, np.int32)
        made.append(Call(path, response, logprobs, versions, FinishReason.STOP, float(index), index + 0.5))
        path = np.concatenate((path, response, draw.integers(0, VOCAB_SIZE, num_new, dtype=np.int32)))
    return made


def record(pool: Pool, lease: Lease, made: Sequence[Call]) -> None:
    writer = lease.writer(VOCAB_SIZE)
    for call in made:
        assert pool.append([Append(lease, writer.write(call))]) == [None]


def play(pool: Pool, lease: Lease, total: float, num_calls: int = 2, step: int = 0) -> None:
    """Everything that happens to an attempt that goes well."""
    record(pool, lease, calls(lease.episode, num_calls, step))
    pool.finish(lease, Outcome(reward=reward(total), step_rewards=(0.0,) * (num_calls - 1) + (total,)))


def play_all(pool: Pool, num_episodes: int = 1000, step: int = 0) -> int:
    """Lease whatever waits and play it, the episodes of a group with different rewards; how many."""
    leases = pool.lease("worker", num_episodes)
    for lease in leases:
        play(pool, lease, float(lease.episode % 2), step=step)
    return len(leases)
