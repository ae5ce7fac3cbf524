"""What is asked and answered: conversations of several turns as requests of HTTP, and the engine's answer to each.

The answer is the same for every request: an end of thinking, words of one token each, the end marker; a chunk for each.
So the history that a client sends back is known beforehand, and the load generator reads nothing.
"""

import http.client
import json
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import repeat
from pathlib import Path

from m2forge.records import JsonValue
from m2forge.text.format import MINIMAX_M2_SPECIALS, make_format
from m2forge.text.parser import THINK_CLOSE
from m2forge.text.tokenizer import Tokenizer, train_tokenizer

NUM_CHUNKS, NUM_TURNS = 32, 8
ADMIN_KEY = "benchmark"
MODEL = "policy"
_SYSTEM = "You are an agent that works in a terminal. Think before you act, say what you do, and stop when it is done. "
_ASKED = "Here is what the command printed: line one, line two, line three. Go on with the next step of the task. "
_WORDS = """ alpha bravo charlie delta echo foxtrot golf hotel india juliett kilo lima mike november oscar papa quebec
 romeo sierra tango uniform victor whiskey xray yankee zulu amber beige coral denim"""
_HEADERS = """accept: text/event-stream
content-type: application/json
user-agent: OpenAI/Python 2.8.0
x-stainless-lang: python
x-stainless-package-version: 2.8.0
x-stainless-os: Linux
x-stainless-arch: arm64
x-stainless-runtime: CPython
x-stainless-runtime-version: 3.11.7
x-stainless-async: async:asyncio
x-stainless-retry-count: 0
x-stainless-read-timeout: 600"""

WORDS = [f" {word}" for line in _WORDS.splitlines() for word in line.split()]
ANSWER = "".join(WORDS)
assert len(WORDS) == NUM_CHUNKS - 2


def make_tokenizer(folder: Path) -> Tokenizer:
    """One that has a token for each word, saved where a gateway finds it."""
    texts = [_SYSTEM, _ASKED, *(ANSWER for _ in range(8)), *(word * 4 for word in WORDS for _ in range(8))]
    tokenizer = train_tokenizer(texts, 2048, MINIMAX_M2_SPECIALS)
    if any(len(tokenizer.encode(word)) != 1 for word in WORDS):
        raise AssertionError("a word of the answer is more than one token")
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(folder)
    return tokenizer


def make_answers(tokenizer: Tokenizer) -> dict[str, list[str]]:
    """The chunks of an answer by path: token ids, and text."""
    stop_id = make_format("minimax_m2", tokenizer).stop_ids[0]
    ids = [tokenizer.special(THINK_CLOSE), *(tokenizer.encode(word)[0] for word in WORDS), stop_id]
    lines = []
    for place, id in enumerate(ids):
        figures: dict[str, JsonValue] = {"logprobs": [-0.25 * place], "raw_logprobs": [-0.25 * place]}
        line = {"sample": 0, "ids": [id], **figures, "versions": [3], "num_cached": 0}
        lines.append(json.dumps(line | ({"finish_reason": "stop"} if id == stop_id else {})) + "\n")
    deltas: list[dict[str, JsonValue]] = [{"role": "assistant", "content": ""}]
    deltas += [{"content": word} for word in WORDS]
    same = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1700000000, "model": MODEL}
    events = [
        f"data: {json.dumps(same | {'choices': [{'index': 0, 'delta': delta, 'finish_reason': reason}]})}\n\n"
        for delta, reason in [*((delta, None) for delta in deltas), ({}, "stop")]
    ]
    events[-1] += "data: [DONE]\n\n"
    assert len(lines) == len(events) == NUM_CHUNKS
    return {"/generate": lines, "/v1/chat/completions": events}


def messages_of(num_turns: int) -> list[JsonValue]:
    """What a client sends at its turn of that number, from 1 on."""
    messages: list[JsonValue] = [{"role": "system", "content": _SYSTEM * 3}]
    for turn in range(num_turns):
        messages.append({"role": "user", "content": f"Step {turn}. {_ASKED}"})
        messages.append({"role": "assistant", "content": ANSWER})
    return messages[:-1]


def body_of(num_turns: int) -> bytes:
    body = {"model": MODEL, "messages": messages_of(num_turns), "stream": True, "max_tokens": 4 * NUM_CHUNKS}
    return json.dumps(body).encode()


def request_of(body: bytes, key: str, path: str = "/v1/chat/completions") -> bytes:
    """As the openai SDK sends it."""
    lines = [f"POST {path} HTTP/1.1", "host: 127.0.0.1", *_HEADERS.splitlines(), f"authorization: Bearer {key}"]
    return "\r\n".join([*lines, f"content-length: {len(body)}", "", ""]).encode() + body


_BODIES = [body_of(turn) for turn in range(1, NUM_TURNS + 1)]


def conversations(keys: "deque[str]", path: str = "/v1/chat/completions") -> Iterator[bytes]:
    """The requests of one client: a conversation with each key that it gets hold of, turn after turn."""
    while keys:
        key = keys.popleft()
        for body in _BODIES:
            yield request_of(body, key, path)


def administer(port: int, paths: Iterable[str]) -> list[dict[str, JsonValue]]:
    """The admin's requests to our gateway, one after another."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    told = []
    for path in paths:
        connection.request("POST", path, "{}", {"authorization": f"Bearer {ADMIN_KEY}"})
        answer = connection.getresponse()
        text = answer.read()
        if answer.status >= 300:
            raise SystemExit(f"{path}: {answer.status} {text[:300]!r}")
        told.append(json.loads(text))
    connection.close()
    return told


def make_episodes(port: int, number: int) -> "tuple[list[str], deque[str]]":
    """Ids and keys of episodes of our gateway."""
    made = administer(port, repeat("/episodes", number))
    return [str(episode["id"]) for episode in made], deque(str(episode["key"]) for episode in made)
