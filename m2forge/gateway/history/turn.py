"""One recorded message of a conversation, in a tree of all messages of an episode, with its token ids.

A `Turn` is a child of the previous message, so conversations share common prefixes. It knows where its tokens end:

    closed     after the message
    opened     after the generation prompt that follows it

Both are positions on a `Strand`, an append-only array of ids. A turn's ids are a view of its strand from the first
token on; no history is copied while a conversation continues.

A client's message matches a recorded one if role, content and tool calls agree: arguments as JSON values (in any order,
1 equals 1.0, true does not equal 1). Equal call ids only decide between several matches. Thinking may be missing. White
space beside tool calls equals no content, since clients drop it or add it.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeAlias
from weakref import WeakKeyDictionary

import numpy as np

from m2forge.errors import FormatError
from m2forge.records import IntArray, JsonValue
from m2forge.text.format import ChatFormat
from m2forge.text.message import Message, Tool, ToolCall

_LEAST_ROOM = 256
_MAX_CLIMBS = 16
"""Maximum number of turns checked for being below another, most likely first."""
_PLAIN = (str, int, float, bool, type(None))
Key: TypeAlias = tuple[object, ...]
"""Equal for messages that may match; differs for most that do not."""
_PROPERTIES: WeakKeyDictionary[ChatFormat, dict[str, bool]] = WeakKeyDictionary()
"""Test results per format, shared by all episodes of a gateway."""


class Echo(Enum):
    """How a message compares with a recorded one."""

    SAME = 2
    WITHOUT_THINKING = 1
    """The recorded message has thinking, this one has none."""
    OTHER = 0


class Strand:
    __slots__ = ("_buffer", "_size")

    def __init__(self) -> None:
        self._buffer: IntArray = np.empty(0, np.int32)
        self._size = 0

    def view(self, size: int) -> IntArray:
        """Return the first `size` ids, read-only."""
        ids = self._buffer[:size]
        ids.flags.writeable = False
        return ids

    def grow(self, size: int, ids: IntArray) -> "Strand":
        """Return a strand of the first `size` ids followed by `ids`: this one if it ends there, else a copy."""
        assert size <= self._size
        strand = self if size == self._size else Strand()
        needed = size + ids.size
        if needed > strand._buffer.size:
            # Capacity doubles, so that a long conversation is copied a constant number of times.
            larger = np.empty(max(needed, 2 * size, _LEAST_ROOM), np.int32)
            larger[:size] = self._buffer[:size]
            strand._buffer = larger
        strand._buffer[size:needed] = ids
        strand._size = needed
        return strand


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """A turn in the journal; positions count tokens of the prompt it came with."""

    message: Message
    closed: int | None
    opened: int | None
    start: int | None
    """Position of the first sampled token; None for a client's message."""
    num_response: int


@dataclass(frozen=True, slots=True)
class PathRecord:
    """What a prompt adds to a history."""

    parent: int
    """Number of the turn that `turns` continue; −1 for a new root, which has its own tools."""
    tools: tuple[Tool, ...]
    prefix: int
    """Number of the turn whose first `start` ids the prompt begins with; −1 if it shares none."""
    start: int
    turns: tuple[TurnRecord, ...]


