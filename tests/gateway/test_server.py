"""The gateway as a command, and what its engine's failures, its journal's and its own limits look like to a client."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import torch

from m2forge import cli
from m2forge.errors import ConfigError, EngineError
from m2forge.gateway import server as serve
from m2forge.gateway.calls.sample import StopCutter
from m2forge.gateway.config import Budget, GatewayConfig
from m2forge.gateway.format import load_format
from m2forge.gateway.server import GatewayServer
from m2forge.model.build import build
from m2forge.model.checkpoint import save_model
from m2forge.model.preset import resolve_config
from m2forge.protocols import Chunk, Prompt
from m2forge.records import FinishReason, PolicyVersion
from m2forge.rollout.config import ServerConfig
from m2forge.rollout.engine import NativeEngine
from m2forge.rollout.server.app import make_app
from m2forge.testing.scripted import ScriptedEngine
from m2forge.text.message import Message
from tests.gateway.dialogue import minimax
from tests.gateway.episodes.test_retry_http import BODY, post
from tests.gateway.live import CONTEXT, Scene, WatchedEngine, live
from tests.rollout.fake_core import FakeCore
from tests.rollout.served import KEY, served
from tests.text.draw import m2_tokenizer

ADMIN = {"Authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network with more ids than its tokenizer."""
    folder = tmp_path_factory.mktemp("gateway") / "model"
    sizes = [f"vocab_size={m2_tokenizer().vocab_size + 24}", "num_layers=1", "max_context=128"]
    save_model(build(resolve_config("m2-nano", overrides=sizes)), folder, dtype=torch.float32)
    m2_tokenizer().save(folder)
    return folder


