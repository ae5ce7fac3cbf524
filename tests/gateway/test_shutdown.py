"""How a gateway ends: told to, it finishes or records what is in flight; killed, it has on disk what clients were told;
started again, episodes go on."""

import asyncio
import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from m2forge.gateway.config import GatewayConfig
from m2forge.gateway.episodes.journal import Answered, read_entries
from m2forge.gateway.episodes.registry import Episodes
from m2forge.gateway.server import GatewayServer
from m2forge.records import FinishReason
from m2forge.rollout.backends.remote import RemoteEngine
from m2forge.text.message import Message
from tests.forked import forked_context, start
from tests.gateway.dialogue import minimax
from tests.gateway.gateway_process import run as run_gateway
from tests.gateway.live import ADMIN_KEY, CONTEXT, Scene, WatchedEngine

ADMIN = {"Authorization": f"Bearer {ADMIN_KEY}"}


class Process:
    def __init__(self, journal: Path, delay_s: float, shutdown_s: float) -> None:
        self.output, theirs = forked_context().Pipe(duplex=False)
        self.process = start(run_gateway, theirs, journal, delay_s, shutdown_s)
        theirs.close()
        self.url = self.output.recv()
        assert self.url.startswith("http://127.0.0.1:")

    def send_signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def wait(self) -> int | None:
        self.process.join(60)
        return self.process.exitcode

    def end(self, number: signal.Signals) -> int | None:
        self.send_signal(number)
        return self.wait()


@contextlib.contextmanager
def process(journal: Path, delay_s: float = 0.0, shutdown_s: float = 0.3) -> Iterator[Process]:
    started = Process(journal, delay_s, shutdown_s)
    try:
        yield started
    finally:
        started.process.kill()
        started.process.join(10)
        started.output.close()


def ask(url: str, key: str, messages: list[Any], **options: Any) -> Iterator[str]:
    """The events of a streamed answer, as long as they come."""
    body = {"model": "m", "messages": messages, "max_tokens": 12, "stream": True} | options
    headers = {"x-api-key": key}
    with (
        contextlib.suppress(httpx2.TransportError),
        httpx2.stream(
            "POST", f"{url}/v1/chat/completions", json=body, headers=headers, timeout=60, verify=False
        ) as response,
    ):
        for line in response.iter_lines():
            if line.startswith("data: "):
                yield line.removeprefix("data: ")


def text_of(events: list[str]) -> str:
    chunks = [json.loads(event) for event in events if event != "[DONE]"]
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


def test_responses_survive_a_kill_and_episodes_go_on(tmp_path: Path) -> None:
    finished: dict[str, str] = {}
    """Key of the episode by the id of an answer whose end was received."""
    with process(tmp_path, delay_s=0.0005) as gateway:
        made = [httpx2.post(f"{gateway.url}/episodes", headers=ADMIN, json={}).json() for _ in range(4)]

        def load(key: str) -> None:
            number = 0
            while gateway.process.is_alive():
                events = list(ask(gateway.url, key, [{"role": "user", "content": f"Say {number}"}], seed=number))
                if any('"finish_reason": "' in event for event in events):
                    finished[json.loads(events[0])["id"]] = key
                number += 1

        threads = [threading.Thread(target=load, args=(episode["key"],)) for episode in made]
        for thread in threads:
            thread.start()
        deadline_s = time.monotonic() + 60
        while len(finished) < 40 and time.monotonic() < deadline_s:
            time.sleep(0.01)
        gateway.end(signal.SIGKILL)
        for thread in threads:
            thread.join(60)
    assert len(finished) >= 40
    kept = {
        entry.id
        for episode in made
        for entry in read_entries(tmp_path / f"{episode['id']}.journal")[0]
        if isinstance(entry, Answered)
    }
    assert finished.keys() <= kept
    with process(tmp_path) as gateway:
        for episode in made:
            before = httpx2.get(f"{gateway.url}/episodes/{episode['id']}", headers=ADMIN).json()["num_calls"]
            messages: list[Any] = [{"role": "user", "content": "Say 0"}]
            events = list(ask(gateway.url, episode["key"], messages, seed=0))  # told before, so told again
            messages += [{"role": "assistant", "content": text_of(events)}, {"role": "user", "content": "On"}]
            assert list(ask(gateway.url, episode["key"], messages))[-1] == "[DONE]"
            shown = httpx2.get(f"{gateway.url}/episodes/{episode['id']}", headers=ADMIN).json()
            assert shown["num_calls"] == before + 1
            assert not shown["divergences"].get("edited_text")
        assert gateway.end(signal.SIGTERM) == 0
    again = Episodes(minimax(), folder=tmp_path)
    assert len(again) == 4


