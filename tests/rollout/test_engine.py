"""The engine of this process: the contract, and what becomes of requests when its thread fails or closes."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from itertools import count, pairwise
from pathlib import Path

import pytest

from m2forge.errors import EngineError
from m2forge.observe.busy import FOLDER_VARIABLE, busy_s, read_busy
from m2forge.protocols import Chunk, Engine
from m2forge.records import FinishReason, PolicyVersion
from m2forge.rollout.config import RolloutConfig
from m2forge.rollout.core import Core
from m2forge.rollout.engine import NativeEngine
from tests.rollout import engine_contract
from tests.rollout.engine_contract import MANY, collect, complete, join, make_prompt, settled
from tests.rollout.fake_core import FakeCore
from tests.rollout.network import make_network, write_network


def make_core(step_s: float = 0.0) -> FakeCore:
    return FakeCore(engine_contract.VOCAB_SIZE, engine_contract.CONTEXT, step_s)


@asynccontextmanager
async def native() -> AsyncIterator[Engine]:
    engine = NativeEngine(make_core(step_s=0.001))
    try:
        yield engine
    finally:
        await engine.close()


@engine_contract.every_check
def test_contract(check: engine_contract.Check) -> None:
    engine_contract.run_check(check, native)


@asynccontextmanager
async def sampling_a_network() -> AsyncIterator[Engine]:
    engine = NativeEngine(Core(make_network(0), RolloutConfig(), PolicyVersion("network", 0)))
    try:
        yield engine
    finally:
        await engine.close()


@engine_contract.every_check
def test_contract_with_a_network(check: engine_contract.Check) -> None:
    facts = engine_contract.Facts(write_weights=write_network)
    engine_contract.run_check(check, sampling_a_network, facts)


def test_the_thread_sleeps_while_there_is_nothing_to_do() -> None:
    async def run() -> None:
        core = make_core()
        engine = NativeEngine(core)
        assert len(await complete(engine, make_prompt())) == 8
        await asyncio.sleep(0.05)
        assert core.num_steps == 8
        assert await engine.metrics() == {"total_steps": 8}
        await engine.close()
        assert core.num_steps == 8

    asyncio.run(run())


def test_steps_are_recorded_as_device_work_and_pauses_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))

    async def run() -> None:
        engine = NativeEngine(make_core(step_s=0.01))
        for _ in range(2):
            await complete(engine, make_prompt())
            await asyncio.sleep(0.2)
        await engine.close()

    started_s = time.monotonic()
    asyncio.run(run())
    ended_s = time.monotonic()
    noted = read_busy(tmp_path, "engine")
    pause_s = max(later[0] - earlier[1] for earlier, later in pairwise(noted))
    assert pause_s > 0.15, "between the two prompts"
    assert 0.14 < busy_s(noted, started_s, ended_s) < ended_s - started_s - 0.3, "16 steps"


def test_closing_finishes_what_is_under_way() -> None:
    async def run() -> None:
        engine = NativeEngine(make_core(step_s=0.001))
        async with aclosing(engine.generate(make_prompt(max_tokens=50))) as chunks:
            first = await anext(chunks)
            await engine.close()
            with pytest.raises(EngineError, match="closed"):
                await anext(engine.generate(make_prompt()))
            (rest,) = await collect(chunks)
        assert len(join([first, *rest])) == 50
        assert rest[-1].finish_reason == FinishReason.LENGTH

    asyncio.run(run())
    assert not [thread for thread in threading.enumerate() if thread.name == "m2forge-rollout"]


class Panic(BaseException):
    """As Rust's, which is no `Exception`."""


@pytest.mark.parametrize("kind", [ZeroDivisionError, Panic])
def test_a_failing_step_fails_waiting_and_later_requests(kind: type[BaseException], tmp_path: Path) -> None:
    num_steps = 0

    def fail_at_5() -> None:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 5:
            raise kind("a bug")

    async def run() -> None:
        engine = NativeEngine(FakeCore(32, 128, on_step=fail_at_5))
        asked = [engine.watch(), *(complete(engine, make_prompt(max_tokens=MANY)) for _ in range(4))]
        async with asyncio.timeout(60):
            results = await asyncio.gather(*asked, return_exceptions=True)
        for result in results:
            assert isinstance(result, EngineError)
            assert f"{kind.__name__}: a bug" in str(result)
        for late in (
            complete(engine, make_prompt()),
            engine.state(),
            engine.metrics(),
            engine.watch(),
            engine.load(tmp_path, PolicyVersion("fake", 1)),
        ):
            with pytest.raises(EngineError, match="a bug"):
                await late
        await engine.close()

    asyncio.run(run())


