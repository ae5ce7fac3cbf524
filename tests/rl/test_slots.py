"""Slots: training and evaluation together never take more than there are."""

import asyncio
import random

import pytest

from m2forge.rl.attempts import Slots


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
