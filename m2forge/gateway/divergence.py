"""Classifies why a call does not simply continue the recorded conversation, by comparing messages.

The inputs are the messages after the last one found in the recorded conversation (`rest`), and what was recorded from
there on. Only what the model answered counts as recorded. The first rule that fits applies:

1. Nothing is recorded, or `rest` is empty: no divergence. Repeating a prompt draws another sample of it.
2. `rest` contains model answers recorded elsewhere. If fewer messages precede them than before: TRUNCATED if all of
   those are known, SUMMARISED if one is not. Otherwise: DROPPED_THINKING if `rest` starts with a recorded answer
   without its thinking, else EDITED_TEXT, which also covers another system message or tool list.
3. No answer was recorded after the point of departure: no divergence if the model has answered before it, else
   NEW_CONVERSATION. A departure before the model's first answer with another client message is one, too.
4. Departure at an answer: DROPPED_THINKING or EDITED_TEXT. Departure with another user message where two or more
   answers had followed: SUMMARISED. Anything else: EDITED_TEXT.

TEMPLATE is not found here: it is a continuing call that the chat format cannot render without changing recorded
tokens.
"""

from collections.abc import Callable, Sequence
from enum import StrEnum

from m2forge.gateway.turn import Echo, Turn, key_of
from m2forge.text.message import Message

_MANY_ANSWERS = 2


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


def classify(
    left_at: Turn, rest: Sequence[Message], known: Callable[[Message], Turn | None], *, is_first: bool
) -> Divergence | None:
    """`left_at`: the call's last recorded turn; `rest`: its messages after that one; `known`: returns a model answer
    that matches the message, ignoring thinking; `is_first`: whether the episode has no answer yet."""
    if is_first or not rest:
        return None
    found = [known(message) if message.role == "assistant" else None for message in rest]
    kept = [index for index, turn in enumerate(found) if turn is not None]
    if kept:
        return _classify_kept(left_at, rest, found, kept[-1])
    after = left_at.answered
    if after is None:
        return None if left_at.num_sampled else Divergence.NEW_CONVERSATION
    if rest[0].role == "assistant":
        return _classify_answer(left_at, rest[0])
    if not left_at.num_sampled and after.role != "assistant":
        return Divergence.NEW_CONVERSATION
    if rest[0].role == "user" and _num_answers(left_at) >= _MANY_ANSWERS:
        return Divergence.SUMMARISED
    return Divergence.EDITED_TEXT


def _classify_kept(left_at: Turn, rest: Sequence[Message], found: Sequence[Turn | None], last: int) -> Divergence:
    twin = found[last]
    num_missing = twin.depth - (left_at.depth + last + 1) if twin is not None else 0
    if num_missing <= 0:
        return _classify_answer(left_at, rest[0])
    recorded = _keys_above(twin)
    is_known = all(
        turn is not None or key_of(message) in recorded for turn, message in zip(found, rest[:last], strict=False)
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