@contextlib.contextmanager
def command(*arguments: str) -> Any:
    """A command of m2forge's that serves: its address."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-m", "m2forge", *arguments, "--port", "0"]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split()[-1]
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(20)
    assert process.returncode in (0, 130)


def key_file(folder: Path, key: str) -> str:
    path = folder / f"{key}.key"
    path.touch(0o600)
    path.write_text(f"{key}\n")
    return str(path)


def test_the_command_serves_by_its_own_engine_or_a_servers(model: Path, tmp_path: Path) -> None:
    def check(url: str) -> None:
        with httpx2.Client(base_url=url, headers=ADMIN, timeout=30, verify=False) as client:
            made = client.post("/episodes", json={"task_id": "t"}).json()
            body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
            keyed = {"Authorization": f"Bearer {made['key']}"}
            whole = client.post("/v1/chat/completions", json=body, headers=keyed).json()
            assert whole["usage"]["completion_tokens"] > 0
            assert whole["usage"]["total_tokens"] <= 128, "what the context leaves"
            stopped = client.post("/v1/completions", json={"model": "m", "prompt": "a", "stop": "e"}, headers=keyed)
            assert stopped.status_code == 200
            assert client.get(f"/episodes/{made['id']}").json()["num_calls"] == 2
            assert client.get("/health").json()["version"] == {"lineage": "model", "step": 0}

    admin_key, engine_key = key_file(tmp_path, "secret"), key_file(tmp_path, KEY)
    with command("gateway", str(model), "--journal", str(tmp_path / "journal"), "--admin-key-file", admin_key) as url:
        check(url)
    assert len(list((tmp_path / "journal").iterdir())) == 1

    async def run() -> None:
        engine = ScriptedEngine(m2_tokenizer().vocab_size, version=PolicyVersion("model", 0), decode=decode)
        async with served(make_app(engine, ServerConfig(), KEY)) as engine_url:
            await asyncio.to_thread(ask_over, engine_url)

    def ask_over(engine_url: str) -> None:
        keys = ("--admin-key-file", admin_key, "--engine-key-file", engine_key)
        with command("gateway", str(model), "--engine", "m2forge", "--url", engine_url, *keys) as url:
            check(url)

    decode = m2_tokenizer().decode_bytes
    asyncio.run(run())


def test_the_command_refuses_what_it_cannot_use(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    m2_tokenizer().save(tmp_path)
    (tmp_path / "wide").write_text("secret")
    (tmp_path / "wide").chmod(0o644)
    for arguments, problem in (
        ([str(tmp_path / "none")], "is not a folder"),
        ([str(model), "--engine", "vllm"], "a server needs --url"),
        ([str(model), "--url", "http://127.0.0.1:1"], "the native engine takes none"),
        ([str(model), "--set", "max_bodybytes=3"], "did you mean 'max_body_bytes'?"),
        ([str(model), "--engine-set", "rollout.num_block=3"], "did you mean 'num_blocks'?"),
        ([str(model), "--admin-key-file", str(tmp_path / "wide")], "(mode 0644); run chmod 600"),
        ([str(model), "--engine-key-file", key_file(tmp_path, "key")], "the native engine has no key"),
        ([str(tmp_path), "--engine", "m2forge", "--url", "http://127.0.0.1:1"], "--set context=N"),
    ):
        assert cli.main(["gateway", *arguments, "--port", "0"]) == 2
        assert problem in capsys.readouterr().err
    for name in ("M2FORGE_GATEWAY_ADMIN_KEY", "M2FORGE_ENGINE_KEY"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "secret")
            assert cli.main(["gateway", str(model), "--port", "0"]) == 2
        assert f"{name} is set, but other processes can read the environment" in capsys.readouterr().err


class FailingEngine(WatchedEngine):
    """Fails after so many chunks."""

    num_chunks = 0
    failure: Exception = EngineError("the engine failed")

    async def generate(self, prompt: Prompt) -> AsyncGenerator[Chunk, None]:
        async with contextlib.aclosing(super().generate(prompt)) as chunks:
            number = 0
            async for chunk in chunks:
                if number == self.num_chunks:
                    raise self.failure
                number += 1
                yield chunk


def test_a_gateway_whose_engine_fails_answers_clients_and_ends(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    statuses: list[int] = []

    def fail() -> None:
        raise ArithmeticError("a bug")

    def ask(url: str) -> None:
        with httpx2.Client(base_url=url, timeout=20, verify=False) as client:
            keyed = {"x-api-key": client.post("/episodes", json={}, headers=ADMIN).json()["key"]}
            body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
            statuses.append(client.post("/v1/chat/completions", json=body, headers=keyed).status_code)

    def announce(url: str) -> None:
        threads.submit(ask, url)

    monkeypatch.setattr(serve, "spare_collector", lambda: None)
    core = FakeCore(m2_tokenizer().vocab_size, CONTEXT, on_step=fail)
    with ThreadPoolExecutor() as threads, pytest.raises(EngineError, match="ArithmeticError: a bug"):
        serve.serve_gateway(
            load_format(model, GatewayConfig()),
            GatewayConfig(port=0),
            lambda: NativeEngine(core),
            announce,
            admin_key="secret",
            context=CONTEXT,
        )
    assert statuses == [503]


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("num_chunks", [0, 3])
@pytest.mark.parametrize("failure", [EngineError("the engine failed"), ZeroDivisionError("sesame")])
def test_a_failed_engine_is_reported_and_its_tokens_are_free(
    num_chunks: int, is_streamed: bool, failure: Exception
) -> None:
    format = minimax()
    words = (
        str(failure)
        if isinstance(failure, EngineError)
        else "the gateway failed (ZeroDivisionError); retry the request"
    )

    async def run() -> None:
        engine = FailingEngine(format, Scene(format))
        engine.num_chunks, engine.failure = num_chunks, failure
        async with GatewayServer(engine, format, GatewayConfig(port=0), context=CONTEXT) as gateway:
            # Enough for one call: that the engine fails is not the agent's doing.
            episode, key = gateway.episodes.create(budget=Budget(max_calls=1, max_tokens=BODY["max_tokens"]))
            async with httpx2.AsyncClient(base_url=gateway.url, headers={"x-api-key": key}, verify=False) as client:
                response = await client.post("/v1/chat/completions", json=BODY | {"stream": is_streamed})
                if is_streamed and num_chunks:
                    assert response.status_code == 200
                    assert json.loads(response.text.split("data: ")[-1])["error"]["message"] == words
                else:
                    assert response.status_code == 503
                    assert response.json()["error"]["message"] == words
                # A client may go on from what it was shown; of the rest nothing stays.
                calls = episode.calls()
                assert [call.finish_reason for call in calls] == [FinishReason.ABORT] * bool(num_chunks and is_streamed)
                assert [call.response_ids.tolist() for call in calls] == [
                    ids[0][:3] for ids in engine.completions if calls
                ]
                assert (episode.num_sampled, episode.num_running) == (num_chunks * is_streamed, 0)
                engine.num_chunks = 1000
                again = await client.post("/v1/chat/completions", json=BODY, headers={"x-stainless-retry-count": "1"})
                assert again.status_code == 200, "nobody is told half an answer"
                assert len(engine.prompts) == 2
                more = await client.post("/v1/chat/completions", json=BODY | {"user": "another body"})
                assert more.status_code == 429, "the one call is spent"
                metrics = (await client.get("/metrics")).text
            assert 'm2forge_gateway_requests_total{dialect="chat",outcome="failed"} 1.0\n' in metrics

    asyncio.run(run())


class WrongEngine(WatchedEngine):
    """Samples what no engine may."""

    async def generate(self, prompt: Prompt) -> AsyncGenerator[Chunk, None]:
        async with contextlib.aclosing(super().generate(prompt)) as chunks:
            async for chunk in chunks:
                yield replace(chunk, logprobs=np.full(chunk.ids.size, np.nan, np.float32))


@pytest.mark.parametrize("is_streamed", [False, True])
def test_what_an_engine_does_wrong_is_not_the_clients_mistake(is_streamed: bool) -> None:
    format = minimax()

    async def run() -> None:
        engine = WrongEngine(format, Scene(format))
        async with GatewayServer(engine, format, GatewayConfig(port=0), context=CONTEXT) as gateway:
            episode, key = gateway.episodes.create()
            async with httpx2.AsyncClient(base_url=gateway.url, headers={"x-api-key": key}, verify=False) as client:
                body = BODY | {"stream": is_streamed, "logprobs": False}
                response = await client.post("/v1/chat/completions", json=body)
            assert response.status_code == (200 if is_streamed else 503)
            error = json.loads(response.text.split("data: ")[-1])["error"] if is_streamed else response.json()["error"]
            assert error["type"] == "server_error"
            assert "what the engine sampled cannot be recorded" in error["message"]
            assert (episode.num_calls, episode.num_running) == (0, 0)

    asyncio.run(run())


def test_a_gateway_that_cannot_start_says_so_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    format = minimax()

    async def run(failure: Exception | None) -> None:
        server = GatewayServer(WatchedEngine(format, Scene(format)), format, GatewayConfig(port=0), context=CONTEXT)

        async def startup(sockets: object = None) -> None:
            if failure is not None:
                raise failure
            server._server.should_exit = True

        monkeypatch.setattr(server._server, "startup", startup)
        async with server:
            raise AssertionError("it was said to have started")

    with pytest.raises(OSError, match="no more files"):
        asyncio.run(run(OSError("no more files")))
    with pytest.raises(ConfigError, match="exited before it accepted requests"):
        asyncio.run(run(None))


def test_an_answer_that_cannot_be_written_down_is_not_told(tmp_path: Path) -> None:
    with live(minimax(), [Message("assistant", "Hello", "t")], GatewayConfig(port=0, journal=str(tmp_path))) as gateway:
        episode, key = gateway.episode()
        path = tmp_path / f"{episode.id}.journal"
        path.rename(tmp_path / "away")
        response = post(gateway, key, BODY | {"stream": True, "max_tokens": 100})
        assert "cannot be written" in response.text
        assert '"finish_reason": "' not in response.text
        assert episode.num_calls == 0
        (tmp_path / "away").rename(path)
        assert post(gateway, key, BODY).status_code == 200
        assert episode.num_calls == 1


def test_a_call_that_takes_too_long_is_aborted_recorded_and_told() -> None:
    config = GatewayConfig(port=0, call_timeout_s=1.0)
    with live(minimax(), config=config, delay_s=0.02) as gateway:
        episode, key = gateway.episode()
        response = post(gateway, key, BODY | {"max_tokens": 2000}).json()
        assert response["choices"][0]["finish_reason"] == "length"
        (call,) = gateway.run(episode.calls)
        assert call.finish_reason is FinishReason.ABORT
        assert 0 < call.response_ids.size == response["usage"]["completion_tokens"]


def test_samples_over_the_limit_are_refused() -> None:
    with live(minimax(), config=GatewayConfig(port=0, max_samples=130)) as gateway:
        episode, key = gateway.episode()
        assert len(post(gateway, key, BODY | {"n": 130, "max_tokens": 1}).json()["choices"]) == 130
        response = post(gateway, key, BODY | {"n": 131}).json()["error"]
        assert (response["param"], response["message"]) == ("n", "n: expected at most 130, received 131")
        wrong = [{"role": "tool", "tool_call_id": "x", "content": "of no call"}]
        assert post(gateway, key, BODY | {"messages": wrong}).status_code == 400
        assert episode.num_running == 0


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_a_stop_text_is_found_however_the_text_is_cut(size: int) -> None:
    for text, stops, expected, found in (
        ("one two three", ["two"], "one ", "two"),
        ("aab", ["ab"], "a", "ab"),
        ("abcabd", ["abd", "bd"], "abc", "abd"),
        ("xyzzy", ["zz", "yz"], "x", "yz"),
        ("nothing", ["thing!"], "nothing", None),
        ("ß💥", ["💥"], "ß", "💥"),
    ):
        cutter, data = StopCutter(stops), text.encode()
        response = b"".join(cutter.cut(data[at : at + size]) for at in range(0, len(data), size)) + cutter.flush()
        assert (response.decode(), cutter.stop_text) == (expected, found)
