"""What decides how many drafts a step makes, and what it hears for that; the plain one, which always makes as many."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Protocol

MEMORY_DRAFTS = 500
"""Verified drafts over which is averaged how often they stand."""
OLD_DRAFTS = 16
"""As how many those from before a trial count, so that a few trials notice text that has changed."""
HOPED_DRAFTS, HOPED_SHARE = 6, 0.9
"""What is believed before there are any."""


@dataclass(frozen=True)
class Moment:
    """Of steps that begin, what a depth is chosen by."""

    num_sequences: int
    num_coming: int = 0
    """Prompts are being read, and when those that wait are read too, so many sequences will run."""
    is_apart: bool = True
    """Modules that catch up need a step that else would be one of many."""
    num_behind: Sequence[int] = ()
    """By module: tokens that it has not run, and the main model has; none where nothing is said."""
    num_wanted: float = inf
    """Tokens that a sequence will still sample, on average, if nothing stops it."""
    most_behind: float = inf
    """Tokens on which modules catch up in one step."""


class DepthChooser(Protocol):
    def choose(self, moment: Moment) -> int: ...

    def note_steps(self, depth: int, num_sequences: int, num_steps: int, duration_s: float) -> None:
        """Steps verified and made `depth` drafts of each sequence, and did nothing else; all of them took so long."""
        ...

    def note_catch_up(self, num_sequences: int, duration_s: float) -> None:
        """A step in which modules caught up took so long, which else would have been one of many."""
        ...

    def note_reading(self, depth: int, num_sequences: int, num_tokens: int, duration_s: float) -> None:
        """In a step that reads, the first modules ran over so many tokens, which took so long besides the rest."""
        ...

    def note_end(self, num_read: int, num_sampled: int) -> None:
        """A request has ended: so many tokens were read for it, not counting those that it sampled."""
        ...

    def note_drafts(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """By place: how many drafts were verified, and how many of them stood with all before them."""
        ...

    def tokens_per_step(self, depth: int) -> float:
        """Of one sequence, as far as is known."""
        ...


class Shares:
    """How often the first drafts are all accepted, by their number."""

    def __init__(self) -> None:
        self._num: list[float] = []
        """By place: drafts before which all stood."""
        self._num_stood: list[float] = []

    def note(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        num_new = max(len(drafted) - len(self._num), 0)
        self._num += [float(HOPED_DRAFTS)] * num_new
        self._num_stood += [HOPED_DRAFTS * HOPED_SHARE] * num_new
        share_before = 1.0
        for place, (num, num_stood) in enumerate(zip(drafted, accepted, strict=True)):
            if not num:
                break
            self._num[place] += num * share_before
            self._num_stood[place] += num_stood
            self._keep(place, MEMORY_DRAFTS)
            share_before = num_stood / num

    def age(self) -> None:
        for place in range(len(self._num)):
            self._keep(place, OLD_DRAFTS)

    def _keep(self, place: int, most: int) -> None:
        scale = min(most / self._num[place], 1.0)
        self._num[place] *= scale
        self._num_stood[place] *= scale

    def tokens_per_step(self, depth: int) -> float:
        total, share = 1.0, 1.0
        for place in range(depth):
            is_known = place < len(self._num)
            share *= self._num_stood[place] / self._num[place] if is_known else HOPED_SHARE
            total += share
        return total


class FixedDepth:
    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._shares = Shares()

    def choose(self, moment: Moment) -> int:
        return self.depth

    def note_steps(self, depth: int, num_sequences: int, num_steps: int, duration_s: float) -> None:
        pass

    def note_catch_up(self, num_sequences: int, duration_s: float) -> None:
        pass

    def note_reading(self, depth: int, num_sequences: int, num_tokens: int, duration_s: float) -> None:
        pass

    def note_end(self, num_read: int, num_sampled: int) -> None:
        pass

    def note_drafts(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        self._shares.note(drafted, accepted)

    def tokens_per_step(self, depth: int) -> float:
        return self._shares.tokens_per_step(depth)
