"""Assembles a conversation: blocks or items in, messages out.

Chat Completions sends an assistant's turn as one message. Other dialects send its parts separately (thinking, text,
tool calls), possibly with tool results between them, and consecutive messages may be one turn. This module merges the
parts of one completion back into one `Message`, because only that is the message that was sampled.

A part belongs to the previous turn if it directly follows it, unless it is thinking after text or tool calls: thinking
begins a turn. If the client says which response a part came from (its `source`), that decides: parts of one response
are one turn even with tool results between them, and parts of different responses never are.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from m2forge.gateway.dialects.types import AskError, order_results, shown
from m2forge.text.message import Message, ToolCall


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


def join_systems(messages: Iterable[Message]) -> list[Message]:
    """Merge consecutive system messages: chat templates have room for one."""
    joined: list[Message] = []
    for is_system, run in itertools.groupby(messages, key=lambda message: message.role == "system"):
        together = list(run)
        if is_system and len(together) > 1:
            together = [Message("system", "\n\n".join(message.content for message in together))]
        joined += together
    return joined


class Conversation:
    """Takes the parts in the order in which the client sent them."""

    def __init__(self) -> None:
        self._entries: list[Message | _Turn] = []
        self._turn: _Turn | None = None
        """The last assistant turn, as long as only results of its tool calls have followed."""

    def say(self, role: Literal["system", "user"], content: str) -> None:
        self._turn = None
        self._entries.append(Message(role, content))

    def answer_call(self, call_id: str, content: str, location: str) -> None:
        """Add the result of a last turn's call. `AskError` at `location` if it is unknown or already answered."""
        if self._turn is None or call_id not in self._turn.called:
            raise AskError(
                f"{location}: answers call {shown(call_id)}, which the assistant did not make just before", location
            )
        if call_id in self._turn.answered:
            raise AskError(f"{location}: answers call {shown(call_id)}, which was answered before", location)
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
        """Return all messages, with results in the order of their calls and consecutive system messages merged. Raises
        `AskError` at `location` if a call has no result."""
        entries = [entry.message() if isinstance(entry, _Turn) else entry for entry in self._entries]
        return order_results(join_systems(entries), location)

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
