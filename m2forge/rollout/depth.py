"""The interface that chooses a step's speculation depth, the measurements it receives, and a fixed depth."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Protocol

MEMORY_DRAFTS = 500
"""Window, in verified drafts, of the averaged acceptance rate."""
OLD_DRAFTS = 16
"""Weight, in drafts, of the history before a trial, so that a few trials notice text that has changed."""
HOPED_DRAFTS, HOPED_SHARE = 6, 0.9
"""Prior: number of drafts and their acceptance rate."""


@dataclass(frozen=True)
class Moment:
    """The state of the batch by which the next steps' depth is chosen."""

    num_sequences: int
    num_coming: int = 0
    """During prefill, the number of sequences that will run once all waiting prompts are prefilled; else 0."""
    is_apart: bool = True
    """Whether catching up takes a separate step instead of one of several decode steps run together."""
    num_behind: Sequence[int] = ()
    """By MTP module: tokens that the main model has run and the module has not; empty if unknown."""
    num_wanted: float = inf
    """Average number of tokens a sequence still samples unless it stops early."""
    most_behind: float = inf
    """Largest number of tokens that modules catch up on in one step."""


class DepthChooser(Protocol):
    def choose(self, moment: Moment) -> int: ...

    def note_steps(self, depth: int, num_sequences: int, num_steps: int, duration_s: float) -> None:
        """Record that `num_steps` steps took `duration_s` in total; they verified and made `depth` drafts per sequence
        and did nothing else."""
        ...

    def note_catch_up(self, num_sequences: int, duration_s: float) -> None:
        """Record the duration of a separate step in which modules caught up."""
        ...

    def note_reading(self, depth: int, num_sequences: int, num_tokens: int, duration_s: float) -> None:
        """Record that, in a prefill step, the first `depth` modules ran `num_tokens` tokens in `duration_s` of extra
        time."""
        ...

    def note_end(self, num_read: int, num_sampled: int) -> None:
        """Record the prefilled and the sampled tokens of a request that ended."""
        ...

    def note_drafts(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Record, by draft index, how many drafts were verified and how many were accepted with all before them."""
        ...

    def tokens_per_step(self, depth: int) -> float:
        """Expected tokens that one sequence samples in a step."""
        ...


class Shares:
    """Acceptance rates by draft index, given that all earlier drafts are accepted."""

    def __init__(self) -> None:
        self._num: list[float] = []
        """By draft index: verified drafts whose predecessors were all accepted."""
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
