"""When tokens came, and what follows from it: seconds of the whole, and the rate of steps that only decode.

Decode steps are those in which all requests run and none reads its prompt: after each has its first token, and before
the one in which the first has its last. An engine may take several at once, and then the first ends somewhere within
them, so that those are not all for one size of batch.

Nothing but the standard library is imported: sides of the comparison run under Pythons that have little in common.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Timed:
    seconds: float
    """From the arrival of the prompts to the last token."""
    read_s: float
    """Seconds until each request had its first token."""
    decode_s: float
    decode_steps: int
    decode_tokens: int
    decode_mean: float
    """Tokens that a request had drawn, on average over the decode steps."""
    ids: list[list[int]]

    @property
    def rate(self) -> float:
        """Tokens per second of the whole, prompts included."""
        return sum(map(len, self.ids)) / self.seconds

    @property
    def decode_rate(self) -> float:
        """Tokens per second of decode steps; no number where there were none."""
        return self.decode_tokens / self.decode_s if self.decode_steps else float("nan")


def joined(parts: Sequence[Timed]) -> Timed:
    """Runs one after the other as one."""
    steps = sum(part.decode_steps for part in parts)
    return Timed(
        seconds=sum(part.seconds for part in parts),
        read_s=sum(part.read_s for part in parts),
        decode_s=sum(part.decode_s for part in parts),
        decode_steps=steps,
        decode_tokens=sum(part.decode_tokens for part in parts),
        decode_mean=sum(part.decode_mean * part.decode_steps for part in parts) / max(steps, 1),
        ids=[ids for part in parts for ids in part.ids],
    )


class Watch:
    """Starts when it is made."""

    def __init__(self, num_requests: int, num_new: int) -> None:
        self.ids: list[list[int]] = [[] for _ in range(num_requests)]
        """What each request has so far: to be kept up to date."""
        self._num_new, self._num_steps = num_new, 0
        self._first: tuple[float, int] | None = None
        self._last: tuple[float, int] | None = None
        """Time and number of all tokens, where decode steps begin and end."""
        self._start_s = time.perf_counter()

    def note_step(self) -> None:
        now = time.perf_counter(), sum(map(len, self.ids))
        if self._first is None:
            if all(self.ids):
                self._first = self._last = now
        elif max(map(len, self.ids)) < self._num_new:
            self._last = now
            self._num_steps += 1

    def timed(self) -> Timed:
        seconds = time.perf_counter() - self._start_s
        (first_s, before), (last_s, after) = self._first or (self._start_s, 0), self._last or (self._start_s, 0)
        mean = (before + after) / 2 / len(self.ids)
        return Timed(
            seconds, first_s - self._start_s, last_s - first_s, self._num_steps, after - before, mean, self.ids
        )
