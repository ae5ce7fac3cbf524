"""A policy that says what a test wants in tokens of its own choice, behind the history of a real gateway's episode."""

import random
from collections.abc import Callable, Sequence

import numpy as np

from m2forge.agents.client import Reply
from m2forge.gateway.divergence import Divergence
from m2forge.gateway.history import History
from m2forge.records import Call, FinishReason
from m2forge.text.format import ChatFormat
from m2forge.text.message import Message, Tool
from tests.gateway.dialogue import array, read, sample

Say = Callable[[Sequence[Message]], Message]


class HistoryClient:
    """See `CompletionClient`."""

    def __init__(self, format: ChatFormat, say: Say, rng: random.Random) -> None:
        self._format, self._say, self._rng = format, say, rng
        self._history = History(format)
        self.calls: dict[str, Call] = {}
        self.asked: list[tuple[Message, ...]] = []
        self.divergences: list[Divergence | None] = []

    async def complete(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Reply:
        opening = self._history.open(messages, tools)
        ids = sample(self._format, self._say(messages), self._rng, tools)
        is_cut = self._rng.random() < 0.1
        if is_cut:
            ids = array(ids[: self._rng.randrange(len(ids))].tolist())
        completion = read(self._format, ids, len(self.calls), tools)
        self._history.record(opening, ids, completion)
        number = len(self.calls)
        logprobs, versions = np.zeros(ids.size, np.float32), np.zeros(ids.size, np.int32)
        reason = FinishReason.LENGTH if is_cut else FinishReason.STOP
        self.calls[f"id-{number}"] = Call(opening.ids, ids, logprobs, versions, reason, 0.0, 0.0)
        self.asked.append(tuple(messages))
        self.divergences.append(opening.divergence)
        return Reply(f"id-{number}", completion.message(), is_cut, opening.ids.size, ids.size)

    async def close(self) -> None: ...
