"""The engine behind SGLang: the contract against a server that speaks its protocol, and what is refused."""

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

from m2forge.errors import CheckpointError, EngineError, NotFoundError, RequestError
from m2forge.model.manifest import digest, write_manifest
from m2forge.protocols import Engine
from m2forge.records import PolicyVersion, Sampling
from m2forge.rollout.backends.sglang import SGLangEngine
from tests.rollout import engine_contract
from tests.rollout.backends.fake_sglang import FakeSGLang
from tests.rollout.engine_contract import (
    CONTEXT,
    MANY,
    PROMPT_IDS,
    VOCAB_SIZE,
    collect,
    complete,
    join,
    make_prompt,
    settled,
)
from tests.rollout.served import served

START = PolicyVersion("run", 0)


@asynccontextmanager
async def behind(fake: FakeSGLang | None = None, *, takes_seeds: bool = True) -> AsyncIterator[Engine]:
    async with served((fake or FakeSGLang(VOCAB_SIZE, CONTEXT)).app) as url:
        engine = SGLangEngine(url, START, takes_seeds=takes_seeds)
        try:
            yield engine
        finally:
            await engine.close()


def write_weights(folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").write_text("{}")


@engine_contract.every_check
def test_contract(check: engine_contract.Check) -> None:
    engine_contract.run_check(check, behind, engine_contract.Facts(write_weights=write_weights))


@pytest.mark.parametrize("is_incremental", [True, False])
def test_both_ways_of_streaming_give_each_token_once(is_incremental: bool) -> None:
    fake = FakeSGLang(VOCAB_SIZE, CONTEXT, is_incremental=is_incremental)

    async def run() -> None:
        async with behind(fake) as engine:
            sampling = Sampling(temperature=0.5)
            for chunks in await collect(engine.generate(make_prompt(seed=3, num_samples=2, sampling=sampling)), 2):
                ids = [int(id) for id in join(chunks)]
                assert len(ids) == 8
                assert np.isnan(join(chunks, "raw_logprobs")).all()
                for place, logprob in enumerate(join(chunks, "logprobs")):
                    drawn = fake.policy.draw(PROMPT_IDS, ids[:place], fake.version, sampling, 0.0, ids[place])
                    assert logprob == pytest.approx(drawn.logprob, abs=1e-5)
                assert {chunk.num_cached for chunk in chunks} == {len(PROMPT_IDS) - 1}

    asyncio.run(run())


def test_a_request_that_is_closed_is_aborted_by_name() -> None:
    fake = FakeSGLang(VOCAB_SIZE, CONTEXT)

    async def run() -> None:
        async with behind(fake) as engine:
            async with aclosing(engine.generate(make_prompt(max_tokens=MANY, num_samples=2))) as chunks:
                await anext(chunks)
            await settled(engine)
            assert sorted(fake.aborted) == sorted(fake.bodies[0]["rid"])
            await complete(engine, make_prompt())
            assert len(fake.aborted) == 2

    asyncio.run(run())


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"sampling": Sampling(top_p=0.9)}, "before truncation"),
        ({"sampling": Sampling(temperature=0, presence_penalty=1)}, "penalties"),
        ({"returns_experts": True}, "experts"),
        ({"priority": 1}, "priority 1"),
        ({"stop_texts": ("\n",)}, "may miss"),
        ({"sampling": Sampling(temperature=1e-7)}, "temperature 1e-07"),
        ({"seed": 1}, "takes_seeds=True"),
    ],
)
def test_what_it_cannot_tell_is_refused(more: dict[str, Any], problem: str) -> None:
    async def run() -> None:
        async with behind(takes_seeds=False) as engine:
            with pytest.raises(RequestError, match=problem):
                await complete(engine, make_prompt(**more))

    asyncio.run(run())


