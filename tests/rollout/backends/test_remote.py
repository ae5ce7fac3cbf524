"""The engine behind our own server: the contract over a real socket, and what becomes of a server that fails."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from random import Random

import numpy as np
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from m2forge.errors import EngineError, NotFoundError, RequestError
from m2forge.protocols import Chunk, Engine
from m2forge.records import FinishReason, PolicyVersion
from m2forge.rollout.backends.client import Client
from m2forge.rollout.backends.remote import RemoteEngine
from m2forge.rollout.config import ServerConfig
from m2forge.rollout.engine import NativeEngine
from m2forge.rollout.server import wire
from m2forge.rollout.server.app import make_app
from tests.rollout import engine_contract
from tests.rollout.engine_contract import MANY, collect, complete, join, make_prompt, settled
from tests.rollout.fake_core import FakeCore
from tests.rollout.served import KEY, served


@asynccontextmanager
async def remote(core: FakeCore | None = None) -> AsyncIterator[Engine]:
    core = core or FakeCore(engine_contract.VOCAB_SIZE, engine_contract.CONTEXT, step_s=0.001)
    behind = NativeEngine(core)
    async with served(make_app(behind, ServerConfig(max_samples=4), KEY)) as url:
        engine = RemoteEngine(url, key=KEY)
        try:
            yield engine
        finally:
            await engine.close()
    await behind.close()


@engine_contract.every_check
def test_contract(check: engine_contract.Check) -> None:
    engine_contract.run_check(check, remote)


def test_an_engine_that_fails_on_the_way_is_told() -> None:
    num_steps = 0

    def fail_at_3() -> None:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 3:
            raise ZeroDivisionError("a bug")

    async def run() -> None:
        async with remote(FakeCore(32, 128, on_step=fail_at_3)) as engine:
            got: list[Chunk] = []
            with pytest.raises(EngineError, match="ZeroDivisionError: a bug"):
                async for chunk in engine.generate(make_prompt(max_tokens=MANY)):
                    got.append(chunk)  # noqa: PERF401  (what came before the failure is wanted)
            assert len(join(got)) == 2
            for late in (complete(engine, make_prompt()), engine.state()):
                with pytest.raises(EngineError, match="a bug"):
                    await late

    asyncio.run(run())


def test_errors_keep_their_kind_and_name_the_server() -> None:
    async def run() -> None:
        async with remote() as engine:
            with pytest.raises(RequestError, match=r"http://127.*/generate: this prompt can never be served"):
                await complete(engine, make_prompt(max_tokens=10**6))
            with pytest.raises(RequestError, match="num_samples: expected at most 4, received 5"):
                await complete(engine, make_prompt(num_samples=5))
            with pytest.raises(NotFoundError, match=r"/weights: .* is not a folder"):
                await engine.load(Path("/no-such-model"), PolicyVersion("a", 1))

    asyncio.run(run())


def test_experts_come_across() -> None:
    experts = np.arange(12, dtype=np.int16).reshape(2, 3, 2) - 1

    class Routed(FakeCore):
        def step(self) -> list[tuple[str, Chunk]]:
            self._asked = {}
            ids, figures = np.array([1, 2], np.int32), np.array([-0.1, np.nan], np.float32)
            return [("r0", Chunk(0, ids, figures, figures, ids, 3, experts, FinishReason.STOP))]

    async def run() -> None:
        async with remote(Routed(32, 128)) as engine:
            ((chunk,),) = await collect(engine.generate(make_prompt(returns_experts=True)))
            assert chunk.experts is not None
            assert chunk.experts.dtype == np.int16
            assert np.array_equal(chunk.experts, experts)
            assert np.array_equal(chunk.logprobs, np.array([-0.1, np.nan], np.float32), equal_nan=True)
            assert chunk.num_cached == 3

    asyncio.run(run())


async def answer_half(request: Request) -> Response:
    line = b'{"sample": 0, "ids": [1], "logprobs": [0], "raw_logprobs": [0], "versions": [0], "num_cached": 0}\n'
    return Response(line)


async def answer_nonsense(request: Request) -> Response:
    return PlainTextResponse("<html>a proxy's page</html>")


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (answer_half, "ended its response with 1 completions unfinished"),
        (answer_nonsense, "not a chunk.*a proxy's page"),
    ],
)
def test_an_answer_that_is_none_is_told(answer: object, problem: str) -> None:
    async def run() -> None:
        routes = [Route(path, answer, methods=["GET", "POST"]) for path in ("/generate", "/health")]  # type: ignore[arg-type]  # both are endpoints
        async with served(Starlette(routes=routes)) as url:
            engine = RemoteEngine(url)
            with pytest.raises(EngineError, match=problem):
                await complete(engine, make_prompt())
            with pytest.raises(EngineError, match=r"JSON|did not return an engine state"):
                await engine.state()
            await engine.close()

    asyncio.run(run())


def test_a_server_that_is_not_there_is_told() -> None:
    async def run() -> None:
        engine = RemoteEngine("http://127.0.0.1:9")
        with pytest.raises(EngineError, match=r"127\.0\.0\.1:9 cannot be reached"):
            await complete(engine, make_prompt())
        await engine.close()

    asyncio.run(run())


def test_a_silent_server_is_abandoned_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer_never(request: Request) -> Response:
        await asyncio.sleep(60)
        return Response()

    monkeypatch.setattr("m2forge.rollout.backends.remote.ANSWER_S", 0.05)

    async def run() -> None:
        async with served(Starlette(routes=[Route("/generate", answer_never, methods=["POST"])])) as url:
            engine = RemoteEngine(url)
            async with asyncio.timeout(50):
                (chunks,) = await collect(engine.generate(make_prompt(timeout_s=0.05)))
            assert [chunk.finish_reason for chunk in chunks] == [FinishReason.ABORT]
            await engine.close()

    asyncio.run(run())


def test_closing_the_engine_ends_what_is_under_way_as_an_error() -> None:
    async def run() -> None:
        async with remote() as engine:
            asked = asyncio.create_task(complete(engine, make_prompt(max_tokens=MANY)))
            while not (await engine.state()).num_running:
                await asyncio.sleep(0.005)
            await engine.close()
            with pytest.raises(EngineError):
                await asked

    asyncio.run(run())


def test_a_line_may_come_in_any_pieces_and_be_long() -> None:
    lines = [b"{}", b"\xe2\x80\xa8" * 7, b"x" * (8 << 20), b"last"]
    text = b"\n\n" + b"\n".join(lines)

    async def answer(request: Request) -> Response:
        async def pieces() -> AsyncIterator[bytes]:
            for place in range(64):
                yield text[place : place + 1]
            for place in range(64, len(text), 4096):
                yield text[place : place + 4096]

        return StreamingResponse(pieces())

    async def run() -> None:
        async with served(Starlette(routes=[Route("/lines", answer, methods=["POST"])])) as url:
            client = Client(url, read_error=wire.read_error)
            assert [line async for line in client.lines("/lines", {})] == lines
            await client.close()

    asyncio.run(run())


@pytest.mark.parametrize("seed", range(2))
def test_of_many_requests_none_is_lost_and_none_answered_twice(seed: int) -> None:
    random = Random(seed)
    outcomes: Counter[str] = Counter()

    async def ask(engine: Engine, kind: str) -> None:
        timeout_s = random.random() * 0.03 if kind == "late" else None
        num_samples, max_tokens = random.randint(1, 3), 10**6 if kind == "oversize" else random.randint(1, 40)
        prompt = make_prompt(max_tokens=max_tokens, num_samples=num_samples, timeout_s=timeout_s)
        ends = [0] * num_samples
        try:
            async with aclosing(engine.generate(prompt)) as chunks:
                async for chunk in chunks:
                    assert not ends[chunk.sample], "a chunk after the last"
                    ends[chunk.sample] += chunk.finish_reason is not None
                    if kind == "closed" and random.random() < 0.1:
                        outcomes["closed"] += 1
                        return
        except RequestError:
            outcomes["refused"] += 1
            assert kind == "oversize"
            return
        assert ends == [1] * num_samples
        outcomes["ended"] += 1

    async def run() -> None:
        async with remote(FakeCore(32, 128)) as engine, asyncio.timeout(60):
            kinds = random.choices(("whole", "late", "closed", "cancelled", "oversize"), k=200)
            tasks = []
            for kind in kinds:
                tasks.append(asyncio.create_task(ask(engine, kind)))
                await asyncio.sleep(random.random() * 0.004)
                if kind == "cancelled":
                    tasks[-1].cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            for kind, result in zip(kinds, results, strict=True):
                assert result is None or (kind == "cancelled" and isinstance(result, asyncio.CancelledError))
            assert outcomes["refused"] == kinds.count("oversize")
            await settled(engine)

    asyncio.run(run())
