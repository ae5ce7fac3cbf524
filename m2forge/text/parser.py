"""Streaming parser: chunks of a completion's bytes in, events and finally a `Completion` out. Never raises.

The parser is a small state machine over text. Each state looks for its few markers; the text before a marker is
emitted, and a suffix that may still become a marker is held back. So events never contain part of a marker, the result
does not depend on how the bytes were chunked, and the work is linear in the text.

Thinking is what precedes `</think>`, without one newline directly before that tag; up to two newlines after it belong
to the tag as well. A tag without meaning at its position remains text and is reported.

What the parser cannot understand is reported in the completion's `problems`, and the text stays in `content` or
`thinking`.
"""

import codecs
import functools
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from m2forge.errors import suggest
from m2forge.records import JsonValue
from m2forge.text.argument import argument_problems
from m2forge.text.message import Message, Tool, ToolCall


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
    """A call of a tool that was not offered; the result includes it."""
    BAD_ARGUMENT = "bad_argument"
    """An argument that is missing, unknown, given twice or of the wrong type; the result includes the call."""


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


THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
_LINES_AFTER_THINKING = 2
_SNIPPET_LENGTH = 60


@functools.cache
def markers_of(*markers: str) -> "Markers":
    """Compiled once per set of markers, since every completion has its own parser."""
    return Markers(*markers)


class Markers:
    """Finds the first of some markers, and a partial marker at the end of the text."""

    def __init__(self, *markers: str) -> None:
        ordered = sorted(markers, key=len, reverse=True)
        self.find = re.compile("|".join(map(re.escape, ordered))).search
        self.longest = len(ordered[0])
        self._find_beginning = re.compile("(?:" + "|".join(map(_beginnings, ordered)) + r")\Z").search

    def held(self, text: str, start: int) -> int:
        """Start of the suffix of `text` that may still become a marker; the length of `text` if there is none."""
        found = self._find_beginning(text, max(start, len(text) - self.longest + 1))
        return found.start() if found else len(text)