@pytest.mark.parametrize(("num_tokens", "is_finished"), [(15, True), (1500, False)])
def test_a_gateway_that_is_told_to_stop_finishes_or_records(tmp_path: Path, num_tokens: int, is_finished: bool) -> None:
    with process(tmp_path, delay_s=0.01, shutdown_s=60 if is_finished else 0.3) as gateway:
        made = httpx2.post(f"{gateway.url}/episodes", headers=ADMIN, json={}).json()
        events = ask(gateway.url, made["key"], [{"role": "user", "content": "x"}], max_tokens=num_tokens, seed=2)
        read = [next(events), next(events)]
        gateway.send_signal(signal.SIGTERM)
        read += list(events)
        assert (read[-1] == "[DONE]") == is_finished
        if not is_finished:
            assert "stopping" in json.loads(read[-1])["error"]["message"]
        assert gateway.wait() == 0
        assert gateway.output.recv() == "stopped"
    (episode,) = Episodes(minimax(), folder=tmp_path)
    (call,) = episode.calls()
    assert call.response_ids.size > 0
    assert (call.finish_reason is not FinishReason.ABORT) == is_finished


def test_in_process_the_loop_creates_episodes_and_reads_trees() -> None:
    format = minimax()

    async def run() -> None:
        engine = WatchedEngine(format, Scene(format, [Message("assistant", "Hello", "t")]))
        async with GatewayServer(engine, format, GatewayConfig(port=0), context=CONTEXT) as gateway:
            episode, key = gateway.episodes.create("task", group="g")
            body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 100}
            async with httpx2.AsyncClient(base_url=gateway.url, headers={"x-api-key": key}) as client:
                response = await client.post("/v1/chat/completions", json=body)
                refused = await client.post("/episodes", json={})
            assert response.json()["choices"][0]["message"]["content"] == "Hello"
            assert refused.status_code == 403  # there is no admin key
            assert [call.response_ids.tolist() for call in episode.calls()] == engine.completions[0]
        # The engine is the caller's.
        assert (await engine.state()).num_running == 0

    asyncio.run(run())


def test_a_health_check_that_waits_does_not_delay_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's server is starting: it accepts connections and does not respond yet."""
    monkeypatch.setattr("m2forge.gateway.server.GRACE_S", 60)  # what a health check that waits would delay it by

    async def run() -> None:
        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            accepted.set()
            await reader.read()
            writer.close()

        accepted, format = asyncio.Event(), minimax()
        silent = await asyncio.start_server(accept, "127.0.0.1", 0)
        engine = RemoteEngine(f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}")
        async with silent, httpx2.AsyncClient(verify=False, timeout=60) as client:
            async with GatewayServer(engine, format, GatewayConfig(port=0), context=CONTEXT) as gateway:
                checking = asyncio.create_task(client.get(f"{gateway.url}/health"))
                await accepted.wait()
                started_s = time.monotonic()
            assert time.monotonic() - started_s < 20
            response = await checking
            assert (response.status_code, "is stopping" in response.text) == (503, True)
            await engine.close()

    asyncio.run(run())
