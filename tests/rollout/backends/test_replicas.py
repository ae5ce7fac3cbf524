"""Several engines as one: the contract, which replica serves what, and one that is down."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

import pytest

from m2forge.errors import EngineError
from m2forge.gateway.metrics import GatewayCounts
from m2forge.protocols import Chunk, Engine, EngineState, Prompt
from m2forge.rollout.backends.replicas import ReplicatedEngine
from m2forge.rollout.engine import NativeEngine
from m2forge.testing.scripted import ScriptedEngine
from tests.rollout import engine_contract
from tests.rollout.engine_contract import complete, make_prompt
from tests.rollout.fake_core import FakeCore

POLL_S, LIMIT_S = 0.01, 20.0


@asynccontextmanager
async def replicated() -> AsyncIterator[Engine]:
    cores = [FakeCore(engine_contract.VOCAB_SIZE, engine_contract.CONTEXT, step_s=0.001) for _ in range(2)]
    engine = ReplicatedEngine({f"sampler-{index}": NativeEngine(core) for index, core in enumerate(cores)})
    try:
        yield engine
    finally:
        await engine.close()


@engine_contract.every_check
def test_contract(check: engine_contract.Check) -> None:
    engine_contract.run_check(check, replicated)


class Breakable(ScriptedEngine):
    """Fails while it is broken, and says nothing while it hangs. Its completions wait for a long time once `waits`."""

    is_broken = is_hanging = waits = False

    def __init__(self) -> None:
        super().__init__(engine_contract.VOCAB_SIZE, sleep=self._wait)
        self.served: list[str | None] = []

    async def _wait(self, time_s: float) -> None:
        await asyncio.sleep(LIMIT_S if self.waits else time_s)

    async def generate(self, prompt: Prompt) -> AsyncGenerator[Chunk, None]:
        if self.is_broken:
            raise EngineError("broken")
        self.served.append(prompt.affinity)
        async for chunk in super().generate(prompt):
            yield chunk

    async def state(self) -> EngineState:
        while self.is_hanging:
            await asyncio.sleep(POLL_S)
        if self.is_broken:
            raise EngineError("broken")
        return await super().state()


async def ask(engine: ReplicatedEngine, affinity: str | None = None) -> str | None:
    """Returns the error."""
    try:
        await complete(engine, make_prompt(affinity=affinity))
    except EngineError as error:
        return str(error)
    return None


def make() -> tuple[ReplicatedEngine, Breakable, Breakable]:
    first, second = Breakable(), Breakable()
    return ReplicatedEngine({"first": first, "second": second}), first, second


def test_an_affinity_stays_and_a_new_one_goes_where_less_runs() -> None:
    async def run() -> None:
        engine, first, second = make()
        for _ in range(3):
            for affinity in ("a", "b", "c", "d"):
                assert await ask(engine, affinity) is None
        assert (first.served, second.served) == (["a", "c"] * 3, ["b", "d"] * 3)
        first.waits = True
        running = [asyncio.create_task(ask(engine, affinity)) for affinity in ("a", "c")]
        while engine.replicas()[0].num_running < len(running):
            await asyncio.sleep(POLL_S)
        for affinity in ("e", "f"):
            await ask(engine, affinity)
        assert second.served[6:] == ["e", "f"]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        assert [(found.num_running, found.num_requests) for found in engine.replicas()] == [(0, 8), (0, 8)]
        await engine.close()

    asyncio.run(asyncio.wait_for(run(), LIMIT_S))


def test_a_replica_that_fails_is_left_out_until_it_answers() -> None:
    async def run() -> None:
        engine, first, second = make()
        assert [await ask(engine, affinity) for affinity in ("a", "b")] == [None, None]
        first.is_broken = True
        assert await ask(engine, "a") == "broken", "its caller asks again"
        assert [found.is_up for found in engine.replicas()] == [False, True]
        metrics = GatewayCounts().to_text(0, 0, engine.replicas())
        assert 'm2forge_gateway_replica_up{replica="first"} 0.0\n' in metrics
        assert 'm2forge_gateway_replica_requests_total{replica="second"} 1.0\n' in metrics
        assert [await ask(engine, affinity) for affinity in ("a", "c")] == [None, None]
        assert (first.served, second.served) == (["a"], ["b", "a", "c"])
        assert (await engine.state()).num_running == 0
        first.is_broken = False
        while not engine.replicas()[0].is_up:
            await asyncio.sleep(POLL_S)
        assert [await ask(engine, affinity) for affinity in ("a", "d")] == [None, None]
        assert (first.served, second.served) == (["a", "d"], ["b", "a", "c", "a"]), "what moved stays"
        await engine.close()

    asyncio.run(asyncio.wait_for(run(), LIMIT_S))


def test_a_replica_that_says_nothing_holds_nobody_up() -> None:
    async def run() -> None:
        engine, first, second = make()
        first.is_hanging = True
        await engine.state()
        assert [found.is_up for found in engine.replicas()] == [False, True]
        for affinity in ("a", "b"):
            await ask(engine, affinity)
        assert (first.served, second.served) == ([], ["a", "b"])
        first.is_hanging, second.is_broken = False, True
        while not engine.replicas()[0].is_up:
            await asyncio.sleep(POLL_S)
        await engine.state()
        first.is_broken = True
        assert await ask(engine, "c") == "broken"
        with pytest.raises(EngineError, match="broken"):
            await engine.state()
        await engine.close()

    asyncio.run(asyncio.wait_for(run(), LIMIT_S))
