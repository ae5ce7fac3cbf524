"""What an agent did to its conversations, in order: enough to rebuild the messages of each call that it made.

    opened      a conversation, main or a sub-agent's, with its tools
    appended    messages that the loop put at its end: the task, results, what it told the model
    called      the policy was asked, about the conversation and perhaps more messages after it; its answer was kept or
                was for an operation
    applied     an operation changed the conversation: its name, parameters and inputs

A line of JSON for each. Messages and tools are in OpenAI's form.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from m2forge.errors import DataError, FormatError
from m2forge.records import JsonValue
from m2forge.text.message import Message, Tool, message_from_openai, message_to_openai, tool_from_openai, tool_to_openai

MAIN = "main"


@dataclass(frozen=True, slots=True)
class Opened:
    context: str
    """Name of the conversation: main, main.0 for its first sub-agent's, …"""
    tools: tuple[Tool, ...]


@dataclass(frozen=True, slots=True)
class Appended:
    context: str
    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Called:
    context: str
    id: str
    """Of the answer, as the server knows it."""
    answer: Message
    suffix: tuple[Message, ...] = ()
    """Messages after the conversation that were asked about and not kept."""
    is_kept: bool = True
    """Whether the answer became part of the conversation."""


@dataclass(frozen=True, slots=True)
class Applied:
    context: str
    operation: str
    parameters: Mapping[str, JsonValue]
    inputs: Mapping[str, JsonValue]


LogEntry: TypeAlias = Opened | Appended | Called | Applied


def write_log(entries: Iterable[LogEntry]) -> bytes:
    return b"".join(json.dumps(_body(entry), ensure_ascii=False).encode(errors="replace") + b"\n" for entry in entries)


def read_log(data: bytes) -> list[LogEntry]:
    entries = []
    for number, line in enumerate(data.splitlines(), 1):
        try:
            entries.append(_entry(json.loads(line)))
        except (ValueError, KeyError, TypeError, FormatError) as error:
            raise DataError(f"log line {number}: not an entry ({type(error).__name__}: {error})") from error
    return entries


def _body(entry: LogEntry) -> dict[str, JsonValue]:
    match entry:
        case Opened():
            return {"kind": "opened", "context": entry.context, "tools": [tool_to_openai(tool) for tool in entry.tools]}
        case Appended():
            return {"kind": "appended", "context": entry.context, "messages": _bodies(entry.messages)}
        case Called():
            return {
                "kind": "called",
                "context": entry.context,
                "id": entry.id,
                "answer": message_to_openai(entry.answer),
                "suffix": _bodies(entry.suffix),
                "is_kept": entry.is_kept,
            }
        case Applied():
            body = {"kind": "applied", "context": entry.context, "operation": entry.operation}
            return body | {"parameters": entry.parameters, "inputs": entry.inputs}


def _entry(body: Any) -> LogEntry:
    context = str(body["context"])
    match body["kind"]:
        case "opened":
            return Opened(context, tuple(tool_from_openai(tool) for tool in body["tools"]))
        case "appended":
            return Appended(context, _messages(body["messages"]))
        case "called":
            answer = message_from_openai(body["answer"])
            return Called(context, str(body["id"]), answer, _messages(body["suffix"]), bool(body["is_kept"]))
        case "applied":
            return Applied(context, str(body["operation"]), dict(body["parameters"]), dict(body["inputs"]))
        case kind:
            raise ValueError(f"kind {kind!r} is not known; known: opened, appended, called, applied")


def _bodies(messages: Iterable[Message]) -> list[JsonValue]:
    return [message_to_openai(message) for message in messages]


def _messages(bodies: Any) -> tuple[Message, ...]:
    return tuple(message_from_openai(body) for body in bodies)
