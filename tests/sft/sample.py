"""Conversations, files and a chat format that the tests of this room share."""

import json
import zlib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from hypothesis import strategies as st

from m2forge.records import JsonValue
from m2forge.sft.synthetic import generate
from m2forge.sft.trajectory import Trajectory
from m2forge.text.format import MINIMAX_M2_SPECIALS, ChatFormat, make_format
from m2forge.text.message import Message, Tool, ToolCall
from m2forge.text.tokenizer import train_tokenizer

ADD = Tool("add", "Add.", {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}})

GOOD: dict[str, JsonValue] = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1 + 2?"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "Add them.",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":1,"b":2}'}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
        {"role": "assistant", "content": "3", "reasoning_content": "It says 3."},
    ],
    "tools": [{"type": "function", "function": {"name": "add", "parameters": ADD.parameters}}],
}


@cache
def chat_format() -> ChatFormat:
    """The M2 format over a tokenizer trained on a few made-up conversations."""
    texts = [json.dumps(item) for item in generate(200, seed=0, split="train")]
    return make_format("minimax_m2", train_tokenizer(texts, vocab_size=600, specials=MINIMAX_M2_SPECIALS))


def write_lines(path: Path, items: Sequence[Mapping[str, JsonValue] | str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{item if isinstance(item, str) else json.dumps(item)}\n" for item in items))
    return path


def noise(num_bytes: int) -> str:
    """Text that does not compress to almost nothing."""
    return "".join(f"{zlib.crc32(str(n).encode()):08x}" for n in range(num_bytes // 8))


_TEXT = st.text(st.sampled_from("abc xyz\n<>äß🙂0123"), max_size=12)


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    """A system prompt or none, then rounds of a request, calls with results, and an answer."""
    messages = [Message("system", draw(_TEXT))] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 4))):
        messages.append(Message("user", draw(_TEXT)))
        for _ in range(draw(st.integers(0, 2))):
            calls = [
                ToolCall("add", {"a": draw(st.integers(0, 99)), "b": 1}, f"c{n}")
                for n in range(draw(st.integers(1, 2)))
            ]
            messages.append(Message("assistant", draw(_TEXT), thinking=draw(_TEXT), tool_calls=tuple(calls)))
            messages += [Message("tool", draw(_TEXT), tool_call_id=call.id) for call in calls]
        messages.append(Message("assistant", draw(_TEXT), thinking=draw(_TEXT)))
    messages = messages[: draw(st.integers(1, len(messages)))]
    trained = draw(st.lists(st.booleans(), min_size=len(messages), max_size=len(messages)))
    return Trajectory(tuple(messages), (ADD,), tuple(trained), "drawn:1")
