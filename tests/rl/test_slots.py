"""Slots: training and evaluation together never take more than there are."""

import asyncio
import random
from pathlib import Path
from typing import cast

import pytest

from m2forge.pool.config import PoolConfig
from m2forge.pool.pool import Pool, PoolWriter
from m2forge.pool.stored import Lease
from m2forge.rl.attempts import LEASED_AT_ONCE, Attempts, Leasing, Slots, cancel_all
from m2forge.tasks.agent import Chain


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("total", "share"), [(1, 0.25), (3, 0.01), (8, 0.25), (8, 1.0)])
def test_attempts_never_exceed_the_slots_and_both_kinds_go_on(total: int, share: float, seed: int) -> None:
    rng, slots, num_trained = random.Random(seed), Slots(total, share), 0
    reserved = max(1, round(total * share))
    most = {"all": 0, "evaluating": 0}

    def look() -> None:
        most["all"] = max(most["all"], slots.num_training + slots.num_evaluating)
        most["evaluating"] = max(most["evaluating"], slots.num_evaluating)

    async def train() -> None:
        nonlocal num_trained
        await asyncio.sleep(0.001 * rng.randrange(4))
        num_trained += 1
        slots.give_back()

    async def feed() -> None:
        slots.is_training = True
        while True:
            running.extend(asyncio.create_task(train()) for _ in range(slots.take(total)))
            look()
            await asyncio.sleep(0.001)

    async def evaluate() -> None:
        async with slots.evaluating():
            look()
            await asyncio.sleep(0.001 * rng.randrange(4))

    async def scene() -> None:
        feeding = asyncio.create_task(feed())
        await asyncio.sleep(0.005)
        with slots.evaluation():
            before = num_trained
            await asyncio.gather(*(evaluate() for _ in range(40)))
            assert num_trained > before or reserved == total, "training stopped"
        assert most["evaluating"] == reserved
        feeding.cancel()
        await asyncio.gather(*running)
        slots.end_training()
        await asyncio.gather(*(evaluate() for _ in range(2 * total)))
        assert most["evaluating"] == total, "alone, an evaluation takes all"
        assert (slots.num_training, slots.num_evaluating) == (0, 0)

    running: list[asyncio.Task[None]] = []
    asyncio.run(scene())
    assert most["all"] == total


class HeldAttempts:
    """Attempts that do not end."""

    async def run(self, lease: Lease) -> None:
        await asyncio.get_running_loop().create_future()


def test_processes_with_room_for_all_take_turns_at_the_queue(tmp_path: Path) -> None:
    num_attempts = 4 * LEASED_AT_ONCE

    async def scene(pool: Pool) -> list[int]:
        async with PoolWriter(pool) as writer:
            attempts = cast("Attempts", HeldAttempts())
            hosts = [Leasing(name, pool, writer, attempts, Slots(num_attempts)) for name in ("host-0", "host-1")]
            while len(pool.running()) < num_attempts:
                for host in hosts:
                    await host.fill()
            await cancel_all([task for host in hosts for task in host.running])
            return [len(host.running) for host in hosts]

    with Pool(PoolConfig(url=f"sqlite:///{tmp_path}/pool.db"), vocab_size=32) as pool:
        pool.put([(Chain().draw(1, 0), num_attempts)], stage="only")
        assert asyncio.run(scene(pool)) == [num_attempts / 2] * 2


def test_an_evaluation_that_is_cancelled_gives_its_slots_back() -> None:
    async def scene() -> None:
        slots = Slots(2)

        async def evaluate() -> None:
            async with slots.evaluating():
                await asyncio.sleep(60)

        tasks = [asyncio.create_task(evaluate()) for _ in range(4)]
        await asyncio.sleep(0.01)
        assert slots.num_evaluating == 2
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert slots.num_evaluating == 0
        assert slots.take(5) == 2

    asyncio.run(scene())


def test_training_waits_for_an_evaluation_on_all_slots() -> None:
    async def scene() -> None:
        slots, ends = Slots(4, 0.5), asyncio.Event()

        async def evaluate() -> None:
            async with slots.evaluating():
                await ends.wait()

        with slots.evaluation():
            tasks = [asyncio.create_task(evaluate()) for _ in range(4)]
            await asyncio.sleep(0)
            assert slots.num_evaluating == 4
            slots.is_training = True
            assert slots.take(4) == 0
            ends.set()
            await asyncio.gather(*tasks)
            assert slots.take(4) == 2, "half of them are left to evaluations"

    asyncio.run(scene())
