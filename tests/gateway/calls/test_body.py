"""Large bodies: read in another process to the same requests and refusals, while others are served."""

import asyncio
import json
import random
import threading
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest

from m2forge.errors import EngineError, M2ForgeError
from m2forge.gateway.calls import body as body_module
from m2forge.gateway.calls import calls
from m2forge.gateway.calls.body import (
    Bodies,
    Items,
    LoopShare,
    PromptSizes,
    Read,
    Setup,
    check_text,
    is_large,
    read_body,
)
from m2forge.gateway.config import GatewayConfig
from m2forge.gateway.dialects.types import BadRequestError
from m2forge.gateway.http.limits import HTTPError
from m2forge.text.format import ChatFormat
from m2forge.text.tokenizer import Tokenizer, UnencodedError, pre_encoded
from tests.gateway.dialogue import chatml, minimax
from tests.gateway.episodes.test_retry_http import BODY, post
from tests.gateway.fuzz_bodies import BODIES, long_bodies
from tests.gateway.live import CONTEXT, live
from tests.gateway.test_security import mutated


def make_setup(format: ChatFormat, max_items: int = 4096) -> Setup:
    return Setup(PromptSizes.of(format, CONTEXT, max_items), 100, 64 << 20)


def read_here(setup: Setup, path: str, body: bytes) -> Read:
    read = read_body(setup, path, body)
    if setup.sizes.needs_count(read.request, len(body)):
        check_text(setup, path, read.request)
    return read


def error_fields(error: M2ForgeError) -> tuple[object, ...]:
    status = error.status if isinstance(error, HTTPError) else None
    return type(error), str(error), status, error.field if isinstance(error, BadRequestError) else None


