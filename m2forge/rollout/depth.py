"""How many drafts a step makes for each sequence: as many as give the most tokens in a second, none where none pays.

    tokens per second of depth K = (1 + Σ_{k ≤ K} share_k) / seconds of a step of depth K

share_k, how often the first k drafts are all accepted, is a property of the text: one running average. Seconds depend
on how many sequences run together: they are kept by powers of two. The numerator bends down with K and the denominator
is almost a line, so that there is one summit: it is enough to compare the best depth so far with its neighbours. One
that was never measured is tried at once, for a few steps; all others, because text and lengths change, now and then.

Steps without drafts do not run the modules, which catch up when there are drafts again (runner.py): where none pays,
only the trials cost anything. As a trial begins with catching up, those that change nothing become rare.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Protocol

TRIAL_SAMPLES = 3
"""Measured steps that a trial needs."""
TRIAL_STEPS = 24
"""Steps after which a trial is given up: there were others between, that read prompts or caught up."""
PAUSE_STEPS = 256
"""Steps between two trials, of which a trial takes about a fiftieth; twice as many after each that changed nothing."""
MAX_PAUSE_STEPS = 2048
MEMORY_STEPS = 9
"""Last measurements, whose median counts: it forgets a step that had to compile something."""
MEMORY_DRAFTS = 500
"""Verified drafts over which a share is averaged."""
OLD_DRAFTS = 16
"""As how many those from before a trial count, so that a few trials notice text that has changed."""


class DepthChooser(Protocol):
    def choose(self, num_sequences: int) -> int:
        """For the step that begins."""
        ...

    def note_step(self, depth: int, num_sequences: int, duration_s: float) -> None:
        """A step verified and made `depth` drafts of each sequence, and did nothing else."""
        ...

    def note_drafts(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """By place: how many drafts were verified, and how many of them stood with all before them."""
        ...


class FixedDepth:
    def __init__(self, depth: int) -> None:
        self.depth = depth

    def choose(self, num_sequences: int) -> int:
        return self.depth

    def note_step(self, depth: int, num_sequences: int, duration_s: float) -> None:
        pass

    def note_drafts(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        pass


@dataclass
class _Size:
    """What is known of batches of about one size."""

    durations_s: list[deque[float]]
    """By depth."""
    trial: int | None = None
    """The depth that is being tried."""
    num_steps: int = 0
    """Of this trial, or since the last one."""
    num_samples: int = 0
    pause_steps: int = 0
    rival: int | None = None
    """The best depth when the trial began."""
    tried_at: dict[int, int] = field(default_factory=dict)
    """By depth: the number of its last trial."""


class MeasuredDepth:
    def __init__(self, max_depth: int) -> None:
        self.max_depth = max_depth
        self._shares, self._num_drafts = [1.0] * max_depth, [0] * max_depth
        self._sizes: defaultdict[int, _Size] = defaultdict(
            lambda: _Size([deque(maxlen=MEMORY_STEPS) for _ in range(max_depth + 1)])
        )

    def choose(self, num_sequences: int) -> int:
        if self.max_depth == 0:
            return 0
        size = self._sizes[num_sequences.bit_length()]
        if size.trial is not None:
            self._end_trial_if_due(size)
        if size.trial is None and size.num_steps >= size.pause_steps:
            self._start_trial(size)
        size.num_steps += 1
        return self._best(size) if size.trial is None else size.trial

    def note_step(self, depth: int, num_sequences: int, duration_s: float) -> None:
        size = self._sizes[num_sequences.bit_length()]
        size.durations_s[depth].append(duration_s)
        size.num_samples += depth == size.trial

    def note_drafts(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        for place, (num, num_stood) in enumerate(zip(drafted, accepted, strict=True)):
            if num:
                self._num_drafts[place] = min(self._num_drafts[place] + num, MEMORY_DRAFTS)
                weight = min(num / self._num_drafts[place], 1.0)
                self._shares[place] += (num_stood / num - self._shares[place]) * weight

    def _start_trial(self, size: _Size) -> None:
        """Of the neighbour that was tried longest ago, or never; without drafts first."""
        size.trial = min(self._neighbours(size), key=lambda depth: size.tried_at.get(depth, -1))
        size.tried_at[size.trial] = max(size.tried_at.values(), default=-1) + 1
        size.num_steps, size.num_samples, size.rival = 0, 0, self._best(size)
        self._num_drafts = [min(number, OLD_DRAFTS) for number in self._num_drafts]

    def _end_trial_if_due(self, size: _Size) -> None:
        is_measured = size.num_samples >= TRIAL_SAMPLES
        if not is_measured and size.num_steps < TRIAL_STEPS:
            return
        size.trial, size.num_steps = None, 0
        # Where steps of this depth cannot be measured, those of others may not be either: no hurry.
        hurries = is_measured and not all(depth in size.tried_at for depth in self._neighbours(size))
        if hurries:
            size.pause_steps = 0
        elif self._best(size) == size.rival:
            size.pause_steps = min(max(2 * size.pause_steps, PAUSE_STEPS), MAX_PAUSE_STEPS)
        else:
            size.pause_steps = PAUSE_STEPS

    def _neighbours(self, size: _Size) -> list[int]:
        best = self._best(size)
        return [depth for depth in (best - 1, best + 1) if 0 <= depth <= self.max_depth]

    def _best(self, size: _Size) -> int:
        known = [depth for depth, durations_s in enumerate(size.durations_s) if durations_s]
        return max(known, key=lambda depth: self._rate(size, depth), default=0)

    def _rate(self, size: _Size, depth: int) -> float:
        return (1 + sum(self._shares[:depth])) / max(median(size.durations_s[depth]), 1e-9)
