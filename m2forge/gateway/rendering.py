"""Encodes messages appended to a conversation without rendering all of it again.

`ChatFormat.extend` takes all messages before the new ones, and a template may look at each. Yet new messages usually
depend only on the beginning and on the last assistant message with what follows. For such a format only those are
passed, so the work does not grow with the conversation. This is tested once per format, on synthetic conversations of
every shape; a template that fails (one that counts turns, or drops old thinking) gets all messages.

Templates may also silently skip messages that they do not support. A later system message that a format would not show
to the model is refused.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary

import numpy as np

from m2forge.errors import FormatError
from m2forge.records import IntArray
from m2forge.text.format import ChatFormat
from m2forge.text.message import Message, Tool, ToolCall

_FOUND: WeakKeyDictionary[ChatFormat, dict[str, bool]] = WeakKeyDictionary()
"""Test results per format, shared by all episodes of a gateway."""


def append(
    format: ChatFormat,
    history: Sequence[Message],
    new: Sequence[Message],
    tools: Sequence[Tool],
    *,
    generation: bool,
) -> IntArray:
    """Return the ids that follow those of `history`; raises FormatError if the format cannot append `new`."""
    if any(message.role == "system" for message in (new if history else new[1:])) and not shows_systems(format):
        raise FormatError(
            "the model's chat template shows a system's message at the beginning alone; put the later ones into that, "
            "or into a user's"
        )
    try:
        rendered = format.extend(history, new, tools, generation=generation)
    except FormatError:
        # A format may refuse a history for text that it could not parse back, though the model wrote that text and it
        # is not rendered here.
        tamed = [_tamed(message) for message in history]
        if tamed == list(history) or not is_local(format):
            raise
        rendered = format.extend(tamed, new, tools, generation=generation)
    return np.array(rendered.ids, np.int32)


def is_local(format: ChatFormat) -> bool:
    """Return whether messages render the same after `near(history)` as after `history`, whatever the model wrote."""
    return _find_out(format, "is_local", _passes_trials)


def shows_systems(format: ChatFormat) -> bool:
    """Return whether a later system message is rendered wherever the format accepts one."""
    return _find_out(format, "shows_systems", lambda format: all(_differ(format, *pair) for pair in _later_systems()))


def keeps_thinking(format: ChatFormat) -> bool:
    """Return whether thinking is rendered, also in answers before the last user message."""
    user = Message("user", "u")
    one, other = ([user, Message("assistant", "a", thinking), user] for thinking in ("s", "t"))
    return _find_out(format, "keeps_thinking", lambda format: _differ(format, one, other, []))


def _find_out(format: ChatFormat, what: str, find_out: Callable[[ChatFormat], bool]) -> bool:
    found = _FOUND.setdefault(format, {})
    if what not in found:
        found[what] = find_out(format)
    return found[what]


def _differ(format: ChatFormat, one: Sequence[Message], other: Sequence[Message], tools: Sequence[Tool]) -> bool:
    """Return whether two conversations render differently; a refused one counts as different."""
    first = _attempt(format, (), one, tools)
    return first is None or first != _attempt(format, (), other, tools)


def _later_systems() -> Iterator[tuple[list[Message], list[Message], list[Tool]]]:
    """Yield conversations that differ in a later system message: in the middle, after an answer, and last."""
    user, answer = Message("user", "u"), Message("assistant", "a")
    before = ([user], [user, answer], [Message("system", "s"), user], [Message("system", "s"), user, answer])
    for head, tail, tools in itertools.product(before, ([], [user]), ([], [Tool("f")])):
        one, other = ([*head, Message("system", text), *tail] for text in ("v", "w"))
        yield one, other, tools


def _passes_trials(format: ChatFormat) -> bool:
    for history, new, tools in _trials():
        whole, short = _attempt(format, history, new, tools), near(history)
        if _attempt(format, short, new, tools) != whole:
            return False
        if _attempt(format, [_tamed(message) for message in short], new, tools) != whole:
            return False
    return True


def near(history: Sequence[Message]) -> list[Message]:
    """Return the messages before the first assistant message, and the last assistant message with what follows."""
    assistants = [index for index, message in enumerate(history) if message.role == "assistant"]
    return [*history[: assistants[0]], *history[assistants[-1] :]] if assistants else list(history)


def _tamed(message: Message) -> Message:
    if message.role != "assistant":
        return message
    return Message("assistant", tool_calls=tuple(replace(call, arguments={}) for call in message.tool_calls))


def _attempt(
    format: ChatFormat, history: Sequence[Message], new: Sequence[Message], tools: Sequence[Tool]
) -> list[int] | None:
    try:
        return format.extend(history, new, tools, generation=True).ids
    except FormatError:
        return None


def _trials() -> Iterator[tuple[list[Message], list[Message], list[Tool]]]:
    """Yield histories of three answers, with and without system, tools, thinking in the last, a user in between."""
    call, tool = ToolCall("f", {"k": "v"}), Tool("f", "d", {"type": "object", "properties": {}})
    user = Message("user", "u")
    for has_system, has_tools, thinks_last, has_user in itertools.product((False, True), repeat=4):
        calls, results = ((call,), [Message("tool", "r")]) if has_tools else ((), [Message("user", "v")])
        between = [user] if has_user else results
        history = [Message("system", "s")] if has_system else []
        history += [user, Message("assistant", "a", "t", calls), *results, Message("assistant", "b", "t", calls)]
        history += [*results, *(between if has_user else [])]
        history += [Message("assistant", "c", "t" if thinks_last else "", calls)]
        for new in ([user], results):
            yield history, new, [tool] if has_tools else []
        yield [*history, *results], [], [tool] if has_tools else []
        yield [*history, *results], [user], [tool] if has_tools else []
