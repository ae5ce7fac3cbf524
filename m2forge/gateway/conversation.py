"""A conversation put together from parts: blocks or items in, messages out.

Chat Completions sends an assistant's turn as one message. Other dialects send its parts one by one (thinking, text,
calls), perhaps with the results of calls between them, and messages that follow each other may be one turn. Here the
parts that one completion was made of become one `Message` again, because only then is it the message that was sampled.

A part belongs to the turn before it if nothing stands between, unless it is thinking that would come after words or
calls: thinking begins a turn. Where the client tells which answer a part came from (its `source`), that decides: parts
of one answer are one turn even with results of calls between them, parts of different answers never are.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from m2forge.gateway.exchange import AskError
from m2forge.gateway.reading import shown
from m2forge.gateway.tool_result import order_results
from m2forge.text.message import Message, ToolCall


@dataclass(slots=True)
class _Turn:
    """An assistant's message while parts are added."""

    source: str
    thinking: list[str] = field(default_factory=list)
    content: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    called: set[str] = field(default_factory=set)
    """Ids of the calls."""
    answered: set[str] = field(default_factory=set)
    """Those among them whose calls have their results."""

    def message(self) -> Message:
        return Message("assistant", "".join(self.content), "".join(self.thinking), tuple(self.calls))


def join_systems(messages: Iterable[Message]) -> list[Message]:
    """The messages, those of the system that stand together as one: chat formats have a place for one."""
    joined: list[Message] = []
    for is_system, run in itertools.groupby(messages, key=lambda message: message.role == "system"):
        together = list(run)
        if is_system and len(together) > 1:
            together = [Message("system", "\n\n".join(message.content for message in together))]
        joined += together
    return joined


class Conversation:
    """Takes the parts in the order in which they were sent."""

    def __init__(self) -> None:
        self._entries: list[Message | _Turn] = []
        self._turn: _Turn | None = None
        """The assistant's last, while only results of its calls have followed."""

    def say(self, role: Literal["system", "user"], content: str) -> None:
        self._turn = None
        self._entries.append(Message(role, content))

    def answer_call(self, call_id: str, content: str, place: str) -> None:
        """The result of a call of the last turn. `place` is told where there is no such call, or no longer."""
        if self._turn is None or call_id not in self._turn.called:
            raise AskError(
                f"{place}: answers call {shown(call_id)}, which the assistant did not make just before", place
            )
        if call_id in self._turn.answered:
            raise AskError(f"{place}: answers call {shown(call_id)}, which was answered before", place)
        self._turn.answered.add(call_id)
        self._entries.append(Message("tool", content, tool_call_id=call_id))

    def think(self, thinking: str, source: str = "") -> None:
        turn = self._open(source)
        if (turn.content or turn.calls) and not (source and turn.source == source):
            turn = self._begin(source)
        turn.thinking.append(thinking)

    def write(self, content: str, source: str = "", *, begins: bool = False) -> None:
        """`begins`: words after words are another turn, as in dialects whose messages are turns of their own."""
        turn = self._open(source)
        if begins and turn.content and not turn.calls and not (source and turn.source == source):
            turn = self._begin(source)
        turn.content.append(content)

    def call(self, call: ToolCall, source: str = "") -> None:
        turn = self._open(source)
        turn.calls.append(call)
        turn.called.add(call.id)

    def begin_turn(self) -> None:
        """An assistant's message, even if no part of it follows."""
        self._open("")

    def ends_with_turn(self) -> bool:
        return bool(self._entries) and isinstance(self._entries[-1], _Turn)

    def messages(self, place: str = "messages") -> tuple[Message, ...]:
        """All of them, results in the order of their calls. `place` is told where a call has no result. System messages
        that stand together are one."""
        entries = [entry.message() if isinstance(entry, _Turn) else entry for entry in self._entries]
        return order_results(join_systems(entries), place)

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