class Turn:
    __slots__ = (
        "_calls",
        "_jump",
        "_thinking",
        "answered",
        "children",
        "closed",
        "content",
        "depth",
        "has_rivals",
        "is_words",
        "latest",
        "message",
        "num_held",
        "num_sampled",
        "number",
        "opened",
        "parent",
        "response_ids",
        "role",
        "start",
        "strand",
        "written",
    )

    def __init__(self, parent: "Turn | None", message: Message, response_ids: IntArray | None = None) -> None:
        self.parent, self.message = parent, message
        # Copied here because they are read for each message of each call.
        self.role, self.content = message.role, content_of(message)
        self._thinking = message.thinking
        self._calls = [(call.name, call.arguments, call.id, _kinds(call.arguments)) for call in message.tool_calls]
        self.response_ids = response_ids
        """Sampled token ids; None for a client's message."""
        self.depth: int = 0 if parent is None else parent.depth + 1
        """Number of messages of the conversation up to here."""
        self._jump: Turn | None = _far_above(parent)
        """Skip pointer to an ancestor, usually a distant one: with it any depth above is reached in few steps."""
        self.num_sampled: int = (0 if parent is None else parent.num_sampled) + (response_ids is not None)
        """Number of the model's messages up to here."""
        self.strand: Strand | None = None
        self.start: int | None = None
        """Position of the first sampled token on the strand; None for a client's message."""
        self.closed: int | None = None
        self.opened: int | None = None
        self.number: int | None = None
        """Index among the recorded turns; None until an answer at or below it is recorded."""
        self.written: int | None = None
        """Number of its ids in the journal; None for an answer, all of whose ids are there."""
        self.num_held = 0
        """Number of prompts that end here and are neither answered nor given up."""
        self.children: dict[Key, list[Turn]] = {}
        self.has_rivals = False
        """Whether the same message may match another child of its parent."""
        self.is_words = not message.tool_calls
        """Whether it has no tool calls and no rivals: then content alone identifies it, if thinking is restored."""
        self.latest: Turn | None = None
        """The most recently matched or added child."""
        self.answered: Turn | None = None
        """The child on the path of the most recently recorded answer."""

    def add(self, child: "Turn") -> None:
        same = self.children.setdefault(key_of(child.message), [])
        same.append(child)
        self.latest = child
        if len(same) > 1:
            for rival in same:
                rival.has_rivals, rival.is_words = True, False

    def remove(self, child: "Turn") -> None:
        key = key_of(child.message)
        self.children[key].remove(child)
        if not self.children[key]:
            del self.children[key]
        if self.latest is child:
            self.latest = None

    def dissolve(self) -> None:
        """Drop the references to other turns."""
        self.children, self.parent, self.latest, self.answered = {}, None, None, None
        self._jump = None

    def find(self, message: Message, *, restores_thinking: bool) -> "Turn | None":
        """Return the child that matches `message` best."""
        if self.latest is not None and self.latest.is_plainly(message, restores_thinking):
            return self.latest
        same = self.children.get(key_of(message)) if self.children else None
        if same is None:
            return None
        least = Echo.WITHOUT_THINKING if restores_thinking else Echo.SAME
        child = best_echo(same, message, least)
        if child is not None:
            self.latest = child
        return child

    def is_plainly(self, message: Message, restores_thinking: bool) -> bool:
        """Fast check whether `message` matches this turn; may be False where a full comparison matches."""
        return (
            self.content == message.content
            and self.role == message.role
            and (self.role != "assistant" or self.is_plainly_answer(message, restores_thinking))
        )

    def is_plainly_answer(self, message: Message, restores_thinking: bool) -> bool:
        """Do the same for an assistant message with equal content."""
        thinking, ours, theirs = message.thinking, self._calls, message.tool_calls
        if self.has_rivals or ((thinking or not restores_thinking) and thinking != self._thinking):
            return False
        if not ours or not theirs:
            return not ours and not theirs
        if len(ours) != len(theirs):
            return False
        for (name, arguments, id, kinds), other in zip(ours, theirs, strict=True):
            others = other.arguments
            if arguments != others or name != other.name or (id != other.id and other.id):
                return False
            # In Python true equals 1; among equal values of the same types, with nothing nested, this cannot happen.
            if kinds and list(map(type, others.values())) != kinds and not same_json(arguments, others):
                return False
        return True

    def echo(self, message: Message) -> Echo:
        if self.content != content_of(message) or self.role != message.role:
            return Echo.OTHER
        if not same_calls(self.message.tool_calls, message.tool_calls):
            return Echo.OTHER
        if self.message.thinking == message.thinking:
            return Echo.SAME
        return Echo.OTHER if message.thinking else Echo.WITHOUT_THINKING

    def complete(self, message: Message) -> Message:
        """Return `message` with the recorded thinking."""
        return message if message.thinking == self._thinking else replace(message, thinking=self._thinking)

    def above(self) -> "Iterator[Turn]":
        """Yield the turns before this one, nearest first, up to the root."""
        turn = self.parent
        while turn is not None:
            yield turn
            turn = turn.parent

    def is_below(self, other: "Turn") -> bool:
        turn = self
        while turn.depth > other.depth and turn.parent is not None:
            turn = turn._jump if turn._jump is not None and turn._jump.depth >= other.depth else turn.parent
        return turn is other and turn is not self

    def has_ids_of(self, message: Message) -> bool:
        """Return whether the tool calls, otherwise equal, have the same ids."""
        return all(one.id == other.id for one, other in zip(self.message.tool_calls, message.tool_calls, strict=False))

    # -- journal: `ids` on `strand` are a prompt that contains this turn -----------------------------------------------

    @classmethod
    def restored(cls, parent: "Turn", record: TurnRecord, strand: Strand) -> "Turn":
        """Create the turn that `record` describes, as a child of `parent`."""
        response_ids = None
        if record.start is not None:
            response_ids = strand.view(record.start + record.num_response)[record.start :]
        turn = cls(parent, record.message, response_ids)
        turn.written = max(record.closed or 0, record.opened or 0)
        if turn.written:
            turn.strand, turn.closed, turn.opened, turn.start = strand, record.closed, record.opened, record.start
        parent.add(turn)
        return turn

    def record(self, ids: IntArray, strand: Strand) -> TurnRecord:
        if not self.num_known(ids, strand):
            return TurnRecord(self.message, None, None, None, 0)
        num_response = 0 if self.response_ids is None else self.response_ids.size
        return TurnRecord(self.message, self.closed, self.opened, self.start, num_response)

    def num_known(self, ids: IntArray, strand: Strand) -> int:
        """Return the number of known ids of this turn if the prompt begins with them; 0 if rendered differently."""
        size = max(self.opened or 0, self.closed or 0)
        return size if self._begins(size, ids, strand) else 0

    def num_written(self, ids: IntArray, strand: Strand) -> int:
        """Return the number of this turn's ids in the journal if the prompt begins with them; else 0."""
        size = (self.closed or 0) if self.written is None else self.written
        return size if self._begins(size, ids, strand) else 0

    def _begins(self, size: int, ids: IntArray, strand: Strand) -> bool:
        if self.strand is None or size > ids.size:
            return False
        return self.strand is strand or np.array_equal(self.strand.view(size), ids[:size])


