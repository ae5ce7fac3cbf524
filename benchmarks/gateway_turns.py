"""One long conversation: what its turns cost besides reading, hashing and parsing their bodies, and what is tokenised.

The gateway's application runs in this process, with an engine behind HTTP and journals on disk, and is asked turn by
turn as a client would that sends all of its history each time. Time is the processor's, so that waiting for the engine
counts for nothing.
"""

import asyncio
import os
import statistics
import time
from collections import defaultdict
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

from gateway_work import body_of, messages_of

from m2forge.gateway.calls.body import digest_of
from m2forge.gateway.config import GatewayConfig
from m2forge.gateway.dialects.openai.chat import OpenAIChat
from m2forge.gateway.http.limits import parse_body
from m2forge.gateway.server import GatewayServer, spare_collector
from m2forge.rollout.backends.remote import RemoteEngine
from m2forge.text.format import ChatFormat
from m2forge.text.message import message_from_openai

EARLY, LATE = 2, 200
NEIGHBOURS = 3
"""Turns on either side that stand for one, so that a hiccup is none's."""
_HEAD_PATH = "/v1/chat/completions"


class Turns:
    """Seconds of each turn, in every conversation; and turns that tokenised anything but their new message."""

    def __init__(self) -> None:
        self.parse_s: dict[int, list[float]] = defaultdict(list)
        self.beyond_s: dict[int, list[float]] = defaultdict(list)
        self.num_wrong = 0
        self.num_prompt: dict[int, int] = {}

    def median_s(self, times: dict[int, list[float]], turn: int) -> float:
        """Over conversations, and the turns around it."""
        near = range(max(turn - NEIGHBOURS, EARLY), turn + NEIGHBOURS + 1)
        return statistics.median(value for place in near for value in times.get(place, ()))

    @property
    def ratio(self) -> float:
        return self.median_s(self.beyond_s, LATE) / self.median_s(self.beyond_s, EARLY)


async def measure_turns(format: ChatFormat, url: str, journal: Path, num_conversations: int) -> Turns:
    # As the gateway's own process does.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    spare_collector()
    engine, turns = RemoteEngine(url), Turns()
    bodies = {turn: body_of(turn) for turn in range(1, LATE + NEIGHBOURS + 1)}
    new = {turn: _num_new(format, turn) for turn in bodies if turn > 1}
    config = GatewayConfig(port=0, journal=str(journal))
    async with GatewayServer(engine, format, config, context=1_000_000) as gateway:
        counts = gateway.app.counts
        for _ in range(num_conversations):
            _, key = gateway.episodes.create("long")
            for turn, body in bodies.items():
                before = counts.num_encoded
                turns.num_prompt[turn] = -counts.num_prompt
                start_s = time.process_time()
                digest_of(_HEAD_PATH, body)
                OpenAIChat().read(parse_body(body, config.max_depth))
                parsed_s = time.process_time()
                await _ask(gateway, key, body)
                ended_s = time.process_time()
                parse_s = parsed_s - start_s
                turns.parse_s[turn].append(parse_s)
                turns.beyond_s[turn].append(ended_s - parsed_s - parse_s)
                turns.num_prompt[turn] += counts.num_prompt
                turns.num_wrong += turn > 1 and counts.num_encoded - before != new[turn]
    await engine.close()
    return turns


def _num_new(format: ChatFormat, turn: int) -> int:
    """Tokens of the turn's own message, and of the prompt for an answer."""
    messages = [message_from_openai(message) for message in messages_of(turn)]  # type: ignore[arg-type]  # objects all
    return len(format.extend(messages[:-1], messages[-1:], generation=True).ids)


async def _ask(gateway: GatewayServer, key: str, body: bytes) -> None:
    """One request, without a socket on the client's side."""
    scope: MutableMapping[str, Any] = {
        "type": "http",
        "method": "POST",
        "path": _HEAD_PATH,
        "raw_path": _HEAD_PATH.encode(),
        "query_string": b"",
        "headers": [(b"x-api-key", key.encode()), (b"content-length", b"%d" % len(body))],
    }
    messages = [{"type": "http.request", "body": body, "more_body": False}]
    statuses: list[int] = []
    gone = asyncio.Event()

    async def receive() -> MutableMapping[str, Any]:
        if not messages:
            await gone.wait()
        return messages.pop() if messages else {"type": "http.disconnect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    await gateway.app(scope, receive, send)
    if statuses != [200]:
        raise SystemExit(f"a turn was answered {statuses}")
