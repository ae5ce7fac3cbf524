"""Assembles a conversation: blocks or items in, messages out.

Chat Completions sends an assistant's turn as one message. Other dialects send its parts separately (thinking, text,
tool calls), possibly with tool results between them, and consecutive messages may be one turn. This module merges the
parts of one completion back into one `Message`, because only that is the message that was sampled.

A part belongs to the previous turn if it directly follows it, unless it is thinking after text or tool calls: thinking
begins a turn. If the client says which response a part came from (its `source`), that decides: parts of one response
are one turn even with tool results between them, and parts of different responses never are.

Chat templates have room for one system message, at the beginning. Those before the first turn are merged into it. A
later one becomes a user turn in `<system-reminder>` tags, at its own position, so that the turns before it keep their
recorded tokens. The instruction that demands the request's response format is appended to the first message, where
each later request of the conversation repeats it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from m2forge.gateway.dialects.types import BadRequestError, Notice, Reading, order_results, shown
from m2forge.records import JsonValue
from m2forge.text.message import Message, ToolCall

REMINDER = "<system-reminder>\n{}\n</system-reminder>"


@dataclass(slots=True)
class _Turn:
    """An assistant's message under construction."""

    source: str
    thinking: list[str] = field(default_factory=list)
    content: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    called: set[str] = field(default_factory=set)
    """Ids of the tool calls."""
    answered: set[str] = field(default_factory=set)
    """Ids of the tool calls that have results."""

    def message(self) -> Message:
        return Message("assistant", "".join(self.content), "".join(self.thinking), tuple(self.calls))


def place_instructions(messages: Sequence[Message], reading: Reading) -> tuple[Message, ...]:
    """Return the messages with the first system messages merged, later ones as user turns, and the format
    instruction in the first message."""
    num_first = next((at for at, message in enumerate(messages) if message.role != "system"), len(messages))
    placed = list(messages[num_first:])
    if num_first:
        placed.insert(0, Message("system", "\n\n".join(message.content for message in messages[:num_first])))
    for index in range(1, len(placed)):
        if placed[index].role == "system":
            reading.note(Notice.SYSTEM_TURN)
            placed[index] = Message("user", REMINDER.format(placed[index].content))
    if reading.format_instruction:
        if not placed or placed[0].role not in ("system", "user"):
            placed.insert(0, Message("system"))
        content = "\n\n".join(filter(None, (placed[0].content, reading.format_instruction)))
        placed[0] = replace(placed[0], content=content)
    return tuple(placed)


def format_instruction(schema: Mapping[str, JsonValue] | None, description: str = "") -> str:
    """Return prompt text that demands JSON; `schema`: None allows any object."""
    if schema is None:
        return "Answer with one JSON object and nothing else."
    said = "Answer with JSON that matches this JSON schema, and with nothing else"
    about = f" ({description})" if description else ""
    return f"{said}{about}:\n{json.dumps(schema, ensure_ascii=False)}"


class Conversation:
    """Takes the parts in the order in which the client sent them."""

    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        self._entries: list[Message | _Turn] = []
        self._turn: _Turn | None = None
        """The last assistant turn, as long as only results of its tool calls have followed."""

    def say(self, role: Literal["system", "user"], content: str) -> None:
        self._turn = None
        self._entries.append(Message(role, content))

    def answer_call(self, call_id: str, content: str, location: str) -> None:
        """Add the result of a call of the last turn. Raises `BadRequestError` at `location` if the call is unknown or
        already has a result."""
        if self._turn is None or call_id not in self._turn.called:
            raise BadRequestError(
                f"{location}: answers call {shown(call_id)}, which the assistant did not make just before", location
            )
        if call_id in self._turn.answered:
            raise BadRequestError(f"{location}: answers call {shown(call_id)}, which was answered before", location)
        self._turn.answered.add(call_id)
        self._entries.append(Message("tool", content, tool_call_id=call_id))

    def think(self, thinking: str, source: str = "") -> None:
        turn = self._open(source)
        if (turn.content or turn.calls) and not (source and turn.source == source):
            turn = self._begin(source)
        turn.thinking.append(thinking)

    def write(self, content: str, source: str = "", *, begins: bool = False) -> None:
        """`begins`: text after text starts a new turn, for dialects whose messages are separate turns."""
        turn = self._open(source)
        if begins and turn.content and not turn.calls and not (source and turn.source == source):
            turn = self._begin(source)
        turn.content.append(content)

    def call(self, call: ToolCall, source: str = "") -> None:
        turn = self._open(source)
        turn.calls.append(call)
        turn.called.add(call.id)

    def begin_turn(self) -> None:
        """Start an assistant message, even if no part of it follows."""
        self._open("")

    def ends_with_turn(self) -> bool:
        return bool(self._entries) and isinstance(self._entries[-1], _Turn)

    def messages(self, location: str = "messages") -> tuple[Message, ...]:
        """Return all messages, with results in the order of their calls and instructions at their positions. Raises
        `BadRequestError` at `location` if a call has no result."""
        entries = [entry.message() if isinstance(entry, _Turn) else entry for entry in self._entries]
        return place_instructions(order_results(entries, location), self.reading)

    def _open(self, source: str) -> _Turn:
        turn = self._turn
        if turn is None:
            return self._begin(source)
        if source and turn.source:
            return turn if source == turn.source else self._begin(source)
        if self._entries[-1] is not turn:
            return self._begin(source)
        turn.source = turn.source or source
        return turn

    def _begin(self, source: str) -> _Turn:
        self._turn = _Turn(source)
        self._entries.append(self._turn)
        return self._turn
