"""The HTTP server: what it answers, what it refuses, and what becomes of a request whose client leaves."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2forge.errors import ConfigError, RequestError
from m2forge.listener import address
from m2forge.protocols import Chunk, Prompt
from m2forge.records import FinishReason, JsonValue, PolicyVersion, Sampling
from m2forge.rollout.config import RolloutConfig, ServerConfig
from m2forge.rollout.core import Core
from m2forge.rollout.engine import NativeEngine
from m2forge.rollout.server import wire
from m2forge.rollout.server.app import bind, make_app
from m2forge.testing.scripted import ScriptedEngine
from tests.rollout.engine_contract import MANY, complete, make_prompt, settled
from tests.rollout.fake_core import FakeCore
from tests.rollout.network import make_network
from tests.rollout.served import KEY, KEYED, served

IDS: dict[str, JsonValue] = {"ids": [3, 1, 4], "max_tokens": 8, "seed": 1}
JSON = {"Content-Type": "application/json"}
VERSION = {"lineage": "run", "step": 5}


def ask(
    check: Callable[[httpx2.AsyncClient, ScriptedEngine], Awaitable[None]], config: ServerConfig | None = None
) -> None:
    """Run a check with a client of a server over a scripted engine."""

    async def run() -> None:
        engine = ScriptedEngine(32, context=128, delay_s=0.001)
        async with (
            served(make_app(engine, config or ServerConfig(), KEY)) as url,
            httpx2.AsyncClient(base_url=url, headers=KEYED, verify=False) as client,
        ):
            await check(client, engine)

    asyncio.run(run())


def test_all_three_forms_of_an_answer_say_the_same() -> None:
    async def check(client: httpx2.AsyncClient, engine: ScriptedEngine) -> None:
        expected = await complete(engine, make_prompt((3, 1, 4), seed=1))
        lines = await client.post("/generate", json=IDS)
        assert lines.headers["content-type"] == "application/x-ndjson"
        chunks = [json.loads(line) for line in lines.text.splitlines()]
        assert [id for chunk in chunks for id in chunk["ids"]] == expected
        assert [chunk.get("finish_reason") for chunk in chunks] == [None] * 7 + ["length"]
        events = await client.post("/generate", json=IDS, headers={"Accept": "text/event-stream"})
        assert events.headers["content-type"].startswith("text/event-stream")
        assert [json.loads(event.removeprefix("data: ")) for event in events.text.split("\n\n")[:-1]] == chunks
        whole = (await client.post("/generate", json=IDS | {"stream": False, "num_samples": 2})).json()
        assert [len(sample["ids"]) for sample in whole["samples"]] == [8, 8]
        assert whole["samples"][0]["ids"] == expected
        assert whole["samples"][0]["logprobs"] == [value for chunk in chunks for value in chunk["logprobs"]]
        assert whole["samples"][0]["finish_reason"] == "length"

    ask(check)


BAD_BODIES: list[tuple[JsonValue, str]] = [
    ({"max_tokens": 8}, "ids: Field required"),
    (IDS | {"tempersature": 1}, "unknown key 'tempersature'"),
    (IDS | {"sampling": {"temprature": 1}}, "unknown key 'sampling.temprature'; did you mean 'temperature'?"),
    (IDS | {"ids": [1, -1]}, "ids.1: Input should be greater than or equal to 0"),
    (IDS | {"ids": [1, 2**31]}, "ids.1: Input should be less than"),
    (IDS | {"ids": [True]}, "ids.0: Input should be a valid integer"),
    (IDS | {"ids": []}, "expected at least one token"),
    (IDS | {"ids": [99]}, "ids outside 0..31"),
    (IDS | {"max_tokens": "8"}, "max_tokens: Input should be a valid integer"),
    (IDS | {"max_tokens": 0}, "max_tokens: expected 1 or more"),
    (IDS | {"max_tokens": 1000}, "exceed the context length of 128"),
    (IDS | {"num_samples": 9}, "num_samples: expected at most 8, received 9"),
    (IDS | {"sampling": {"top_p": 0}}, "top_p: expected a number above 0"),
    (IDS | {"timeout_s": -1}, "timeout_s"),
    ([1], "Input should be an object"),
]


@pytest.mark.parametrize("stream", [True, False])
def test_a_bad_body_is_refused_by_name(stream: bool) -> None:
    async def check(client: httpx2.AsyncClient, engine: ScriptedEngine) -> None:
        for body, problem in BAD_BODIES:
            sent = {**body, "stream": stream} if isinstance(body, dict) else body
            response = await client.post("/generate", json=sent)
            assert (response.status_code, problem) == (400, problem)
            assert problem in response.json()["error"]["message"]
        assert (await engine.state()).num_running == 0

    ask(check, ServerConfig(max_samples=8))


def test_refusals_have_their_status() -> None:
    async def check(client: httpx2.AsyncClient, engine: ScriptedEngine) -> None:
        for response, status, problem in (
            (await client.post("/generate", json=IDS | {"temperature": 1}), 400, "unknown key 'temperature'"),
            (await client.post("/generate", content=b"{", headers=JSON), 400, "Invalid JSON"),
            (await client.post("/generate", content=b"x" * 1001, headers=JSON), 413, "exceeds 1000 bytes"),
            (await client.get("/generate"), 405, "Method Not Allowed"),
            (await client.get("/nothing"), 404, "Not Found"),
        ):
            assert response.status_code == status
            assert problem in response.json()["error"]["message"]

    ask(check, ServerConfig(max_body_bytes=1000))


ROUTES = [("POST", "/generate"), ("POST", "/weights"), ("GET", "/health"), ("GET", "/metrics"), ("GET", "/nothing")]


def test_every_route_asks_for_the_key() -> None:
    async def check(client: httpx2.AsyncClient, engine: ScriptedEngine) -> None:
        for method, path in ROUTES:
            for sent in ("", "Bearer", "Bearer wrong", f"Bearer {KEY}x", KEY, f"Basic {KEY}"):
                headers = {"Authorization": sent}
                response = await client.request(method, path, headers=headers, json=IDS if method == "POST" else None)
                assert (response.status_code, path, sent) == (401, path, sent)
                assert response.headers["connection"] == "close"
                assert "version" not in response.text
        del client.headers["authorization"]
        assert (await client.get("/health")).status_code == 401
        assert (await engine.state()).num_running == 0

    ask(check)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 421),
        ({"Host": "evil.example:8400"}, 421),
        ({"Host": "127.0.0.1.evil.example"}, 421),
        ({"Host": "10.0.0.7:8400"}, 421),
        ({"Host": ""}, 421),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Host": "localhost:1", "Origin": "http://localhost:2"}, 403),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content-Type": "application/json-seq"}, 415),
        ({"Content-Type": ""}, 415),
        ({"Content-Type": "Application/JSON; charset=utf-8"}, 200),
        ({"Host": "localhost:1", "Origin": "http://localhost:1"}, 200),
        ({"Host": "[::1]:8400"}, 200),
        ({"Host": "Sampler.Example"}, 200),
        ({"Host": "ported.example:80"}, 200),
        ({"Authorization": f"bearer {KEY}"}, 200),
    ],
)
def test_foreign_hosts_origins_and_content_types_are_refused(headers: dict[str, str], status: int) -> None:
    async def check(client: httpx2.AsyncClient, engine: ScriptedEngine) -> None:
        response = await client.post("/generate", content=json.dumps(IDS), headers=JSON | headers)
        assert response.status_code == status, response.text

    ask(check, ServerConfig(hosts=("sampler.example", "Ported.Example:8400", "fd00::7", "")))


def test_on_every_address_any_address_but_no_name_is_a_host() -> None:
    async def check(client: httpx2.AsyncClient, engine: ScriptedEngine) -> None:
        for host, status in (("10.0.0.7:8400", 200), ("[fe80::1]", 200), ("evil.example", 421)):
            assert (await client.get("/health", headers={"Host": host})).status_code == status

    ask(check, ServerConfig(host="0.0.0.0"))


def test_weights_are_taken_over_by_their_version(tmp_path: Path) -> None:
    body = {"folder": str(tmp_path), "version": VERSION}

    async def check(client: httpx2.AsyncClient, engine: ScriptedEngine) -> None:
        assert (await client.post("/weights", json=body)).json() == {"version": VERSION}
        assert (await client.get("/health")).json() == {"version": VERSION, "num_running": 0, "num_waiting": 0}
        for bad in (
            {"folder": "/none", "version": VERSION},
            {"folder": str(tmp_path)},
            body | {"step": 1},
            body | {"version": {"lineage": "run", "step": 2**31}},
            body | {"version": {"lineage": "run", "step": -1}},
            body | {"version": {"lineage": "", "step": 1}},
        ):
            assert (await client.post("/weights", json=bad)).status_code == 400
        branched = VERSION | {"branch": "b"}
        assert (await client.post("/weights", json=body | {"version": branched})).json() == {"version": branched}
        assert (await engine.state()).version == PolicyVersion("run", 5, "b")
        assert (await client.post("/generate", json=IDS)).status_code == 200

    ask(check)


def test_weights_that_cannot_be_read_do_not_end_the_engine() -> None:
    async def run() -> None:
        engine = NativeEngine(Core(make_network(0), RolloutConfig(), PolicyVersion("network", 0)))
        async with (
            served(make_app(engine, ServerConfig(), KEY)) as url,
            httpx2.AsyncClient(base_url=url, headers=KEYED, verify=False) as client,
        ):
            for folder in ("a" * 5000, "a\0b", "", "/dev/null"):
                response = await client.post("/weights", json={"folder": folder, "version": VERSION})
                assert response.status_code == 400
            assert (await client.post("/generate", json=IDS)).status_code == 200
        await engine.close()

    asyncio.run(run())


def test_a_body_with_many_mistakes_is_refused_quickly() -> None:
    for body in (b'{"max_tokens": 1, "ids": [%s]}' % b",".join([b"-1"] * 1_000_000), b"{%s}" % many_keys(20_000)):
        started_s = time.process_time()
        with pytest.raises(RequestError, match="invalid request body") as caught:
            wire.read_body(wire.PromptBody, body)
        assert len(str(caught.value)) < 1000
        assert time.process_time() - started_s < 1  # they took 14 and 2 s when each mistake was told


def many_keys(number: int) -> bytes:
    return b",".join(b'"key%d": 1' % place for place in range(number))


def head(num_bytes: int) -> bytes:
    lines = ["POST /generate HTTP/1.1", "Host: localhost", f"Authorization: Bearer {KEY}"]
    lines += ["Content-Type: application/json", f"Content-Length: {num_bytes}", ""]
    return "".join(f"{line}\r\n" for line in lines).encode()


def test_a_client_that_leaves_while_it_sends_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    async def check(client: httpx2.AsyncClient, engine: ScriptedEngine) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port)
        writer.write(head(100) + b"{")
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.close()
        async with asyncio.timeout(60):
            while 'requests_total{outcome="hung_up"} 1.0' not in (text := (await client.get("/metrics")).text):
                await asyncio.sleep(0.005)
        assert 'requests_total{outcome="failed"} 0.0' in text

    ask(check)
    assert not caplog.records


def test_a_client_that_does_not_read_and_leaves_aborts() -> None:
    async def check(client: httpx2.AsyncClient, engine: ScriptedEngine) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port, limit=1)
        body = json.dumps(IDS | {"max_tokens": MANY, "num_samples": 8}).encode()
        writer.write(head(len(body)) + body)
        async with asyncio.timeout(60):
            while (await engine.state()).num_running != 8:
                await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)
        writer.transport.abort()
        async with asyncio.timeout(60):
            while 'requests_total{outcome="hung_up"} 1.0' not in (await client.get("/metrics")).text:
                await asyncio.sleep(0.005)
        assert (await engine.state()).num_running == 0

    ask(check)


@pytest.mark.parametrize("body", [IDS, IDS | {"stream": False}], ids=["stream", "whole"])
def test_a_client_that_hangs_up_aborts(body: dict[str, Any]) -> None:
    async def check(client: httpx2.AsyncClient, engine: ScriptedEngine) -> None:
        asked = asyncio.create_task(client.post("/generate", json=body | {"max_tokens": MANY, "num_samples": 8}))
        while not (await engine.state()).num_running:
            await asyncio.sleep(0.005)
        asked.cancel()
        await settled(engine)
        while 'requests_total{outcome="hung_up"} 1.0' not in (text := (await client.get("/metrics")).text):
            await asyncio.sleep(0.005)
        assert 'requests_total{outcome="answered"} 0.0' in text

    ask(check)


def test_metrics_are_what_prometheus_reads() -> None:
    async def run() -> None:
        engine = NativeEngine(FakeCore(32, 128))
        async with (
            served(make_app(engine, ServerConfig(), KEY)) as url,
            httpx2.AsyncClient(base_url=url, headers=KEYED, verify=False) as client,
        ):
            await client.post("/generate", json=IDS)
            await client.post("/generate", json=IDS | {"stream": False})
            await client.post("/generate", json=IDS | {"max_tokens": 10**6})
            response = await client.get("/metrics")
        await engine.close()
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        lines = response.text.splitlines()
        figures = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        assert figures['m2forge_rollout_requests_total{outcome="answered"}'] == "2.0"
        assert figures['m2forge_rollout_requests_total{outcome="refused"}'] == "1.0"
        assert figures["m2forge_rollout_sampled_tokens_total"] == "16.0"
        assert figures["m2forge_rollout_first_chunk_seconds_count"] == "2.0"
        assert figures["m2forge_rollout_engine_steps_total"] == "16.0"
        kinds = dict(line.split()[2:4] for line in lines if line.startswith("# TYPE"))
        assert {name for name, kind in kinds.items() if kind == "counter"} == {
            name for name in kinds if name.endswith("_total")
        }
        names = {name.split("{")[0] for name in figures}
        for kind, name in (line.split()[1:3] for line in lines if line.startswith("#")):
            assert kind in ("HELP", "TYPE")
            assert names & {name, f"{name}_sum", f"{name}_count"}

    asyncio.run(run())


def test_a_failed_engine_is_unhealthy() -> None:
    def fail() -> None:
        raise ZeroDivisionError("a bug")

    async def run() -> None:
        engine = NativeEngine(FakeCore(32, 128, on_step=fail))
        async with (
            served(make_app(engine, ServerConfig(), KEY)) as url,
            httpx2.AsyncClient(base_url=url, headers=KEYED, verify=False) as client,
        ):
            assert (await client.get("/health")).status_code == 200
            for response in (
                await client.post("/generate", json=IDS),
                await client.get("/health"),
                await client.get("/metrics"),
            ):
                assert response.status_code == 503
                assert "a bug" in response.json()["error"]["message"]
        await engine.close()

    asyncio.run(run())


def test_a_place_that_cannot_be_listened_on_is_told() -> None:
    with bind(ServerConfig(port=0)) as listener:
        port = int(address(listener).rsplit(":", 1)[1])
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port} cannot be listened on"):
            bind(ServerConfig(port=port))


samplings = st.builds(
    Sampling,
    temperature=st.floats(0, 4),
    top_p=st.floats(0.01, 1),
    top_k=st.integers(0, 100),
    min_p=st.floats(0, 1),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.1, 2),
)
ids = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=8)
prompts = st.builds(
    Prompt,
    ids=ids.map(lambda values: np.array(values, np.int32)),
    max_tokens=st.integers(1, 1000),
    sampling=samplings,
    stop_ids=ids.map(tuple),
    stop_texts=st.lists(st.text(max_size=5), max_size=3).map(tuple),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    num_samples=st.integers(1, 9),
    priority=st.integers(-9, 9),
    timeout_s=st.none() | st.floats(0, 1e6),
    returns_experts=st.booleans(),
)


@given(prompts)
def test_a_prompt_travels_whole(prompt: Prompt) -> None:
    read = wire.read_body(wire.PromptBody, wire.write_prompt(prompt)).prompt()
    for field in fields(Prompt):
        if field.name != "ids":
            assert getattr(read, field.name) == getattr(prompt, field.name)
    assert np.array_equal(read.ids, prompt.ids)
    assert set(wire.SamplingBody.model_fields) == {field.name for field in fields(Sampling)}


@given(st.lists(st.floats(-100, 0, width=32) | st.just(float("nan")), max_size=5), st.booleans(), st.integers(0, 9))
def test_a_chunk_travels_to_the_bit(figures: list[float], has_experts: bool, seed: int) -> None:
    array = np.array(figures, np.float32)
    random = np.random.default_rng(seed)
    steps = random.integers(0, 2**31 - 1, array.size, np.int32)
    experts = random.integers(-1, 2**15 - 1, (3, 2, 2), np.int16) if has_experts else None
    reason = (None, *FinishReason)[seed % 4]
    chunk = Chunk(2, steps[::-1].copy(), array, array[::-1].copy(), steps, seed, experts, reason)
    read = wire.read_chunk(json.dumps(wire.write_chunk(chunk)))
    for field in fields(Chunk):
        sent, got = getattr(chunk, field.name), getattr(read, field.name)
        if isinstance(sent, np.ndarray):
            assert got.dtype == sent.dtype
            assert got.shape == sent.shape
            assert got.tobytes() == sent.tobytes() or np.array_equal(got, sent, equal_nan=True)
        else:
            assert got == sent
