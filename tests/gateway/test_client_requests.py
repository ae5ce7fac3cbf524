"""Requests of the shapes that real clients send, with every field, block and item type of theirs and texts of our own.

Each file of `requests/` is one conversation: the path, the answers that the model gives (content, thinking, calls), and
the client's requests. In their strings `{call I J}` stands for the id of call J of answer I, and `{response I}` for the
id of that answer's response. A request without tools beside some with tools is a side call.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx2
import pytest

from m2forge.gateway.dialects.types import HEADER, Notice
from m2forge.text.message import Message, ToolCall
from tests.gateway.dialogue import minimax
from tests.gateway.live import Live, Scene, ToolScene, check_recorded, live, num_new_tokens

FOLDER = Path(__file__).parent / "requests"
NAMES = sorted(path.stem for path in FOLDER.iterdir())
NOTICES: dict[str, list[Notice]] = {
    "claude_code": [Notice.SYSTEM_TURN],
    "claude_code_deferred_tools": [Notice.IMAGE, Notice.SYSTEM_TURN],
    "codex": [Notice.VENDOR_TOOL],
    "codex_custom_tools": [Notice.VENDOR_TOOL, Notice.TEXT_VERBOSITY, Notice.RESPONSES_EFFORT],
    "instructor_native": [Notice.RESPONSE_FORMAT],
    "instructor_tool": [Notice.TOOL_CHOICE],
    "langchain_chat_native": [Notice.RESPONSE_FORMAT],
    "langchain_chat_tool": [Notice.TOOL_CHOICE],
    "langchain_messages_native": [Notice.OUTPUT_FORMAT],
    "langchain_responses_native": [Notice.TEXT_FORMAT],
    "langgraph_chat": [Notice.PARALLEL_TOOL_CALLS],
    "openhands": [Notice.REASONING_EFFORT],
    "pydantic_ai_chat_native": [Notice.RESPONSE_FORMAT],
    "pydantic_ai_chat_tool": [Notice.TOOL_CHOICE],
    "pydantic_ai_responses_native": [Notice.TEXT_FORMAT],
}
"""Notices of a conversation's last request; of the others there are none."""


def read(name: str) -> tuple[str, list[Message], list[Any]]:
    data = json.loads((FOLDER / f"{name}.json").read_text())
    answers = [
        Message("assistant", content, thinking, tuple(ToolCall(*call) for call in calls))
        for content, thinking, calls in data["answers"]
    ]
    return data["path"], answers, data["requests"]


def fill(text: str, names: Mapping[str, str]) -> str:
    return re.sub(r"\{(?:call|response) [0-9 ]+\}", lambda found: names[found.group()], text)


def send(gateway: Live, key: str, path: str, requests: list[Any], *, is_side: list[bool]) -> list[httpx2.Response]:
    """Send the requests one after the other, with the ids of what was answered before."""
    responses: list[httpx2.Response] = []
    names: dict[str, str] = {}
    headers = {"authorization": f"Bearer {key}", "anthropic-version": "2023-06-01"}
    with httpx2.Client(base_url=gateway.url, headers=headers, timeout=20) as client:
        for request, is_one in zip(requests, is_side, strict=True):
            text = fill(json.dumps(request), names)
            responses.append(client.post(path, content=text, headers={"content-type": "application/json"}))
            assert responses[-1].status_code == 200, responses[-1].text
            if not is_one:
                completion = gateway.run(lambda: gateway.episodes.find(key).completions[-1])  # type: ignore[union-attr]
                index = len([name for name in names if name.startswith("{response")])
                names[f"{{response {index}}}"] = responses[-1].headers["x-request-id"]
                names |= {f"{{call {index} {number}}}": call.id for number, call in enumerate(completion.tool_calls)}
    return responses


@pytest.mark.parametrize("name", NAMES)
def test_a_clients_conversation_is_one_chain(name: str) -> None:
    path, answers, requests = read(name)
    has_tools = any("tools" in request for request in requests)
    is_side = [has_tools and "tools" not in request for request in requests]
    with live(minimax(), answers, tools=(), scene=ToolScene if any(is_side) else Scene) as gateway:
        episode, key = gateway.episode()
        responses = send(gateway, key, path, requests, is_side=is_side)
        check_recorded(gateway, episode)
        seen = gateway.engine.seen()
        main = [pair for pair, is_one in zip(seen, is_side, strict=True) if not is_one]
        num_side = sum(len(prompt) for (prompt, _), is_one in zip(seen, is_side, strict=True) if is_one)
        assert gateway.counts.num_encoded == num_new_tokens(minimax(), main) + num_side
        assert sum(episode.num_divergences.values()) == sum(is_side)
        notices = gateway.run(episode.calls)[-1].notices
        assert list(notices) == NOTICES.get(name, [])
        assert responses[-1].headers.get(HEADER, "") == "; ".join(notices)


def test_every_conversation_says_what_it_does_not_get() -> None:
    assert NOTICES.keys() <= set(NAMES)
