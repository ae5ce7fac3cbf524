"""Log of all changes to an agent's conversations, in order: enough to rebuild the messages of each completion call.

    opened      a conversation, main or a sub-agent's, with its tools
    appended    messages that the loop appended: the task, tool results, hints to the model
    called      a completion call on the conversation, possibly with a suffix of messages; the answer was appended, or
                was used by an operation
    applied     an operation changed the conversation: its name, parameters and inputs

Each entry is a line of JSON. Messages and tools are in OpenAI's format.
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
    """The server's id of the completion."""
    answer: Message
    suffix: tuple[Message, ...] = ()
    """Messages sent after the conversation that do not become part of it."""
    is_appended: bool = True
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
                "is_kept": entry.is_appended,
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
            raise ValueError(f"kind {kind!r} is unknown; expected opened, appended, called, applied")


def _bodies(messages: Iterable[Message]) -> list[JsonValue]:
    return [message_to_openai(message) for message in messages]


def _messages(bodies: Any) -> tuple[Message, ...]:
    return tuple(message_from_openai(body) for body in bodies)
