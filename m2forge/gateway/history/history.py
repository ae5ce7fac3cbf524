"""Maps the messages of a call to tokens: messages in, token ids out; model output keeps its sampled tokens.

    opening = history.open(messages, tools)             before sampling
    history.record(opening, sampled ids, completion)    after sampling; once per sample
    history.release(opening)                            when the prompt is answered or given up

Known messages are matched along the tree of turns and reuse their recorded tokens. The chat format encodes only the new
ones and appends them. Where a client changed something, the call branches: everything before the change keeps its
recorded tokens and the rest is rendered, except that a model answer in the rest that was recorded elsewhere keeps its
sampled tokens (and its thinking, if that is restored).

A completion that was cut off (by its length, an abort, or a client's stop text) stays as sampled; if the conversation
continues, only the format's closing token is appended to it. Unfinished thinking or an incomplete tool call remain so,
and the parser reads from them the same message that the client received.

If the format would have to change recorded tokens, the call branches at the last message that avoids this.

Prompts that were never answered leave nothing behind.

Work per call: one comparison per message, and encoding the new ones. Not thread-safe; one per episode.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain, islice, takewhile

import numpy as np

from m2forge.errors import FormatError, RecordError
from m2forge.gateway.history.turn import (
    Echo,
    Key,
    PathRecord,
    Strand,
    Turn,
    append,
    best_echo,
    is_local,
    key_of,
    near,
    same_tools,
)
from m2forge.records import IntArray
from m2forge.text.format import ChatFormat
from m2forge.text.message import Message, Tool
from m2forge.text.parser import Completion

_MANY_ANSWERS = 2
_MAX_CANDIDATES = 64
"""Maximum number of answers with equal text to compare: the most recent ones."""


class Divergence(StrEnum):
    EDITED_TEXT = "edited_text"
    """A message, a system message included, or the tool list has changed; or messages were reordered."""
    DROPPED_THINKING = "dropped_thinking"
    """An answer came back without its thinking, which is not restored."""
    TRUNCATED = "truncated"
    """Messages before the last ones are missing."""
    SUMMARISED = "summarised"
    """An unknown message replaces missing ones."""
    NEW_CONVERSATION = "new_conversation"
    """Another conversation in the same episode, such as a sub-agent's."""
    TEMPLATE = "template"
    """The chat format renders earlier messages differently because of later ones."""


@dataclass(frozen=True, slots=True, eq=False)
class Opening:
    """The prompt of one call, as tokens."""

    ids: IntArray
    """Token ids that the engine continues."""
    num_recorded: int
    """Number of tokens reused from this episode's recorded prompts and samples."""
    num_encoded: int
    """Number of tokens encoded for this call: new messages and the generation prompt."""
    divergence: Divergence | None
    """Why the call does not simply continue the recorded conversation; None if it does, or is the first."""
    turn: Turn = field(repr=False)
    """Last message of the prompt."""
    strand: Strand = field(repr=False)


@dataclass(slots=True)
class _Block:
    """Messages encoded together, followed by the generation prompt unless it is only the beginning."""

    num_messages: int
    ids: IntArray
    is_opened: bool
    twin: Turn | None = None
    """The answer that follows, as it was sampled elsewhere."""