def test_the_models_end_token_ends_nothing_unasked() -> None:
    fake = FakeSGLang(VOCAB_SIZE, CONTEXT)

    async def run() -> None:
        async with behind(fake) as engine:
            free = [int(id) for id in await complete(engine, make_prompt(max_tokens=12, seed=3))]
            fake.end_id = free[4]
            assert await complete(engine, make_prompt(max_tokens=12, seed=3)) == free
            with pytest.raises(EngineError, match=f"at {free[4]}, which is not in the prompt's stop ids"):
                await complete(engine, make_prompt(max_tokens=12, seed=3, stop_ids=(VOCAB_SIZE + 1,)))

    asyncio.run(run())


@pytest.mark.parametrize("seed", [-(2**63), -1, 2**63 - 1])
def test_every_seed_is_one_the_server_takes(seed: int) -> None:
    fake = FakeSGLang(VOCAB_SIZE, CONTEXT)

    async def run() -> None:
        async with behind(fake) as engine:
            await collect(engine.generate(make_prompt(seed=seed, num_samples=2)), 2)

    asyncio.run(run())
    seeds = [settings["sampling_seed"] for settings in fake.bodies[0]["sampling_params"]]
    assert len(set(seeds)) == 2
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_load_that_breaks_off_stops_requests_until_a_success(tmp_path: Path) -> None:
    class Broken(FakeSGLang):
        is_broken = True

        async def update(self, request: Request) -> Response:
            return Response("gone", 502) if self.is_broken else await super().update(request)

    fake = Broken(VOCAB_SIZE, CONTEXT)
    write_weights(tmp_path / "model")

    async def run() -> None:
        async with behind(fake) as engine:
            with pytest.raises(EngineError, match="502"):
                await engine.load(tmp_path / "model", PolicyVersion("run", 1))
            with pytest.raises(EngineError, match="weights are unknown"):
                await complete(engine, make_prompt())
            with pytest.raises(NotFoundError):
                await engine.load(tmp_path / "none", PolicyVersion("run", 2))
            with pytest.raises(EngineError, match="weights are unknown"):
                await complete(engine, make_prompt())
            fake.is_broken = False
            await engine.load(tmp_path / "model", PolicyVersion("run", 3))
            (chunks,) = await collect(engine.generate(make_prompt()))
            assert join(chunks, "versions") == [3] * 8

    asyncio.run(run())


def test_weights_that_the_server_does_not_take_leave_the_version(tmp_path: Path) -> None:
    async def run() -> None:
        async with behind() as engine:
            with pytest.raises(RequestError, match=r"update_weights_from_disk: no config\.json"):
                await engine.load(tmp_path, PolicyVersion("run", 1))
            assert (await engine.state()).version == START
            assert len(await complete(engine, make_prompt())) == 8

    asyncio.run(run())


def test_a_version_that_was_changed_is_not_sent(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"xx")
    write_manifest(tmp_path, {path.name: {"num_bytes": 2, "digest": digest(path), "slices": {}}})
    path.write_bytes(b"xy")

    async def run() -> None:
        async with behind() as engine:
            with pytest.raises(CheckpointError, match="torn or was changed"):
                await engine.load(tmp_path, PolicyVersion("run", 1))
            assert (await engine.state()).version == START

    asyncio.run(run())


META = {"id": "a", "finish_reason": None, "completion_tokens": 2, "output_token_logprobs": [[-1.0, 3, None]]}
ABORTED = {"type": "abort", "message": "no room", "status_code": 503}


@pytest.mark.parametrize(
    ("event", "problem"),
    [
        ({"index": 0, "meta_info": META}, "2 tokens with 1 log-probabilities"),
        ({"index": 0, "meta_info": META | {"finish_reason": ABORTED}}, "503: no room"),
        ({"text": ""}, "meta_info"),
    ],
)
def test_events_that_cannot_be_used_are_told(event: dict[str, Any], problem: str) -> None:
    class Strange(FakeSGLang):
        async def generate(self, request: Request) -> Response:
            return Response(f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n")

    async def run() -> None:
        async with behind(Strange(VOCAB_SIZE, CONTEXT)) as engine:
            with pytest.raises(EngineError, match=problem):
                await complete(engine, make_prompt())

    asyncio.run(run())
