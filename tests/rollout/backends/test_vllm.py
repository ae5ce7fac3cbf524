"""The engine behind vLLM: the contract against a server that speaks its protocol, and what is refused."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.requests import Request
from starlette.responses import Response

from m2forge.errors import CheckpointError, EngineError, RequestError
from m2forge.model.manifest import describe, write_manifest
from m2forge.protocols import Engine
from m2forge.records import PolicyVersion, Sampling
from m2forge.rollout.backends.vllm import VLLMEngine
from tests.rollout import engine_contract
from tests.rollout.backends.fake_vllm import FakeVLLM
from tests.rollout.engine_contract import CONTEXT, PROMPT_IDS, VOCAB_SIZE, collect, complete, join, make_prompt
from tests.rollout.network import write_network
from tests.rollout.served import served

START = PolicyVersion("run", 0)


@asynccontextmanager
async def behind(fake: FakeVLLM | None = None, **options: Any) -> AsyncIterator[Engine]:
    async with served((fake or FakeVLLM(VOCAB_SIZE, CONTEXT)).app) as url:
        engine = VLLMEngine(url, START, **options)
        try:
            yield engine
        finally:
            await engine.close()


@engine_contract.every_check
def test_contract(check: engine_contract.Check) -> None:
    engine_contract.run_check(check, behind, engine_contract.Facts(write_weights=write_network))


@pytest.mark.parametrize("tells_ids", [True, False])
def test_ids_are_read_from_older_servers_too(tells_ids: bool) -> None:
    fake = FakeVLLM(VOCAB_SIZE, CONTEXT, tells_ids=tells_ids)

    async def run() -> list[float]:
        async with behind(fake) as engine:
            return await complete(engine, make_prompt(sampling=Sampling(temperature=0)))

    ids: list[int] = []
    for _ in range(8):
        ids.append(int(fake.policy.logits([*PROMPT_IDS, *ids], fake.version).argmax()))
    assert asyncio.run(run()) == ids


@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=0.7), Sampling(top_p=0.9), Sampling(top_k=3), Sampling(presence_penalty=1)]
)
def test_a_server_in_processed_mode_reports_what_it_sampled_from(sampling: Sampling) -> None:
    fake = FakeVLLM(VOCAB_SIZE, CONTEXT, mode="processed")

    async def run() -> None:
        async with behind(fake, logprobs_mode="processed") as engine:
            (chunks,) = await collect(engine.generate(make_prompt(seed=1, sampling=sampling)))
            assert np.isnan(join(chunks, "raw_logprobs")).all()
            ids = [int(id) for id in join(chunks)]
            for place, logprob in enumerate(join(chunks, "logprobs")):
                drawn = fake.policy.draw(PROMPT_IDS, ids[:place], fake.version, sampling, 0.0, forced_id=ids[place])
                assert logprob == pytest.approx(drawn.logprob, abs=1e-5)
        async with behind() as engine:
            with pytest.raises(RequestError, match="--logprobs-mode processed_logprobs"):
                await complete(engine, make_prompt(sampling=sampling))
            assert len(await complete(engine, make_prompt(sampling=Sampling(temperature=0, top_p=0.9)))) == 8
            with pytest.raises(RequestError, match=r"temperature 0\.001"):
                await complete(engine, make_prompt(sampling=Sampling(temperature=0.001)))

    asyncio.run(run())


def test_every_sampling_parameter_is_sent_explicitly() -> None:
    fake = FakeVLLM(VOCAB_SIZE, CONTEXT)

    async def run() -> None:
        async with behind(fake, model="policy") as engine:
            prompt = make_prompt(seed=-1, num_samples=2, priority=3, stop_ids=(9,), stop_texts=("\n",))
            await collect(engine.generate(prompt), 2)

    asyncio.run(run())
    (body,) = fake.bodies
    expected = {
        "prompt": list(PROMPT_IDS),
        "model": "policy",
        "seed": 2**62 - 1,  # as −1 it would be none
        "n": 2,
        "priority": -3,
        "stop_token_ids": [9],
        "stop": ["\n"],
        "repetition_penalty": 1.0,
        "top_k": 0,
        "skip_special_tokens": False,
    }
    assert {name: body[name] for name in expected} == expected


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    write_network(tmp_path / "model")
    return tmp_path / "model"


def test_weights_wait_for_requests_and_requests_for_weights(weights: Path) -> None:
    fake = FakeVLLM(VOCAB_SIZE, CONTEXT)

    async def run() -> None:
        async with behind(fake) as engine:
            async with aclosing(engine.generate(make_prompt(max_tokens=60))) as chunks:
                first = await anext(chunks)
                load = asyncio.create_task(engine.load(weights, PolicyVersion("run", 1)))
                await asyncio.sleep(0.2)  # the folder is looked at first, in a thread
                late = asyncio.create_task(collect(engine.generate(make_prompt())))
                await asyncio.sleep(0.01)
                assert fake.admin_calls == []
                assert len(fake.bodies) == 1
                (rest,) = await collect(chunks)
            assert join([first, *rest], "versions") == [0] * 60
            await load
            ((*_, last),) = await late
            assert last.versions.tolist() == [1]
        assert fake.admin_calls == ["pause?mode=wait", "collective_rpc", "reset_prefix_cache", "resume"]
        assert fake.version.lineage == str(weights)

    asyncio.run(run())


def test_a_server_outside_development_mode_cannot_reload(weights: Path) -> None:
    async def run() -> None:
        async with behind(FakeVLLM(VOCAB_SIZE, CONTEXT, is_dev=False)) as engine:
            with pytest.raises(EngineError, match="VLLM_SERVER_DEV_MODE=1"):
                await engine.load(weights, PolicyVersion("run", 1))
            assert (await engine.state()).version == START
            assert len(await complete(engine, make_prompt())) == 8

    asyncio.run(run())


@pytest.mark.parametrize(
    ("path", "answer", "problem"),
    [
        ("/collective_rpc", Response("no such tensor", 500), "collective_rpc: answered 500: no such tensor"),
        ("/reset_prefix_cache", Response("gone", 502), "reset_prefix_cache: answered 502"),
        ("/reset_prefix_cache", Response('{"success": false}'), "did not reset the prefix cache"),
    ],
)
def test_a_load_that_breaks_off_stops_requests_until_a_success(
    weights: Path, path: str, answer: Response, problem: str
) -> None:
    class Broken(FakeVLLM):
        is_broken = True

        async def administer(self, request: Request) -> Response:
            response = await super().administer(request)
            return answer if self.is_broken and request.url.path == path else response

    fake = Broken(VOCAB_SIZE, CONTEXT)

    async def run() -> None:
        async with behind(fake) as engine:
            with pytest.raises(EngineError, match=problem):
                await engine.load(weights, PolicyVersion("run", 1))
            assert fake.admin_calls[-1] == "resume"
            assert (await engine.state()).version == START
            with pytest.raises(EngineError, match="weights are unknown"):
                await complete(engine, make_prompt())
            fake.is_broken = False
            await engine.load(weights, PolicyVersion("run", 2))
            (chunks,) = await collect(engine.generate(make_prompt()))
            assert join(chunks, "versions") == [2] * 8

    asyncio.run(run())


def test_a_cancelled_load_lets_the_paused_server_continue(weights: Path) -> None:
    class Slow(FakeVLLM):
        async def administer(self, request: Request) -> Response:
            response = await super().administer(request)
            await asyncio.sleep(60 if request.url.path == "/pause" else 0)
            return response

    fake = Slow(VOCAB_SIZE, CONTEXT)

    async def run() -> None:
        async with behind(fake) as engine:
            load = asyncio.create_task(engine.load(weights, PolicyVersion("run", 1)))
            while not fake.admin_calls:
                await asyncio.sleep(0.005)
            load.cancel()
            with pytest.raises(asyncio.CancelledError):
                await load
            assert fake.admin_calls == ["pause?mode=wait", "resume"]
            (chunks,) = await collect(engine.generate(make_prompt()))
            assert join(chunks, "versions") == [0] * 8

    asyncio.run(run())


def test_weights_that_would_end_the_server_are_not_sent(weights: Path) -> None:
    (weights / "model.safetensors").write_bytes(b"torn")
    fake = FakeVLLM(VOCAB_SIZE, CONTEXT)

    async def run() -> None:
        async with behind(fake) as engine:
            with pytest.raises(CheckpointError, match="not a complete safetensors file"):
                await engine.load(weights, PolicyVersion("run", 1))
        assert fake.admin_calls == []

    asyncio.run(run())


def test_a_version_that_was_changed_is_not_sent(weights: Path) -> None:
    path = weights / "model.safetensors"
    write_manifest(weights, {path.name: describe(path)})
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    fake = FakeVLLM(VOCAB_SIZE, CONTEXT)

    async def run() -> None:
        async with behind(fake) as engine:
            with pytest.raises(CheckpointError, match="torn or was changed"):
                await engine.load(weights, PolicyVersion("run", 1))
        assert fake.admin_calls == []

    asyncio.run(run())


@pytest.mark.parametrize(
    ("event", "problem"),
    [
        ({"error": {"message": "out of memory", "type": "InternalServerError", "code": 500}}, "500: out of memory"),
        ({"choices": [{"index": 0, "token_ids": [1, 2], "logprobs": None, "finish_reason": None}]}, "2 tokens with 0"),
        ({"choices": [{"index": 0, "token_ids": [], "finish_reason": "repetition"}]}, "repetition"),
        ({"choices": []}, "1 completions unfinished"),
    ],
)
def test_events_that_cannot_be_used_are_told(event: dict[str, Any], problem: str) -> None:
    class Strange(FakeVLLM):
        async def complete(self, request: Request) -> Response:
            return Response(f": a comment\n\ndata: {json.dumps(event)}\n\ndata: [DONE]\n\n")

    async def run() -> None:
        async with behind(Strange(VOCAB_SIZE, CONTEXT)) as engine:
            with pytest.raises(EngineError, match=problem):
                await complete(engine, make_prompt())

    asyncio.run(run())
