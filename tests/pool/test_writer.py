"""A pool from asyncio: calls of many agents share transactions, and one that is refused does not disturb the others."""

import asyncio
import os
import threading
from unittest import mock

import pytest

from m2forge.pool.config import PoolConfig
from m2forge.pool.dialect import PoolError
from m2forge.pool.lifecycle import LeaseLostError
from m2forge.pool.pool import HOST_NICENESS, Pool, PoolWriter
from m2forge.pool.stored import Lease, Outcome
from tests.pool.scene import VOCAB_SIZE, calls, reward, task, version

NUM_AGENTS, NUM_CALLS = 12, 5


async def play(writer: PoolWriter, pool: Pool, lease: Lease) -> None:
    encoder = lease.writer(VOCAB_SIZE)
    for call in calls(lease.episode, NUM_CALLS):
        await writer.append(lease, encoder.write(call))
    await writer.run(pool.finish, lease, Outcome(reward=reward(float(lease.episode % 2))))


def test_calls_of_many_agents_share_transactions_in_order(config: PoolConfig) -> None:
    async def main(pool: Pool) -> None:
        async with PoolWriter(pool) as writer:
            leases = await writer.run(pool.lease, "worker", NUM_AGENTS)
            await asyncio.gather(*(play(writer, pool, lease) for lease in leases))

    with Pool(config, VOCAB_SIZE) as pool, mock.patch.object(pool, "append", wraps=pool.append) as transactions:
        pool.put([(task(), NUM_AGENTS)])
        asyncio.run(main(pool))
        assert 1 <= transactions.call_count < NUM_AGENTS * NUM_CALLS / 2
        claimed = pool.claim(1, version(0))
        assert claimed is not None
        for episode, number in zip(pool.fetch(claimed)[0].episodes, range(1, NUM_AGENTS + 1), strict=True):
            assert episode.episode().calls == tuple(calls(number, NUM_CALLS))


def test_an_attempt_that_lost_its_episode_ends_alone(config: PoolConfig) -> None:
    async def main(pool: Pool) -> None:
        async with PoolWriter(pool) as writer:
            lost, kept = await writer.run(pool.lease, "worker", 2)
            await writer.run(pool.fail, lost, "broken")
            results = await asyncio.gather(
                *(play(writer, pool, lease) for lease in (lost, kept)), return_exceptions=True
            )
        assert [type(result) for result in results] == [LeaseLostError, type(None)]

    with Pool(config, VOCAB_SIZE) as pool:
        pool.put([(task(), 2)])
        asyncio.run(main(pool))


def test_the_thread_of_a_host_yields_to_the_trainer(config: PoolConfig) -> None:
    """On SQLite, whose other users wait for the writer, it does not."""

    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    async def main(pool: Pool) -> int:
        async with PoolWriter(pool, HOST_NICENESS) as writer:
            return await writer.run(niceness)

    with Pool(config, VOCAB_SIZE) as pool:
        before = niceness()
        expected = before if pool.database.is_sqlite else min(19, before + HOST_NICENESS)
        assert asyncio.run(main(pool)) == expected
        assert niceness() == before


def test_what_waits_is_stored_before_a_writer_closes(config: PoolConfig) -> None:
    async def main(pool: Pool) -> None:
        writer = PoolWriter(pool)
        (lease,) = pool.lease("worker", 1)
        encoder = lease.writer(VOCAB_SIZE)
        tasks = [asyncio.create_task(writer.append(lease, encoder.write(call))) for call in calls(0, 3)]
        await asyncio.sleep(0)
        await writer.close()
        await asyncio.gather(*tasks)
        assert pool.leases_of("worker")[0].num_calls == 3

    with Pool(config, VOCAB_SIZE) as pool:
        pool.put([(task(), 1)])
        asyncio.run(main(pool))


def test_a_database_that_fails_fails_those_who_wait(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(pool: Pool) -> None:
        (lease,) = pool.lease("worker", 1)
        item = lease.writer(VOCAB_SIZE).write(calls(0, 1)[0])

        def broken(appends: object) -> None:
            raise PoolError("no space")

        async with PoolWriter(pool) as writer:
            with monkeypatch.context() as patch:
                patch.setattr(pool, "append", broken)
                with pytest.raises(PoolError, match="no space"):
                    await writer.append(lease, item)
            await writer.append(lease, item)

    with Pool(PoolConfig(url=f"sqlite:///{tmp_path}/pool.db"), VOCAB_SIZE) as pool:
        pool.put([(task(), 1)])
        asyncio.run(main(pool))
