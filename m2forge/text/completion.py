"""What a sampled completion turns out to be: its parts, what was wrong with it, and the events along the way.

A parser makes these from bytes. A completion is always whole in the sense that nothing raised: what could not be
understood is told in `problems`, and the words stay in `content` or `thinking`.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from m2forge.text.message import Message, ToolCall


class ProblemKind(StrEnum):
    """What can be wrong with a completion."""

    UNCLOSED_THINKING = "unclosed_thinking"
    """The text ended while thinking."""
    UNCLOSED_CALL = "unclosed_call"
    """The text, or the block of calls, ended inside a call; a call cut off by the end of the text is left out."""
    CALL_IN_THINKING = "call_in_thinking"
    """A call was written while thinking; it stays thinking and is not called."""
    STRAY_TAG = "stray_tag"
    """A tag where it means nothing; it stays in the text."""
    TEXT_IN_CALL = "text_in_call"
    """Words inside a block of calls but outside its parameters; they are left out."""
    TEXT_AFTER_CALL = "text_after_call"
    """Words after a call; they stay in the content, which says no longer where they stood."""
    TEXT_AFTER_END = "text_after_end"
    """Words after the end marker; they are left out."""
    MALFORMED_CALL = "malformed_call"
    """A call without a name or arguments that can be read; it is left out."""
    UNKNOWN_TOOL = "unknown_tool"
    """A call of a tool that was not offered; it stays among the calls."""
    BAD_ARGUMENT = "bad_argument"
    """An argument missing, unknown, given twice or of another type than its schema's; the call stays."""


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
    """The call started last is complete; one that never completes ends in a problem instead."""

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
    """Whether the end marker was there; without it the completion was cut off."""
    final_events: tuple[Event, ...] = ()
    """What was held back until it was certain that no marker comes of it."""

    def message(self) -> Message:
        return Message("assistant", self.content, self.thinking, self.tool_calls)