def test_a_body_is_large_by_its_bytes_or_its_json_values() -> None:
    rng = random.Random(3)
    for _ in range(200):
        size = rng.choice((10, body_module.SMALL_VALUES, 60_000, body_module.SMALL_BYTES, body_module.SMALL_BYTES + 1))
        share = rng.random() * 2 * body_module.SMALL_VALUES / size
        # A part is drawn and repeated: to draw every byte takes seconds.
        weights = (share, share / 2, share / 2, share, 4 * max(1 - share, 0.1))
        part = bytes(rng.choices(b",[{:a", weights=weights, k=min(size, 5000)))
        body = (part * (size // len(part) + 1))[:size]
        num_signs = sum(map(body.count, (b",", b"[", b"{", b":")))
        assert is_large(body) == (size > body_module.SMALL_BYTES or num_signs > body_module.SMALL_VALUES)


@pytest.mark.slow
def test_a_worker_reads_what_the_gateway_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_module, "SMALL_BYTES", -1)
    rng, setup = random.Random(5), make_setup(minimax())
    sent = [(path, json.dumps(body).encode()) for path, bodies in BODIES.items() for body in bodies]
    sent += [(path, json.dumps(mutated(json.loads(body), rng)).encode()) for path, body in sent * 3]
    sent += [(path, json.dumps(body).encode()) for path, body in long_bodies(300_000).items()]
    sent += [(path, body) for path, _ in sent[:2] for body in (b"", b"[" * 99_999, b"{}", b"\xff", b'{"a": 1e999}')]

    async def compare() -> int:
        bodies, num_read = Bodies(setup, 2, LoopShare()), 0
        for path, body in sent:
            try:
                here: object = read_here(setup, path, body)
            except M2ForgeError as error:
                here = error_fields(error)
            try:
                apart: object = await bodies.read(path, body, asyncio.Lock())
            except M2ForgeError as error:
                apart = error_fields(error)
            assert apart == here
            num_read += isinstance(apart, Read)
        await bodies.close()
        return num_read

    assert 5 < asyncio.run(compare()) < len(sent) - 5


@pytest.mark.parametrize("make", [minimax, chatml])
def test_texts_that_are_pre_encoded_become_the_same_prompts(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts: list[list[list[int]]] = []
    num_ahead: list[int] = []
    for most_chars in (1 << 30, 20):
        monkeypatch.setattr(calls, "MAX_CHARS", most_chars)
        threads: set[str] = set()
        encode = Tokenizer.encode_batch

        def note(self: Tokenizer, texts: Any, encode: Any = encode, threads: set[str] = threads) -> Any:
            threads.add(threading.current_thread().name.partition("_")[0])
            return encode(self, texts)

        with monkeypatch.context() as patch, live(make()) as gateway:
            patch.setattr(Tokenizer, "encode_batch", note)
            _, key = gateway.episode()
            messages: list[dict[str, Any]] = [{"role": "system", "content": "Many words, and more of them."}]
            for turn in range(3):
                messages.append({"role": "user", "content": f"Turn {turn} has a text that is not very short."})
                answer = post(gateway, key, BODY | {"messages": messages, "max_tokens": 5, "seed": turn})
                messages.append({"role": "assistant", "content": answer.json()["choices"][0]["message"]["content"]})
            messages[1]["content"] = "This was edited, so that all that follows is rendered again."
            post(gateway, key, BODY | {"messages": messages[:-1], "max_tokens": 5, "seed": 9})
            prompt = {"model": "m", "prompt": "A raw prompt of a few words, long enough.", "max_tokens": 2}
            assert post(gateway, key, prompt, "/v1/completions").status_code == 200
            prompts.append([sent.ids.tolist() for sent in gateway.engine.prompts])
        num_ahead.append("encode" in threads)
    assert num_ahead == [False, True]
    assert prompts[0] == prompts[1]
    assert len(prompts[0]) == 5


def test_encoding_ahead_changes_no_ids() -> None:
    tokenizer = minimax().tokenizer
    texts = ["", "some words", "some words", "others, and many of them"]
    plain = tokenizer.encode_batch(texts)
    with pre_encoded({"some words": plain[1]}, 30):
        assert tokenizer.encode_batch(texts) == plain
    with pre_encoded({}, 30), pytest.raises(UnencodedError) as caught:
        tokenizer.encode_batch(texts)
    assert caught.value.texts == ["", "some words", "others, and many of them"]
    assert tokenizer.encode_batch(texts) == plain


def test_a_retry_waits_while_the_first_prompt_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    with live(minimax()) as gateway:
        episode, key = gateway.episode()
        encode, is_encoding, goes_on = Tokenizer.encode_batch, threading.Event(), threading.Event()

        def wait(self: Tokenizer, texts: Any) -> Any:
            if threading.current_thread().name.startswith("encode"):
                is_encoding.set()
                goes_on.wait(60)
            return encode(self, texts)

        monkeypatch.setattr(Tokenizer, "encode_batch", wait)
        monkeypatch.setattr(calls, "MAX_CHARS", 50)
        sent = BODY | {"messages": [{"role": "user", "content": "some words " * 20}], "max_tokens": 4}
        answers: list[httpx2.Response] = []
        clients = [
            threading.Thread(target=lambda: answers.append(post(gateway, key, sent))),
            threading.Thread(target=lambda: answers.append(post(gateway, key, sent, x_stainless_retry_count="1"))),
        ]
        clients[0].start()
        assert is_encoding.wait(60)
        clients[1].start()
        time.sleep(0.1)
        with httpx2.Client(base_url=gateway.url) as other:
            assert other.get("/health").status_code == 200  # the retry does not spin
        goes_on.set()
        for client in clients:
            client.join(60)
        assert [answer.status_code for answer in answers] == [200, 200]
        assert len({answer.json()["id"] for answer in answers}) == 1
        assert episode.num_calls == 1


def test_too_many_items_are_refused_with_what_to_do() -> None:
    with live(minimax(), config=GatewayConfig(port=0, max_items=50)) as gateway:
        _, key = gateway.episode()
        user = {"role": "user", "content": "a"}
        tools = [{"type": "function", "function": {"name": f"f{number}"}} for number in range(51)]
        answers = [post(gateway, key, BODY | {"messages": [user] * number, "max_tokens": 2}) for number in (50, 51)]
        answers.append(post(gateway, key, BODY | {"messages": [user], "tools": tools}))
        assert [answer.status_code for answer in answers] == [200, 400, 400]
        assert "gateway.max_items" in answers[1].json()["error"]["message"]


@pytest.mark.slow
def test_others_are_served_while_a_key_sends_many_tiny_messages() -> None:
    """Each of these held the event loop for seconds."""
    one = '{"role":"%s","content":"a"}'
    lists = [",".join([one % role] * 90_000) for role in ("user", "system")]
    call = '{"id":"c%d","type":"function","function":{"name":"f","arguments":"{}"}}'
    made = ",".join(call % number for number in range(15_000))
    result = '{"role":"tool","tool_call_id":"c%d","content":""}'
    results = ",".join(result % number for number in range(15_000))
    lists.append(f'{one % "user"},{{"role":"assistant","content":"","tool_calls":[{made}]}},{results}')
    with live(minimax()) as gateway, httpx2.Client(base_url=gateway.url) as other:
        _, key = gateway.episode()

        def attack(statuses: list[int]) -> None:
            with httpx2.Client(base_url=gateway.url, headers={"x-api-key": key}, timeout=60) as client:
                for items in lists:
                    answer = client.post("/v1/chat/completions", content=f'{{"model":"m","messages":[{items}]}}')
                    statuses.append(answer.status_code)

        def longest_wait_s() -> float:
            statuses: list[int] = []
            attacker = threading.Thread(target=attack, args=(statuses,))
            attacker.start()
            waits_s = [0.0]
            while attacker.is_alive():
                start_s = time.monotonic()
                assert other.get("/health").status_code == 200
                waits_s.append(time.monotonic() - start_s)
                time.sleep(0.005)
            assert statuses == [400] * 3
            return max(waits_s)

        # Other processes may hold the processor once; work on the event loop would hold it every time.
        assert any(longest_wait_s() < 1.0 for _ in range(3))


# -- workers -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_dead_worker_is_replaced_and_its_request_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("M2FORGE_GATEWAY_ADMIN_KEY", "secret-key")
    setup, large = make_setup(minimax()), json.dumps(BODY | {"user": "x" * 300_000}).encode()
    assert is_large(large)

    async def use() -> None:
        bodies, lock = Bodies(setup, 1, LoopShare()), asyncio.Lock()
        path = "/v1/chat/completions"
        first = await bodies.read(path, large, lock)
        (worker,) = bodies._idle
        assert worker is not None
        environment = Path(f"/proc/{worker._process.pid}/environ").read_bytes()
        assert b"secret-key" not in environment
        worker._process.kill()
        with pytest.raises(EngineError, match="retry the request"):
            await bodies.read(path, large, lock)
        assert await bodies.read(path, large, lock) == first
        monkeypatch.setattr(body_module, "WORKER_S", 0.0)
        with pytest.raises(EngineError, match="longer than 0 s"):
            await bodies.read(path, large, lock)
        await bodies.close()

    asyncio.run(use())


def test_an_episode_has_one_large_body_in_a_worker_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    large = json.dumps(BODY | {"user": "x" * 300_000}).encode()
    num_reading = [0, 0]

    async def read_apart(self: Bodies, path: str, body: bytes, items: Items) -> Read:
        num_reading[0] += 1
        num_reading[1] = max(num_reading)
        await asyncio.sleep(0.01)
        num_reading[0] -= 1
        return read_body(setup, path, body)

    setup, path = make_setup(minimax()), "/v1/chat/completions"
    monkeypatch.setattr(Bodies, "_read_apart", read_apart)

    async def use(*turns: asyncio.Lock) -> int:
        num_reading[1] = 0
        bodies = Bodies(setup, 4, LoopShare())
        await asyncio.gather(*(bodies.read(path, large, turn) for turn in turns))
        return num_reading[1]

    async def both() -> tuple[int, int]:
        one, other = asyncio.Lock(), asyncio.Lock()
        return await use(one, one, one), await use(one, one, other)

    assert asyncio.run(both()) == (1, 2)


@pytest.mark.slow
def test_a_body_that_would_take_too_much_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # The worker has a low priority: beside busy processes it needs longer than the gateway would wait.
    monkeypatch.setattr("m2forge.gateway.calls.body.WORKER_S", 600.0)
    setup = make_setup(minimax())
    bomb = b'{"model": "m", "messages": [' + b"{}," * (15 << 20) + b"0]}"

    async def use() -> None:
        bodies = Bodies(setup, 1, LoopShare())
        with pytest.raises(HTTPError, match="memory") as caught:
            await bodies.read("/v1/chat/completions", bomb, asyncio.Lock())
        assert caught.value.status == 413
        await bodies.close()

    asyncio.run(use())
