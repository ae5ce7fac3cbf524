"""A policy whose every token a test chooses, behind the history of a real gateway's episode."""

import random
from collections.abc import Callable, Sequence

import numpy as np

from m2forge.agents.client import Reply
from m2forge.gateway.history.history import Divergence, History
from m2forge.records import Call, FinishReason
from m2forge.text.format import ChatFormat
from m2forge.text.message import Message, Tool
from tests.gateway.dialogue import array, read, sample

Draw = Callable[[Sequence[Tool]], Sequence[int]]
"""The tokens of an answer; one without a stop token is cut off."""


def drawn(format: ChatFormat, say: Callable[[], Message], rng: random.Random, *, cut_share: float = 0.1) -> Draw:
    """What is said, in tokens of a model's own choice, some of it cut off."""

    def draw(tools: Sequence[Tool]) -> Sequence[int]:
        ids: list[int] = sample(format, say(), rng, tools).tolist()
        return ids[: rng.randrange(len(ids))] if rng.random() < cut_share else ids

    return draw


class HistoryClient:
    """See `CompletionClient`."""

    def __init__(self, format: ChatFormat, draw: Draw) -> None:
        self._format, self._draw = format, draw
        self._history = History(format)
        self.calls: dict[str, Call] = {}
        self.asked: list[tuple[Message, ...]] = []
        self.divergences: list[Divergence | None] = []

    async def complete(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Reply:
        opening = self._history.open(messages, tools)
        ids = array(self._draw(tools))
        is_cut = not ids.size or int(ids[-1]) not in self._format.stop_ids
        completion = read(self._format, ids, len(self.calls), tools)
        self._history.record(opening, ids, completion)
        number = len(self.calls)
        logprobs, versions = np.zeros(ids.size, np.float32), np.zeros(ids.size, np.int32)
        reason = FinishReason.LENGTH if is_cut else FinishReason.STOP
        self.calls[f"id-{number}"] = Call(opening.ids, ids, logprobs, versions, reason, 0.0, 0.0)
        self.asked.append(tuple(messages))
        self.divergences.append(opening.divergence)
        return Reply(f"id-{number}", completion.message(), is_cut, opening.ids.size, ids.size)