class CompletionParser(ABC):
    """Parses one completion: created by a chat format, fed until the end, finished once."""

    think_lead = ""
    """Text that may precede the tag which opens thinking at the beginning of a completion."""
    call_markers: tuple[str | None, str | None]
    """Open and close calls; None: calls have no such marker."""
    call_lead = ""
    """Directly before the tag that opens a call, it is not content."""

    def __init__(
        self, tools: Sequence[Tool], *, end_marker: str, other_ends: tuple[str, ...] = (), starts_thinking: bool
    ) -> None:
        """`starts_thinking`: the prompt ended with the tag that opens thinking, so the completion begins inside.
        `other_ends` end a completion as well."""
        self._tools = {tool.name: tool for tool in tools}
        self._ends = (end_marker, *other_ends)
        self._call_open, self._call_close = self.call_markers
        self._text, self._at = "", 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._events: list[Event] = []
        self._thinking: list[str] = []
        self._content: list[str] = []
        self._gap: list[str] = []
        self._calls: list[ToolCall] = []
        self._problems: list[Problem] = []
        self._closed, self._surplus = False, False
        self._num_line_ends = 0
        self._state: Callable[[bool], bool] = self._think if starts_thinking else self._begin
        opens = () if self._call_open is None else (self._call_open,)
        led = tuple(self.call_lead + open for open in opens)
        self._think_markers = markers_of(f"\n{THINK_CLOSE}", THINK_CLOSE, THINK_OPEN, *opens, *self._ends)
        self._content_markers = markers_of(*led, *opens, *self._ends, *self._strays())
        self._prepare()

    def _prepare(self) -> None:  # noqa: B027  (a syntax without state of its own needs none)
        """Set up what the parser of one syntax needs besides."""

    def feed(self, piece: bytes | str) -> list[Event]:
        """Take the next chunk of the completion; returns the events that are certain."""
        data = piece.encode(errors="replace") if isinstance(piece, str) else piece
        return self._advance(self._decoder.decode(data), final=False)

    def finish(self) -> Completion:
        """The whole completion. Call it once, after the last chunk."""
        events = self._advance(self._decoder.decode(b"", final=True), final=True)
        self._close_state()
        if self._surplus:
            self._report(ProblemKind.TEXT_AFTER_END, f"text after {self._ends[0]}")
        return Completion(
            thinking="".join(self._thinking),
            content="".join(self._content),
            tool_calls=tuple(self._calls),
            problems=tuple(self._problems),
            closed=self._closed,
            final_events=tuple(events),
        )

    # -- the state machine --------------------------------------------------------------------------------------------

    def _advance(self, text: str, *, final: bool) -> list[Event]:
        self._text, self._at = self._text[self._at :] + text, 0
        while self._state(final):
            pass
        events, self._events = self._events, []
        return events

    def _take(self, markers: Markers, final: bool) -> tuple[str, str | None]:
        """The text up to the next marker, which is consumed; without one, all that cannot become one."""
        found = markers.find(self._text, self._at)
        if found:
            before = self._text[self._at : found.start()]
            self._at = found.end()
            return before, found.group()
        end = len(self._text) if final else markers.held(self._text, self._at)
        before = self._text[self._at : end]
        self._at = end
        return before, None

    def _strays(self) -> tuple[str, ...]:
        """Tags that are reported if they occur in the content."""
        closes = () if self._call_close is None else (self._call_close,)
        return THINK_OPEN, THINK_CLOSE, *closes

    def _opens_call(self, marker: str) -> bool:
        return self._call_open is not None and marker.endswith(self._call_open)

    @abstractmethod
    def _enter_call(self) -> None:
        """Set the state that parses what follows the opening marker of a call."""

    @abstractmethod
    def _close_call(self) -> bool:
        """The text ended: drop and report the unfinished call. False if there is none."""

    # -- states: each consumes what it can and returns whether to run the (possibly new) state again -------------------

    def _begin(self, final: bool) -> bool:
        """The first characters: thinking, or content."""
        remainder, opening = self._text[self._at :], self.think_lead + THINK_OPEN
        if not remainder.startswith(self.think_lead[:1]):
            opening = THINK_OPEN
        if not final and len(remainder) < len(opening) + 1 and (opening + "\n").startswith(remainder):
            return False
        self._state = self._write
        if remainder.startswith(opening):
            self._at += len(opening)
            self._at += self._text.startswith("\n", self._at)
            self._state = self._think
        return True

    def _think(self, final: bool) -> bool:
        text, marker = self._take(self._think_markers, final)
        self._add_thinking(text)
        if marker is None:
            return False
        if marker in self._ends:
            self._report(ProblemKind.UNCLOSED_THINKING, f"{marker} before {THINK_CLOSE}")
            return self._end()
        if marker.endswith(THINK_CLOSE):
            self._state, self._num_line_ends = self._skip_line_ends, 0
            return True
        self._add_thinking(marker)
        if marker == self._call_open:
            self._report(ProblemKind.CALL_IN_THINKING, f"{marker} before {THINK_CLOSE}")
        else:
            self._report(ProblemKind.STRAY_TAG, f"{marker} while thinking")
        return True

    def _skip_line_ends(self, final: bool) -> bool:
        while self._num_line_ends < _LINES_AFTER_THINKING and self._text.startswith("\n", self._at):
            self._at += 1
            self._num_line_ends += 1
        if self._at == len(self._text) and self._num_line_ends < _LINES_AFTER_THINKING:
            return False
        self._state = self._write
        return True

    def _write(self, final: bool) -> bool:
        """Content, before or after calls."""
        text, marker = self._take(self._content_markers, final)
        self._add_content(text)
        return marker is not None and self._pass_marker(marker)

    def _after_call(self, final: bool) -> bool:
        """Between calls, where whitespace is dropped; text makes it content again."""
        text, marker = self._take(self._content_markers, final)
        self._gap.append(text)
        stray = marker is not None and marker not in self._ends and not self._opens_call(marker)
        if stray or (text and not text.isspace()):
            self._add_content("".join(self._gap))
            self._gap.clear()
            self._report(ProblemKind.TEXT_AFTER_CALL, "text after a call")
            self._state = self._write
        if marker is None:
            return False
        self._gap.clear()
        return self._pass_marker(marker)

    def _pass_marker(self, marker: str) -> bool:
        """A marker in or after the content: the end, a call, or a stray tag, which is text."""
        if marker in self._ends:
            return self._end()
        if self._opens_call(marker):
            self._enter_call()
        else:
            self._add_content(marker)
            self._report(ProblemKind.STRAY_TAG, f"{marker} in the content")
        return True

    def _end(self) -> bool:
        self._closed = True
        self._state = self._after_end
        return True

    def _after_end(self, final: bool) -> bool:
        remainder = self._text[self._at :]
        self._surplus = self._surplus or bool(remainder and not remainder.isspace())
        self._at = len(self._text)
        return False

    def _close_state(self) -> None:
        if self._state == self._think:
            self._report(ProblemKind.UNCLOSED_THINKING, f"the text ended before {THINK_CLOSE}")
        else:
            self._close_call()

    # -- results ------------------------------------------------------------------------------------------------------

    def _add_thinking(self, text: str) -> None:
        if text:
            self._thinking.append(text)
            self._events.append(ThinkingDelta(text))

    def _add_content(self, text: str) -> None:
        if text:
            self._content.append(text)
            self._events.append(ContentDelta(text))

    def _start_call(self, name: str) -> None:
        self._events.append(CallStarted(name))
        if name not in self._tools:
            self._report(ProblemKind.UNKNOWN_TOOL, f"{snippet(name)} was not offered; {suggest(name, self._tools)}")

    def _finish_call(self, name: str, arguments: dict[str, JsonValue]) -> None:
        tool = self._tools.get(name)
        if tool is not None:
            for problem in argument_problems(arguments, tool):
                self._report(ProblemKind.BAD_ARGUMENT, problem)
        call = ToolCall(name, arguments)
        self._calls.append(call)
        self._events.append(CallFinished(call))

    def _report(self, kind: ProblemKind, detail: str) -> None:
        self._problems.append(Problem(kind, detail))


def snippet(text: str) -> str:
    text = text.strip()
    return repr(text) if len(text) <= _SNIPPET_LENGTH else f"{text[: _SNIPPET_LENGTH - 1]!r}…"


def _beginnings(marker: str) -> str:
    """A pattern that matches every proper prefix of `marker`."""
    signs = [re.escape(sign) for sign in marker[:-1]]
    return "(?:".join(signs) + ")?" * (len(signs) - 1)