class History:
    def __init__(self, format: ChatFormat, *, restores_thinking: bool = True) -> None:
        self._format, self._restores_thinking = format, restores_thinking
        self._closing_ids: IntArray = np.array(format.closing_ids[:1], np.int32)
        self._beginnings: dict[tuple[str, ...], list[tuple[tuple[Tool, ...], Turn]]] = {}
        """Roots of conversations by the names of their tools."""
        self._answers = Answers(restores_thinking=restores_thinking)
        self._numbered: list[Turn] = []
        self._tools_of: dict[Turn, tuple[Tool, ...]] = {}

    def open(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Opening:
        """Raises FormatError for a conversation that the chat format cannot express. If anything raises, the
        history is unchanged."""
        root = self._beginning(tools)
        try:
            opening = self._open(root, messages, tools)
        except BaseException:
            self._let_go(root)
            raise
        opening.turn.num_held += 1
        return opening

    def _open(self, root: Turn, messages: Sequence[Message], tools: Sequence[Tool]) -> Opening:
        turn = self._follow(root, messages)
        left_at = turn
        while left_at.number is None and left_at.parent is not None:
            left_at = left_at.parent
        divergence = classify(left_at, messages[left_at.depth :], self._answers.find_answer, is_first=not self._answers)
        if turn.depth < len(messages) or turn.opened is None or turn.strand is None:
            base = self._base(turn, messages, tools)
            try:
                blocks = self._blocks(base, messages, tools, left_at)
            except FormatError:
                messages = self._as_recorded(turn, messages, left_at)
                recorded = self._base(left_at, messages, tools)
                base, blocks = self._rewritten(base, messages, tools)
                if base.depth < recorded.depth:
                    divergence = divergence or Divergence.TEMPLATE
            turn, strand, size, num_recorded = self._attach(base, messages, blocks)
        else:
            strand, size, num_recorded = turn.strand, turn.opened, turn.opened
        return Opening(strand.view(size), num_recorded, size - num_recorded, divergence, turn, strand)

    def record(self, opening: Opening, response_ids: IntArray, completion: Completion) -> Turn:
        """Record the model's answer and the completion parsed from it; returns its turn."""
        for turn in chain((opening.turn,), opening.turn.above()):
            if turn.number is not None and turn is not opening.turn:
                break
            turn.written = max(turn.written or 0, turn.num_known(opening.ids, opening.strand))
        self._number(opening.turn)
        answer = Turn(opening.turn, completion.message(), response_ids)
        answer.strand, answer.start = opening.strand, opening.ids.size
        opening.turn.add(answer)
        self._answers.add(answer)
        self._number(answer)
        turn = answer
        while turn.parent is not None and turn.parent.answered is not turn:
            turn.parent.answered = turn
            turn = turn.parent
        return answer

    def tools_of(self, turn: Turn) -> tuple[Tool, ...]:
        """The tools of the conversation that `turn` belongs to."""
        while turn.parent is not None:
            turn = turn.parent
        return self._tools_of[turn]

    def release(self, opening: Opening) -> None:
        """End a prompt that is answered or given up, and drop turns that exist only for it."""
        opening.turn.num_held -= 1
        self._let_go(opening.turn)

    def dissolve(self) -> None:
        """Break the reference cycles between turns, so that their memory is freed at once. Nothing may follow."""
        ahead = [root for roots in self._beginnings.values() for _, root in roots]
        while ahead:
            turn = ahead.pop()
            ahead += [child for same in turn.children.values() for child in same]
            turn.dissolve()

    # -- matching known messages ---------------------------------------------------------------------------------------

    def _beginning(self, tools: Sequence[Tool]) -> Turn:
        """Return the root, an empty conversation, for these tools."""
        roots = self._beginnings.setdefault(tuple(tool.name for tool in tools), [])
        for known, root in roots:
            if same_tools(known, tools):
                return root
        root = Turn(None, Message("system"))
        root.strand, root.closed = Strand(), 0
        roots.append((tuple(tools), root))
        self._tools_of[root] = tuple(tools)
        return root

    def _let_go(self, turn: Turn) -> None:
        """Drop a turn and its ancestors, from the last one up, as long as no answer and no prompt needs them."""
        while turn.number is None and not turn.num_held and not turn.children:
            if turn.parent is None:
                names = tuple(tool.name for tool in self._tools_of.pop(turn))
                self._beginnings[names] = [pair for pair in self._beginnings[names] if pair[1] is not turn]
                if not self._beginnings[names]:
                    del self._beginnings[names]
                return
            turn.parent.remove(turn)
            turn = turn.parent

    def _follow(self, turn: Turn, messages: Sequence[Message]) -> Turn:
        """Return the last turn that matches the messages, starting from `turn`."""
        restores_thinking = self._restores_thinking
        for message in messages:
            child = turn.latest
            # Fast path without a function call, for the turn that almost always matches.
            if not (
                child is not None
                and child.content == message.content
                and child.role == message.role
                and (
                    child.role != "assistant"
                    or (child.is_words and restores_thinking and not message.thinking and not message.tool_calls)
                    or child.is_plainly_answer(message, restores_thinking)
                )
            ):
                child = turn.find(message, restores_thinking=restores_thinking)
                if child is None:
                    break
            turn = child
        return turn

    # -- where to continue ---------------------------------------------------------------------------------------------

    def _base(self, turn: Turn, messages: Sequence[Message], tools: Sequence[Tool]) -> Turn:
        """Return the turn or its nearest ancestor whose token end is known."""
        while turn.parent is not None and not self._close(turn, messages, tools):
            turn = turn.parent
        return turn

    def _close(self, turn: Turn, messages: Sequence[Message], tools: Sequence[Tool]) -> bool:
        """Find where a turn's tokens end; False if it is inside a block, where the end is unknown."""
        if turn.closed is not None:
            return True
        if turn.start is not None:
            self._close_answer(turn)
        elif turn.opened is not None and turn.strand is not None:
            try:
                appended = append(self._format, self._past(turn, messages), (), tools, generation=True)
            except FormatError:
                return False
            size = turn.opened - appended.size
            if size >= 0 and np.array_equal(turn.strand.view(turn.opened)[size:], appended):
                turn.closed = size
        return turn.closed is not None

    def _close_answer(self, turn: Turn) -> None:
        """Append the sampled tokens to their prompt, with a closing token if they do not end in one."""
        if turn.closed is not None or turn.response_ids is None or turn.strand is None or turn.start is None:
            return
        ids = turn.response_ids
        if not ids.size or int(ids[-1]) not in self._format.closing_ids:
            ids = np.concatenate((ids, self._closing_ids))
        turn.strand = turn.strand.grow(turn.start, ids)
        turn.closed = turn.start + ids.size

    def _past(self, turn: Turn, messages: Sequence[Message]) -> list[Message]:
        """Return the messages up to `turn` as recorded, or only those that the format needs to see."""
        tail: list[Message] = []
        at = turn
        while at.parent is not None:
            tail.append(at.complete(messages[at.depth - 1]))
            if at.role == "assistant":
                break
            at = at.parent
        head = list(takewhile(lambda message: message.role != "assistant", islice(messages, max(at.depth - 1, 0))))
        if len(head) + len(tail) == turn.depth or is_local(self._format):
            return head + tail[::-1]
        return self._as_recorded(turn, messages[: turn.depth], turn)

    def _as_recorded(self, turn: Turn, messages: Sequence[Message], after: Turn) -> list[Message]:
        """Return all messages with their recorded thinking; see `_blocks` for `after`."""
        restored = list(messages)
        trail, since = Trail(after), after.depth - 1
        for index in range(turn.depth, len(restored)):
            twin = self._answers.twin(restored[index], trail, index - since)
            if twin is not None:
                restored[index], trail, since = twin.complete(restored[index]), Trail(twin), index
        at: Turn = turn
        while at.parent is not None:
            restored[at.depth - 1] = at.complete(restored[at.depth - 1])
            at = at.parent
        return restored

    # -- encoding new messages -----------------------------------------------------------------------------------------

    def _blocks(self, base: Turn, messages: Sequence[Message], tools: Sequence[Tool], after: Turn) -> list[_Block]:
        """`after`: the recorded turn after which answers are searched first."""
        past, pending = self._past(base, messages), messages[base.depth :]
        blocks: list[_Block] = []
        if not past and len(pending) > 1 and pending[0].role == "system":
            blocks += self._system_block(pending[0], tools)
        at = len(blocks)
        past = [*past, *pending[:at]]
        trail, since = Trail(after), after.depth - 1 - base.depth
        for index in range(at, len(pending)):
            twin = self._answers.twin(pending[index], trail, index - since)
            if twin is not None:
                trail, since = Trail(twin), index
                new = pending[at:index]
                ids = append(self._format, past, new, tools, generation=True)
                blocks.append(_Block(len(new), ids, is_opened=True, twin=twin))
                past = [*past, *new, twin.complete(pending[index])]
                past = near(past) if is_local(self._format) else past
                at = index + 1
        ids = append(self._format, past, pending[at:], tools, generation=True)
        return [*blocks, _Block(len(pending) - at, ids, is_opened=True)]

    def _system_block(self, system: Message, tools: Sequence[Tool]) -> Iterator[_Block]:
        """Encode the system message separately, since many conversations share it; nothing if the format cannot."""
        try:
            ids = append(self._format, (), [system], tools, generation=False)
        except FormatError:
            return
        yield _Block(1, ids, is_opened=False)

    def _rewritten(self, base: Turn, restored: list[Message], tools: Sequence[Tool]) -> tuple[Turn, list[_Block]]:
        """Return the nearest turn above `base` after which the format can render the rest, and that rest."""
        above = list(base.above()) or [base]
        num_refused, at, step = 0, 0, 1
        written = self._written_after(above[at], restored, tools)
        while isinstance(written, FormatError):
            if at == len(above) - 1:
                raise written
            num_refused, at, step = at + 1, min(at + step, len(above) - 1), 2 * step
            written = self._written_after(above[at], restored, tools)
        while num_refused < at:
            middle = (num_refused + at) // 2
            nearer = self._written_after(above[middle], restored, tools)
            if isinstance(nearer, FormatError):
                num_refused = middle + 1
            else:
                written, at = nearer, middle
        return written

    def _written_after(
        self, turn: Turn, restored: list[Message], tools: Sequence[Tool]
    ) -> tuple[Turn, list[_Block]] | FormatError:
        base = self._base(turn, restored, tools)
        new = restored[base.depth :]
        try:
            ids = append(self._format, restored[: base.depth], new, tools, generation=True)
        except FormatError as error:
            return error
        return base, [_Block(len(new), ids, is_opened=True)]

    def _attach(
        self, turn: Turn, messages: Sequence[Message], blocks: Sequence[_Block]
    ) -> tuple[Turn, Strand, int, int]:
        """Append blocks to a turn. Returns the last turn, its strand and size, and the number of recorded tokens."""
        size = turn.closed or 0
        strand = Strand() if turn.strand is None else turn.strand
        num_recorded = size
        for block in blocks:
            strand = strand.grow(size, block.ids)
            size += block.ids.size
            for message in messages[turn.depth : turn.depth + block.num_messages]:
                turn = self._step(turn, message)
            # An answer that the format renders again keeps its sampled tokens.
            if turn.opened is None and not (block.num_messages and turn.start is not None):
                turn.strand = strand
                turn.closed = size if not block.is_opened else None if block.num_messages else turn.closed
                turn.opened = size if block.is_opened else None
            if block.twin is not None and block.twin.response_ids is not None:
                answer = Turn(turn, block.twin.complete(messages[turn.depth]), block.twin.response_ids)
                answer.strand, answer.start = strand, size
                turn.add(answer)
                self._close_answer(answer)
                turn, strand, size = answer, answer.strand, answer.closed or size
                num_recorded += block.twin.response_ids.size
        return turn, strand, size, num_recorded

    def _step(self, turn: Turn, message: Message) -> Turn:
        child = turn.find(message, restores_thinking=self._restores_thinking)
        if child is None:
            child = Turn(turn, message)
            turn.add(child)
        return child

    # -- journal -------------------------------------------------------------------------------------------------------

    def path(self, opening: Opening) -> tuple[PathRecord, IntArray]:
        """Return what the journal needs to restore this prompt, with the ids not yet in it; call before `record`."""
        turns: list[Turn] = []
        turn = opening.turn
        while turn.number is None and turn.parent is not None:
            turns.append(turn)
            turn = turn.parent
        prefix: Turn | None = turn if turn.number is not None else None
        start = 0
        while prefix is not None and not (start := prefix.num_written(opening.ids, opening.strand)):
            prefix = prefix.parent
        number = -1 if prefix is None or prefix.number is None else prefix.number
        record = PathRecord(
            parent=-1 if turn.number is None else turn.number,
            tools=self._tools_of[turn] if turn.number is None else (),
            prefix=number,
            start=start,
            turns=tuple(turn.record(opening.ids, opening.strand) for turn in reversed(turns)),
        )
        return record, opening.ids[start:]

    def restore(self, record: PathRecord, ids: IntArray) -> Opening:
        """Restore a prompt described by `path`; all earlier prompts must have been restored in order."""
        try:
            parent = self._beginning(record.tools) if record.parent < 0 else self._numbered[record.parent]
            prefix = None if record.prefix < 0 else self._numbered[record.prefix]
        except IndexError:
            raise RecordError(f"a prompt refers to turn {record.parent}, but {len(self._numbered)} are known") from None
        strand = Strand()
        if prefix is not None:
            self._close_answer(prefix)
            strand = strand if prefix.strand is None else prefix.strand
        strand, size = strand.grow(record.start, ids), record.start + ids.size
        for turn_record in record.turns:
            parent = Turn.restored(parent, turn_record, strand)
        if parent.opened is None:
            parent.strand, parent.opened = strand, size
        if parent.opened == size and parent.strand is strand:
            parent.written = size
        self._number(parent)
        return Opening(strand.view(size), record.start, ids.size, None, parent, strand)

    def _number(self, turn: Turn) -> None:
        """Number a turn and its ancestors that have no number yet, from the first one down."""
        above: list[Turn] = []
        at: Turn | None = turn
        while at is not None and at.number is None:
            above.append(at)
            at = at.parent
        for at in reversed(above):
            at.number = len(self._numbered)
            self._numbered.append(at)


# -- why a call does not continue the recorded conversation ------------------------------------------------------------


def classify(
    left_at: Turn, remaining: Sequence[Message], known: Callable[[Message], Turn | None], *, is_first: bool
) -> Divergence | None:
    """Classifies why a call does not simply continue the recorded conversation, by comparing messages.

    The inputs are the messages after the last one found in the recorded conversation (`remaining`), and what was
    recorded from there on. Only what the model answered counts as recorded. The first rule that fits applies:

    1. Nothing is recorded, or `remaining` is empty: no divergence. Repeating a prompt draws another sample of it.
    2. `remaining` contains model answers recorded elsewhere. If fewer messages precede them than before: TRUNCATED if
       all of those are known, SUMMARISED if one is not. Otherwise: DROPPED_THINKING if `remaining` starts with a
       recorded answer without its thinking, else EDITED_TEXT, which also covers another system message or tool list.
    3. No answer was recorded after the point of departure: no divergence if the model has answered before it, else
       NEW_CONVERSATION. A departure before the model's first answer with another client message is one, too.
    4. Departure at an answer: DROPPED_THINKING or EDITED_TEXT. Departure with another user message where two or more
       answers had followed: SUMMARISED. Anything else: EDITED_TEXT.

    TEMPLATE is not found here: it is a continuing call that the chat format cannot render without changing recorded
    tokens.

    `left_at`: the call's last recorded turn; `remaining`: its messages after that one; `known`: returns a model answer
    that matches the message, ignoring thinking; `is_first`: whether the episode has no answer yet.
    """
    if is_first or not remaining:
        return None
    turns = [known(message) if message.role == "assistant" else None for message in remaining]
    recorded_at = [index for index, turn in enumerate(turns) if turn is not None]
    if recorded_at:
        return _classify_recorded(left_at, remaining, turns, recorded_at[-1])
    after = left_at.answered
    if after is None:
        return None if left_at.num_sampled else Divergence.NEW_CONVERSATION
    if remaining[0].role == "assistant":
        return _classify_answer(left_at, remaining[0])
    if not left_at.num_sampled and after.role != "assistant":
        return Divergence.NEW_CONVERSATION
    if remaining[0].role == "user" and _num_answers(left_at) >= _MANY_ANSWERS:
        return Divergence.SUMMARISED
    return Divergence.EDITED_TEXT


def _classify_recorded(
    left_at: Turn, remaining: Sequence[Message], turns: Sequence[Turn | None], last: int
) -> Divergence:
    twin = turns[last]
    num_missing = twin.depth - (left_at.depth + last + 1) if twin is not None else 0
    if num_missing <= 0:
        return _classify_answer(left_at, remaining[0])
    recorded = _keys_above(twin)
    is_known = all(
        turn is not None or key_of(message) in recorded for turn, message in zip(turns, remaining[:last], strict=False)
    )
    return Divergence.TRUNCATED if is_known else Divergence.SUMMARISED


def _classify_answer(left_at: Turn, message: Message) -> Divergence:
    children = left_at.children.get(key_of(message), ())
    if any(child.echo(message) is Echo.WITHOUT_THINKING for child in children):
        return Divergence.DROPPED_THINKING
    return Divergence.EDITED_TEXT


def _keys_above(turn: Turn | None) -> set[object]:
    keys: set[object] = set()
    while turn is not None:
        keys.add(key_of(turn.message))
        turn = turn.parent
    return keys


def _num_answers(turn: Turn) -> int:
    """Count the answers recorded below a turn along its latest branch, up to `_MANY_ANSWERS`."""
    count, below = 0, turn.answered
    while below is not None and count < _MANY_ANSWERS:
        count += below.response_ids is not None
        below = below.answered
    return count


# -- the model's earlier answers ---------------------------------------------------------------------------------------


class Trail:
    """Walks the most recently recorded turns after `after`; `at` must be called with increasing distances."""

    __slots__ = ("_num_steps", "_turn", "after")

    def __init__(self, after: Turn) -> None:
        self.after = after
        self._turn: Turn | None = after
        self._num_steps = 0

    def at(self, distance: int) -> Turn | None:
        """Return the turn `distance` messages after `after`; None if fewer were recorded."""
        while self._turn is not None and self._num_steps < distance:
            self._turn = self._turn.answered
            self._num_steps += 1
        return self._turn


class Answers:
    """Finds the model's earlier answers in an episode wherever a client puts them.

    An answer keeps its sampled tokens at any position, so messages with equal text must be matched to the right answer.
    Matching tool call ids decide. Otherwise, in order: the answer recorded at the same distance in messages from the
    previous answer; the nearest to that position below that answer; one with the same thinking; the most recent.
    """

    def __init__(self, *, restores_thinking: bool) -> None:
        self._least = Echo.WITHOUT_THINKING if restores_thinking else Echo.SAME
        self._by_key: dict[Key, list[Turn]] = {}
        self._by_call: dict[str, Turn] = {}
        """Answers by the id of their first tool call."""

    def __len__(self) -> int:
        """Number of distinct answers."""
        return len(self._by_key)

    def add(self, answer: Turn) -> None:
        self._by_key.setdefault(key_of(answer.message), []).append(answer)
        if answer.message.tool_calls and answer.message.tool_calls[0].id:
            self._by_call[answer.message.tool_calls[0].id] = answer

    def find_answer(self, message: Message) -> Turn | None:
        """Return an answer that matches `message`, ignoring thinking."""
        named = self._named(message, Echo.WITHOUT_THINKING)
        if named is not None:
            return named
        turns = self._by_key.get(key_of(message), ())
        if turns and turns[-1].echo(message) is Echo.SAME and turns[-1].has_ids_of(message):
            return turns[-1]
        return best_echo(turns[-_MAX_CANDIDATES:], message, Echo.WITHOUT_THINKING)

    def twin(self, message: Message, trail: Trail, distance: int) -> Turn | None:
        """Return an answer whose tokens can be reused for `message`, preferably one recorded `distance` messages after
        the start of the trail."""
        if message.role != "assistant":
            return None
        found = self._named(message, self._least) or self._following(message, trail.at(distance))
        if found is not None:
            return found
        turns = self._by_key.get(key_of(message), ())
        return best_echo(turns[-_MAX_CANDIDATES:], message, self._least, trail.after, distance)

    def _named(self, message: Message, least: Echo) -> Turn | None:
        """Return the answer with the same tool call ids as `message`."""
        if not message.tool_calls:
            return None
        turn = self._by_call.get(message.tool_calls[0].id)
        if turn is None or turn.echo(message).value < least.value or not turn.has_ids_of(message):
            return None
        return turn

    def _following(self, message: Message, turn: Turn | None) -> Turn | None:
        """Return the answer at this position of the last recorded conversation if it matches `message`: clients that
        edit one message send the others unchanged."""
        if turn is None or turn.parent is None or turn.response_ids is None:
            return None
        rivals = turn.parent.children.get(key_of(message), ())
        recorded = [rival for rival in rivals if rival.response_ids is not None and rival.number is not None]
        found = best_echo(recorded, message, self._least)
        return found if found is not None and found.has_ids_of(message) else None
