"""Everything that the model said in an episode, found again wherever a client puts it.

An answer keeps its sampled tokens in any place, so it matters which one a message is, where several read the same. The
ids of its calls say it. Else it is the one that was recorded so many messages after the answer before it; then the
nearest to that place, below that answer; then one with the same thinking; then the latest.
"""

from m2forge.gateway.turn import Echo, Key, Turn, best_echo, key_of
from m2forge.text.message import Message

_MAX_CANDIDATES = 64
"""Of answers that read the same, the last ones that are looked at."""


class Trail:
    """The turns after one, along what was recorded last; asked for ever greater distances."""

    __slots__ = ("_num_steps", "_turn", "after")

    def __init__(self, after: Turn) -> None:
        self.after = after
        self._turn: Turn | None = after
        self._num_steps = 0

    def at(self, distance: int) -> Turn | None:
        """The turn so many messages after `after`, if so many were recorded."""
        while self._turn is not None and self._num_steps < distance:
            self._turn = self._turn.answered
            self._num_steps += 1
        return self._turn


class Answers:
    def __init__(self, *, restores_thinking: bool) -> None:
        self._least = Echo.WITHOUT_THINKING if restores_thinking else Echo.SAME
        self._by_key: dict[Key, list[Turn]] = {}
        self._by_call: dict[str, Turn] = {}
        """By the ids of their first calls."""

    def __len__(self) -> int:
        """How many differ."""
        return len(self._by_key)

    def add(self, answer: Turn) -> None:
        self._by_key.setdefault(key_of(answer.message), []).append(answer)
        if answer.message.tool_calls and answer.message.tool_calls[0].id:
            self._by_call[answer.message.tool_calls[0].id] = answer

    def said(self, message: Message) -> Turn | None:
        """An answer that `message` may be, thinking aside."""
        named = self._named(message, Echo.WITHOUT_THINKING)
        if named is not None:
            return named
        turns = self._by_key.get(key_of(message), ())
        if turns and turns[-1].echo(message) is Echo.SAME and turns[-1].has_ids_of(message):
            return turns[-1]
        return best_echo(turns[-_MAX_CANDIDATES:], message, Echo.WITHOUT_THINKING)

    def twin(self, message: Message, trail: Trail, distance: int) -> Turn | None:
        """An answer whose tokens may stand for `message`, rather one that came so many messages after the trail's
        beginning."""
        if message.role != "assistant":
            return None
        found = self._named(message, self._least) or self._following(message, trail.at(distance))
        if found is not None:
            return found
        turns = self._by_key.get(key_of(message), ())
        return best_echo(turns[-_MAX_CANDIDATES:], message, self._least, trail.after, distance)

    def _named(self, message: Message, least: Echo) -> Turn | None:
        """The answer whose calls have the ids of this one's."""
        if not message.tool_calls:
            return None
        turn = self._by_call.get(message.tool_calls[0].id)
        if turn is None or turn.echo(message).value < least.value or not turn.has_ids_of(message):
            return None
        return turn

    def _following(self, message: Message, turn: Turn | None) -> Turn | None:
        """The answer at that place in what was recorded last, if it is this one: clients that edit one message send
        the others as they were."""
        if turn is None or turn.parent is None or turn.response_ids is None:
            return None
        rivals = turn.parent.children.get(key_of(message), ())
        recorded = [rival for rival in rivals if rival.response_ids is not None and rival.number is not None]
        found = best_echo(recorded, message, self._least)
        return found if found is not None and found.has_ids_of(message) else None