def _far_above(parent: Turn | None) -> Turn | None:
    """Return the skip pointer of a child of `parent`: past two jumps of equal length, else its parent. So the number of
    steps between a turn and an ancestor grows with the logarithm of their distance."""
    if parent is None:
        return None
    near = parent._jump
    if near is None or near._jump is None or parent.depth - near.depth != near.depth - near._jump.depth:
        return parent
    return near._jump


# -- matching ----------------------------------------------------------------------------------------------------------


def best_echo(
    turns: Sequence[Turn], message: Message, least: Echo, after: Turn | None = None, distance: int = 0
) -> Turn | None:
    """Return the best match for `message`: by call ids, then below `after` and nearest to `distance` messages below it,
    then by thinking, then the most recent."""
    matches = [turn for turn in turns if turn.echo(message).value >= least.value]
    if len(matches) > 1:
        matches = [turn for turn in matches if turn.has_ids_of(message)] or matches
    if len(matches) > 1 and after is not None:
        matches = _nearest(matches, after, distance) or matches
    if len(matches) > 1:
        matches = [turn for turn in matches if turn.message.thinking == message.thinking] or matches
    return matches[-1] if matches else None


def _nearest(turns: Sequence[Turn], after: Turn, distance: int) -> list[Turn]:
    """Return the turns below `after` nearest to `distance` messages below it, in their given order. Ties go to the one
    above: clients insert a message more often than they remove one."""

    def gap(turn: Turn) -> tuple[int, int]:
        return abs(turn.depth - after.depth - distance), turn.depth

    latest_first = list(reversed(turns))
    latest_first.sort(key=gap)
    nearest: list[Turn] = []
    for turn in latest_first[:_MAX_CLIMBS]:
        if nearest and gap(turn) != gap(nearest[0]):
            break
        if turn.is_below(after):
            nearest.append(turn)
    return nearest[::-1]


