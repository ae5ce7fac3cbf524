"""Attempts stored whole when they end, and units rewarded whole: as if call by call, and one by one."""

import asyncio
import re
from unittest import mock

import pytest

from m2forge.errors import RecordError
from m2forge.pool.config import PoolConfig
from m2forge.pool.lifecycle import LeaseLostError, StateError
from m2forge.pool.pool import Pool, PoolWriter
from m2forge.pool.record import Append, Ending, Rewarding
from m2forge.pool.stored import Lease, Outcome
from tests.pool.scene import VOCAB_SIZE, calls, reward, task, version

NUM_CALLS = 3


def ending(lease: Lease, num_calls: int = NUM_CALLS, first: int = 0) -> Ending:
    encoder = lease.writer(VOCAB_SIZE)
    made = [encoder.write(call) for call in calls(lease.episode, num_calls)]
    return Ending(lease, tuple(made[first:]), Outcome(failure="late", artifacts={"answer": lease.name}))


def rewarding(lease: Lease, total: float, num_calls: int = NUM_CALLS) -> Rewarding:
    return Rewarding(lease, reward(total), (0.0,) * (num_calls - 1) + (total,))


def test_attempts_end_together_and_repeats_change_nothing(config: PoolConfig) -> None:
    with Pool(config, VOCAB_SIZE) as pool:
        pool.put([(task(0), 2), (task(1), 2)])
        leases = pool.lease("worker", 4)
        appended = ending(leases[0])
        assert pool.append([Append(leases[0], appended.calls[0])]) == [None]
        # The first one's other calls follow; the third's group is not over yet.
        first = [ending(leases[1]), ending(leases[2]), ending(leases[0], first=1)]
        assert pool.end(first) == [True, False, True]
        assert not any(isinstance(received, StateError) for received in pool.end(first))
        assert pool.end([ending(leases[3], num_calls=0)]) == [True]
        over = pool.unjudged(4)
        assert [len(unit.episodes) for unit, _ in over] == [2, 2]
        stored = [episode for unit, _ in over for episode in unit.episodes]
        assert [episode.name for episode in stored] == [lease.name for lease in leases]
        for episode, lease, num_calls in zip(stored, leases, (3, 3, 3, 0), strict=True):
            assert episode.episode().calls == tuple(calls(lease.episode, num_calls))
            assert (episode.failure, episode.artifacts) == ("late", {"answer": lease.name})


def test_one_that_is_refused_leaves_nothing_and_disturbs_nobody(config: PoolConfig) -> None:
    with Pool(config, VOCAB_SIZE) as pool:
        pool.put([(task(), 3)])
        lost, torn, kept = pool.lease("worker", 3)
        pool.fail(lost, "broken")
        received = pool.end([ending(lost), ending(torn, first=1), ending(kept)])
        assert [type(answer) for answer in received] == [LeaseLostError, RecordError, bool]
        assert pool.counts()["finished"] == 1
        assert [lease.num_calls for lease in pool.leases_of("worker")] == [0]
        assert pool.end([ending(torn)]) == [False]
        (again,) = pool.lease("worker", 1)
        assert pool.end([ending(again)]) == [True]


def test_a_unit_is_rewarded_whole_or_not_at_all(config: PoolConfig) -> None:
    with Pool(config, VOCAB_SIZE) as pool:
        pool.put([(task(), 3)])
        leases = pool.lease("worker", 3)
        pool.end([ending(lease) for lease in leases[:2]])
        given = [rewarding(lease, float(index)) for index, lease in enumerate(leases)]
        with pytest.raises(StateError, match="finished"):
            pool.reward_unit(given)
        pool.end([ending(leases[2])])
        with pytest.raises(RecordError, match="one per call"):
            pool.reward_unit([*given[:2], rewarding(leases[2], 2.0, num_calls=2)])
        assert pool.claim(1, version(0)) is None
        pool.reward_unit(given)
        pool.reward_unit(given)
        with pytest.raises(StateError, match="another"):
            pool.reward_unit([rewarding(leases[0], 7.0), *given[1:]])
        claimed = pool.claim(1, version(0))
        assert claimed is not None
        (unit,) = pool.fetch(claimed)
        assert [episode.reward for episode in unit.episodes] == [reward(0.0), reward(1.0), reward(2.0)]
        assert [episode.step_rewards for episode in unit.episodes] == [item.step_rewards for item in given]


def test_a_unit_without_signal_is_dropped_when_it_is_rewarded(config: PoolConfig) -> None:
    with Pool(config, VOCAB_SIZE) as pool:
        pool.put([(task(), 2)])
        leases = pool.lease("worker", 2)
        pool.end([ending(lease) for lease in leases])
        pool.reward_unit([Rewarding(lease, reward(1.0)) for lease in leases])
        assert pool.counts()["dropped"] == 2
        with pytest.raises(LeaseLostError):
            pool.reward_unit([Rewarding(lease, reward(1.0)) for lease in leases])


@pytest.mark.parametrize("failure", ["x\0y", "x\ud800y"])
def test_a_failure_that_no_database_stores_disturbs_nobody(config: PoolConfig, failure: str) -> None:
    """A program's last output may hold anything."""
    with Pool(config, VOCAB_SIZE) as pool:
        pool.put([(task(), 4)])
        bad, good, alone, failed = pool.lease("worker", 4)
        assert pool.end([Ending(bad, (), Outcome(failure=failure)), ending(good)]) == [False, False]
        pool.finish(alone, Outcome(failure=failure))
        pool.fail(failed, failure)
        (again,) = pool.lease("worker", 1)
        assert pool.end([ending(again)]) == [True]
        ((unit, _),) = pool.unjudged(1)
        stored = {episode.name: episode.failure for episode in unit.episodes}
        assert re.fullmatch(r"x[?\N{REPLACEMENT CHARACTER}]y", stored[bad.name] or "")
        assert stored[alone.name] == stored[bad.name]


def test_ends_share_transactions(config: PoolConfig) -> None:
    async def main(pool: Pool) -> list[bool]:
        async with PoolWriter(pool) as writer:
            leases = await writer.run(pool.lease, "worker", 12)
            made = [ending(lease) for lease in leases]
            return await asyncio.gather(*(writer.end(item.lease, item.calls, item.outcome) for item in made))

    with Pool(config, VOCAB_SIZE) as pool, mock.patch.object(pool, "end", wraps=pool.end) as transactions:
        pool.put([(task(), 12)])
        assert any(asyncio.run(main(pool)))
        assert 1 <= transactions.call_count <= 3
        assert pool.counts()["finished"] == 12
