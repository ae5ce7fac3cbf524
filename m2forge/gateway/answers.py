"""Finds the model's earlier answers in an episode wherever a client puts them.

An answer keeps its sampled tokens at any position, so messages with equal text must be matched to the right answer.
Matching tool call ids decide. Otherwise, in order: the answer recorded at the same distance in messages from the
previous answer; the nearest to that position below that answer; one with the same thinking; the most recent.
"""

from m2forge.gateway.turn import Echo, Key, Turn, best_echo, key_of
from m2forge.text.message import Message

_MAX_CANDIDATES = 64
"""Maximum number of answers with equal text to compare: the most recent ones."""


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

    def said(self, message: Message) -> Turn | None:
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