def key_of(message: Message) -> Key:
    if not message.tool_calls:
        return message.role, message.content
    calls = [
        (call.name, frozenset((name, value if type(value) is str else None) for name, value in call.arguments.items()))
        for call in message.tool_calls
    ]
    return message.role, content_of(message), *calls


def content_of(message: Message) -> str:
    """Return the content by which messages match: none if it is white space beside tool calls."""
    return "" if message.tool_calls and message.content.isspace() else message.content


def same_calls(ours: Sequence[ToolCall], theirs: Sequence[ToolCall]) -> bool:
    if len(ours) != len(theirs):
        return False
    for one, other in zip(ours, theirs, strict=True):
        if one.name != other.name or not same_json(one.arguments, other.arguments):
            return False
    return True


def same_tools(ours: Sequence[Tool], theirs: Sequence[Tool]) -> bool:
    return len(ours) == len(theirs) and all(
        one.name == other.name and one.description == other.description and same_json(one.parameters, other.parameters)
        for one, other in zip(ours, theirs, strict=True)
    )


def same_json(one: JsonValue, other: JsonValue) -> bool:
    """JSON equality, which differs from Python's, where true equals 1."""
    if one != other:
        return False
    kind, other_kind = type(one), type(other)
    if kind is not other_kind and (kind is bool or other_kind is bool):
        return False
    if isinstance(one, dict | Mapping) and isinstance(other, dict | Mapping):
        for name, value in one.items():
            if type(value) is not str and not same_json(value, other[name]):
                return False
    elif kind is not str and isinstance(one, list | tuple | Sequence) and isinstance(other, list | tuple | Sequence):
        return all(map(same_json, one, other))
    return True


def _kinds(arguments: Mapping[str, JsonValue]) -> list[type]:
    """Return the arguments' types; empty if all are text, and `[type]`, which matches nothing, if one is nested."""
    kinds = [type(value) for value in arguments.values()]
    if all(kind is str for kind in kinds):
        return []
    return kinds if all(kind in _PLAIN for kind in kinds) else [type]


# -- the ids of appended messages --------------------------------------------------------------------------------------


def append(
    format: ChatFormat,
    history: Sequence[Message],
    new: Sequence[Message],
    tools: Sequence[Tool],
    *,
    generation: bool,
) -> IntArray:
    """Encodes messages appended to a conversation without rendering all of it again.

    `ChatFormat.extend` takes all messages before the new ones, and a template may look at each. Yet new messages
    usually depend only on the beginning and on the last assistant message with what follows. For such a format only
    those are passed, so the work does not grow with the conversation. This is tested once per format, on synthetic
    conversations of every shape; a template that fails (one that counts turns, or drops old thinking) gets all
    messages.

    Templates may also silently skip messages that they do not support. A later system message that a format would not
    show to the model is refused.

    Return the ids that follow those of `history`; raises FormatError if the format cannot append `new`.
    """
    if any(message.role == "system" for message in (new if history else new[1:])) and not shows_systems(format):
        raise FormatError(
            "the model's chat template shows a system message only at the beginning; put the later ones into that, "
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
    properties = _PROPERTIES.setdefault(format, {})
    if what not in properties:
        properties[what] = find_out(format)
    return properties[what]


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
        full, short = _attempt(format, history, new, tools), near(history)
        if _attempt(format, short, new, tools) != full:
            return False
        if _attempt(format, [_tamed(message) for message in short], new, tools) != full:
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
