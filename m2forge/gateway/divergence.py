"""Why a call does not simply continue what was recorded: a class for each, found by comparing messages.

Compared are the messages that were not found where the conversation was followed (`rest`), and what had been recorded
from there on. Only what the model answered counts as recorded. The rules, first that fits:

1. Nothing is recorded, or nothing is left to compare: no divergence. The same prompt again is another sample of it.
2. The rest holds answers of the model that were recorded elsewhere. Fewer messages stand before them than did:
   TRUNCATED if none of those is unknown, SUMMARISED if one is. As many or more: the first of the rest is a recorded
   answer without its thinking, DROPPED_THINKING; else EDITED_TEXT, which is also another system text or tool list.
3. Nothing was answered after the point where the conversation was left: it is continued if the model has spoken in it,
   else it is a NEW_CONVERSATION, as is one that leaves before the model first spoke and brings another message.
4. Left at an answer: DROPPED_THINKING or EDITED_TEXT. Left for another user's message where the model had spoken twice
   or more: SUMMARISED. Anything else: EDITED_TEXT.

TEMPLATE is not found here: it is a call that continues, but which the chat format cannot write without changing tokens
that were recorded.
"""

from collections.abc import Callable, Sequence
from enum import StrEnum

from m2forge.gateway.turn import Echo, Turn, key_of
from m2forge.text.message import Message

_MANY_ANSWERS = 2


class Divergence(StrEnum):
    EDITED_TEXT = "edited_text"
    """A message, the system's included, or the tool list reads otherwise than it did; or messages changed places."""
    DROPPED_THINKING = "dropped_thinking"
    """An answer came back without its thinking, which is not restored."""
    TRUNCATED = "truncated"
    """Messages before the last ones are gone."""
    SUMMARISED = "summarised"
    """Messages are gone and an unknown one stands for them."""
    NEW_CONVERSATION = "new_conversation"
    """Another conversation in the same episode, such as a sub-agent's."""
    TEMPLATE = "template"
    """The chat format writes earlier messages otherwise because of later ones."""


def classify(
    left_at: Turn, rest: Sequence[Message], known: Callable[[Message], Turn | None], *, is_first: bool
) -> Divergence | None:
    """`left_at`: the last recorded turn of the call's conversation; `rest`: its messages after that one; `known`: an
    answer of the model that the message may be, thinking aside; `is_first`: nothing was answered yet."""
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
    """Answers recorded below a turn, along the line of the last one; no more than matter are counted."""
    count, below = 0, turn.answered
    while below is not None and count < _MANY_ANSWERS:
        count += below.response_ids is not None
        below = below.answered
    return count