def test_a_failing_load_fails_those_who_wait_behind_it(tmp_path: Path) -> None:
    class Breaking(FakeCore):
        def load(self, source: Path, version: PolicyVersion) -> None:
            raise MemoryError("half of the weights are in place")

    async def run() -> None:
        engine = NativeEngine(Breaking(32, 128, step_s=0.01))
        asked = asyncio.create_task(complete(engine, make_prompt(max_tokens=MANY)))
        await asyncio.sleep(0.03)
        loads = (engine.load(tmp_path, PolicyVersion("fake", step)) for step in (1, 2))
        behind = complete(engine, make_prompt())
        results = await asyncio.gather(*loads, behind, asked, return_exceptions=True)
        assert all(isinstance(result, EngineError) and "half of" in str(result) for result in results)

    asyncio.run(run())


def test_a_load_is_done_when_its_weights_sample(tmp_path: Path) -> None:
    """A core may let requests finish on the old weights first."""

    class Later(FakeCore):
        wanted = PolicyVersion("fake", 0)

        def load(self, source: Path, version: PolicyVersion) -> None:
            self.wanted = version

        def step(self) -> list[tuple[str, Chunk]]:
            chunks = super().step()
            if self.is_idle:
                self.version = self.wanted
            return chunks

    async def run() -> None:
        steps, may_go_on = count(1), threading.Event()

        def hold_later_steps() -> None:
            if next(steps) > 30:
                may_go_on.wait()

        engine = NativeEngine(Later(32, 128, on_step=hold_later_steps))
        async with aclosing(engine.generate(make_prompt(max_tokens=40))) as chunks:
            await anext(chunks)
            loads = [asyncio.create_task(engine.load(tmp_path, PolicyVersion("fake", step))) for step in (1, 2)]
            await asyncio.sleep(0.01)
            assert not any(load.done() for load in loads)
            may_go_on.set()
            async for _ in chunks:
                pass
        await asyncio.gather(*loads)  # the first was overtaken by the second
        assert (await engine.state()).version.step == 2
        await engine.close()

    asyncio.run(run())


def test_who_reads_slowly_gets_more_tokens_at_a_time() -> None:
    async def run() -> None:
        engine = NativeEngine(make_core())
        prompt = make_prompt(max_tokens=40, seed=1, num_samples=2)
        async with aclosing(engine.generate(prompt)) as chunks:
            got = [await anext(chunks)]
            await engine.close()  # all is sampled meanwhile
            got += [chunk async for chunk in chunks]
        assert len(got) <= 6
        alone = NativeEngine(make_core(step_s=0.001))
        for sample, expected in enumerate(await collect(alone.generate(prompt), 2)):
            parts = [chunk for chunk in got if chunk.sample == sample]
            assert parts[-1].finish_reason == FinishReason.LENGTH
            for name in ("ids", "logprobs", "raw_logprobs", "versions"):
                assert join(parts, name) == join(expected, name)
        await alone.close()

    asyncio.run(run())


def test_loops_of_several_threads_share_one_engine() -> None:
    engine = NativeEngine(make_core(step_s=0.001))
    alone = asyncio.run(complete(engine, make_prompt(seed=1)))
    found: list[list[float]] = []
    threads = [
        threading.Thread(target=lambda: found.append(asyncio.run(complete(engine, make_prompt(seed=1)))))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [alone] * 4
    asyncio.run(engine.close())


def test_a_loop_that_is_gone_takes_nothing_with_it() -> None:
    engine = NativeEngine(make_core(step_s=0.001))

    async def leave() -> None:
        # As a program that ends without closing: the loop goes while the request runs.
        await anext(engine.generate(make_prompt(max_tokens=MANY)))

    asyncio.run(leave())
    assert len(asyncio.run(complete(engine, make_prompt()))) == 8
    asyncio.run(settled(engine))
    asyncio.run(engine.close())


def test_who_gives_up_waiting_for_a_load_leaves_it_to_happen(tmp_path: Path) -> None:
    """Nor does anything complain later of an answer that nobody took."""
    may_go_on = threading.Event()

    def hold() -> None:
        may_go_on.wait()

    async def run() -> None:
        engine = NativeEngine(FakeCore(32, 128, on_step=hold))
        asked = asyncio.create_task(complete(engine, make_prompt(max_tokens=2)))
        await asyncio.sleep(0.02)  # the thread is inside a step
        load = asyncio.create_task(engine.load(tmp_path, PolicyVersion("fake", 1)))
        refused = asyncio.create_task(engine.load(tmp_path / "none", PolicyVersion("fake", 2)))
        await asyncio.sleep(0)
        load.cancel()
        refused.cancel()
        may_go_on.set()
        await asyncio.gather(load, refused, return_exceptions=True)
        await asked
        await engine.close()
        assert (await engine.state()).version.step == 1

    asyncio.run(run())
