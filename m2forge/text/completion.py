"""A parsed completion: its parts, its problems, and the events of streaming parsing.

A parser creates these from bytes and never raises: what it could not understand is reported in `problems`, and the text
stays in `content` or `thinking`.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from m2forge.text.message import Message, ToolCall


class ProblemKind(StrEnum):
    """Kinds of problems in a completion."""

    UNCLOSED_THINKING = "unclosed_thinking"
    """The text ended while thinking."""
    UNCLOSED_CALL = "unclosed_call"
    """The text, or the block of calls, ended inside a call; a call truncated by the end of the text is dropped."""
    CALL_IN_THINKING = "call_in_thinking"
    """A call was written while thinking; it stays part of the thinking and is not executed."""
    STRAY_TAG = "stray_tag"
    """A tag without meaning at its position; it stays in the text."""
    TEXT_IN_CALL = "text_in_call"
    """Text inside a block of calls but outside its parameters; it is dropped."""
    TEXT_AFTER_CALL = "text_after_call"
    """Text after a call; it stays in the content, and its position relative to the call is lost."""
    TEXT_AFTER_END = "text_after_end"
    """Text after the end marker; it is dropped."""
    MALFORMED_CALL = "malformed_call"
    """A call without a parsable name or arguments; it is dropped."""
    UNKNOWN_TOOL = "unknown_tool"
    """A call of a tool that was not offered; it is kept."""
    BAD_ARGUMENT = "bad_argument"
    """An argument that is missing, unknown, given twice or of the wrong type; the call is kept."""


@dataclass(frozen=True, slots=True)
class Problem:
    kind: ProblemKind
    detail: str


@dataclass(frozen=True, slots=True)
class ThinkingDelta:
    """More thinking."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More content."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    """A call's name is known, its arguments are not yet."""

    name: str


@dataclass(frozen=True, slots=True)
class CallFinished:
    """The last started call is complete; one that never completes ends in a problem instead."""

    call: ToolCall


Event: TypeAlias = ThinkingDelta | ContentDelta | CallStarted | CallFinished


@dataclass(frozen=True, slots=True)
class Completion:
    """One parsed completion."""

    thinking: str
    content: str
    tool_calls: tuple[ToolCall, ...]
    problems: tuple[Problem, ...]
    closed: bool
    """Whether the end marker was found; without it the completion was truncated."""
    final_events: tuple[Event, ...] = ()
    """Events for text that was held back until it could no longer become a marker."""

    def message(self) -> Message:
        return Message("assistant", self.content, self.thinking, self.tool_calls)
