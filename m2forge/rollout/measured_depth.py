"""How many drafts a step makes for each sequence: as many as give the most tokens in a second, none where none pays.

    tokens per second of depth K = sequences · (1 + Σ_{k ≤ K} share_k) / seconds of a step of depth K
    share_k = share_{k−1} · how often draft k stands where those before it do

How often drafts stand is a property of the text: running averages, which begin high, so that a deep enough depth is
chosen to find out. Seconds depend on how many sequences run together: they are kept by powers of two, and what disturbs
a step only makes it longer, so that of few measurements the lower ones count.

A depth that was never measured is tried for a few steps, as long as it may win: seconds do not fall with depth, so what
shallower ones took bounds what a deeper one can give. A first draft may not pay where three do: it is not enough to
look at neighbours. Because text and lengths change, all that may win are tried again now and then, sooner where it is a
near thing. A size that is met for the first time does for a while what was best at the nearest one: batches shrink
through many sizes when completions end, and do not stay there.

Modules that make drafts read the prompts too, which steps do not show. Where prompts are long, completions short and
batches large, that costs more than drafts save. So how much is read for a token that is sampled is averaged over the
requests that ended, what modules need for it is measured where they read, and a depth pays if a token comes sooner with
its share of that than without drafts. Of those that pay the one with the fastest steps is taken.

Modules that make no drafts do not run, and catch up when they do again (runner.py): where none pays, only the trials
cost anything. On a GPU a step that catches up costs as much as tens of others, unless prompts are read in it anyway,
and more the further modules are behind. So a depth gives way to a deeper one only where that is made up for by what is
left to sample, a trial that would be mostly catching up waits until prompts are read, and trials that are repeated may
take a small share of all time: they wait until they have it, and those that change nothing become rare besides. And
prompts are read at the depth of the batch that they will be in, not of the one that there is while others wait.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil
from statistics import median_low

from m2forge.rollout.depth import Moment, Shares

TRIAL_SAMPLES = 2
TRIAL_STEPS = 3
"""Measurements, and measured steps, that a trial needs."""
MAX_TRIAL_CALLS, READING_CALLS = 24, 384
"""Choices after which a trial is given up; so many if prompts are read all the time, or modules catch up."""
PAUSE = 50
"""Steps between two trials, by the steps of one; twice as many after each that changed nothing."""
NEAR_PAUSE = 16
"""The same where another depth is about as good."""
MAX_PAUSE = 400
NEAR = 0.85
MARGIN = 1.05
"""By which drafts must be better than none: completions that speculate end one by one, and leave smaller batches."""
HORIZON_STEPS = 256
"""In which catching up must be made up for at the latest: who knows where completions end."""
TRIAL_SHARE = 0.02
"""Of all time, that repeated trials may cost."""
HOPE = 1.5
"""A depth is tried again if it may be this much better than it was measured."""
BORROWED_STEPS = 96
"""That a new size does as the nearest one."""
MEMORY_SAMPLES = 9
"""Last measurements, whose lower median counts."""
MEMORY_REQUESTS = 256
"""Requests over which is averaged how much they read."""


@dataclass
class _Size:
    """What is known of batches of about one size."""

    durations_s: list[deque[float]]
    """Of a step, by depth."""
    catch_ups_s: deque[float]
    """Of steps in which modules caught up."""
    num_sequences: int
    """In the batch that was measured last."""
    trial: int | None = None
    """The depth that is being tried."""
    num_calls: float = 0.0
    num_steps: int = 0
    """Of this trial, or since the last one."""
    num_samples: int = 0
    num_measured: int = 0
    """Measurements of this trial, and their steps."""
    pause_steps: int = 0
    pause: int = 0
    """The same, by the steps of a trial."""
    borrowed: int | None = None
    """The best depth of the nearest size, as long as nothing is known of this one."""
    rival: int = 0
    """The best depth when the trial began."""
    is_repeated: bool = False
    """Whether the depth of the trial was tried before."""
    is_return_paid: bool = False
    """Whether it is reckoned already that modules catch up behind the trial."""
    tried_at: dict[int, int] = field(default_factory=dict)
    """By depth: the number of its last trial."""

    def step_s(self, depth: int) -> float:
        return _lower_median(self.durations_s[depth])


class MeasuredDepth:
    def __init__(self, max_depth: int) -> None:
        self.max_depth = max_depth
        self._shares = Shares()
        self._sizes: dict[int, _Size] = {}
        self._depth = 0
        """Chosen last: deeper modules are behind."""
        self._readings_s: dict[tuple[int, int], deque[float]] = {}
        """Of a token that modules read, by the size of the batch and the number of modules."""
        self._num_read, self._num_sampled = 0.0, 1.0
        """By requests that ended."""
        self._total_s = self._spent_s = 0.0
        """Of all steps, and of what repeated trials cost."""

    def choose(self, moment: Moment) -> int:
        if self.max_depth == 0:
            return 0
        # What is read now is for then: at another depth all of it would be made up for when the batch is whole.
        size = self._size(max(moment.num_sequences, moment.num_coming))
        if size.trial is not None:
            self._end_trial_if_due(size)
        if size.trial is None and size.num_steps >= size.pause_steps:
            self._start_trial(size, moment)
        is_reading = bool(moment.num_coming or _num_behind(moment, size.trial or 0))
        size.num_calls += MAX_TRIAL_CALLS / READING_CALLS if is_reading else 1
        size.num_steps += 1
        self._depth = self._wanted(size, moment)
        return self._depth

    def _wanted(self, size: _Size, moment: Moment) -> int:
        if size.trial is not None:
            # What is read now will be drafted behind when the trial is over.
            return max(size.trial, size.rival) if moment.num_coming else size.trial
        best = self._best(size) if size.borrowed is None else size.borrowed
        if best <= self._depth:
            return best
        price_s = self._price_s(size, best, moment)
        is_known = bool(size.durations_s[self._depth] and size.durations_s[best])
        is_worth_it = self._gain_s(size, best, moment) > price_s if is_known else price_s == 0
        return best if is_worth_it else self._depth

    def _gain_s(self, size: _Size, best: int, moment: Moment) -> float:
        """Seconds that the best depth saves in the steps that are left."""
        now_s = size.step_s(self._depth)
        share = 1.0 - self._rate(size, self._depth, now_s) / self._rate(size, best, size.step_s(best))
        num_left = moment.num_wanted / self._shares.tokens_per_step(self._depth)
        return share * min(num_left, HORIZON_STEPS) * now_s

    def _price_s(self, size: _Size, depth: int, moment: Moment) -> float:
        """Seconds until all modules of the depth have caught up."""
        num_behind = _num_behind(moment, depth)
        num_apart = max(ceil(num_behind / moment.most_behind), 1) if moment.is_apart else 0
        return num_apart * min(size.catch_ups_s, default=0.0) + num_behind * self._module_s(size, depth)

    def _size(self, num_sequences: int) -> _Size:
        key = num_sequences.bit_length()
        if key not in self._sizes:
            durations_s = [deque[float](maxlen=MEMORY_SAMPLES) for _ in range(self.max_depth + 1)]
            size = _Size(durations_s, deque(maxlen=MEMORY_SAMPLES), num_sequences)
            known = [other for other, each in self._sizes.items() if each.durations_s[0] or each.borrowed is not None]
            if known:
                nearest = self._sizes[min(known, key=lambda other: abs(other - key))]
                size.borrowed = self._best(nearest) if nearest.borrowed is None else nearest.borrowed
                size.pause_steps = BORROWED_STEPS
            self._sizes[key] = size
        return self._sizes[key]

    def note_steps(self, depth: int, num_sequences: int, num_steps: int, duration_s: float) -> None:
        size = self._size(num_sequences)
        size.durations_s[depth].append(duration_s / num_steps)
        size.num_sequences = num_sequences
        size.num_steps += num_steps - 1  # one was counted when it was chosen
        self._total_s += duration_s
        if depth == size.trial:
            size.num_samples += 1
            size.num_measured += num_steps

    def note_catch_up(self, num_sequences: int, duration_s: float) -> None:
        self._size(num_sequences).catch_ups_s.append(duration_s)

    def note_reading(self, depth: int, num_sequences: int, num_tokens: int, duration_s: float) -> None:
        key = num_sequences.bit_length(), depth
        self._readings_s.setdefault(key, deque(maxlen=MEMORY_SAMPLES)).append(duration_s / num_tokens)
        size = self._size(num_sequences)
        if depth == size.trial and size.is_repeated:
            self._spent_s += duration_s * max(depth - size.rival, 0) / depth

    def note_end(self, num_read: int, num_sampled: int) -> None:
        kept = 1 - 1 / MEMORY_REQUESTS
        self._num_read = kept * self._num_read + num_read
        self._num_sampled = kept * self._num_sampled + num_sampled

    def note_drafts(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        self._shares.note(drafted, accepted)

    def tokens_per_step(self, depth: int) -> float:
        return self._shares.tokens_per_step(depth)

    def _start_trial(self, size: _Size, moment: Moment) -> None:
        """Of the depth that was tried longest ago, or never; without drafts first."""
        depths = self._worth_trying(size)
        if not depths:
            size.num_steps = 0
            return
        trial = min(depths, key=lambda depth: size.tried_at.get(depth, -1))
        if moment.is_apart and _num_behind(moment, trial) > moment.num_sequences * moment.num_wanted:
            return  # catching up would be most of the work: when prompts are read again
        size.is_repeated = trial in size.tried_at
        if size.is_repeated:
            # Modules catch up now, or when it is over.
            steps_s, best = TRIAL_STEPS * self._lost_s(size, trial), self._best(size)
            budget_s = TRIAL_SHARE * self._total_s
            if self._spent_s + steps_s + self._price_s(size, trial, moment) > budget_s:
                return
            # All of it, so that nothing is saved up for many trials in a row.
            self._spent_s, size.is_return_paid = budget_s, moment.is_apart and trial < best
        size.trial = trial
        size.tried_at[trial] = max(size.tried_at.values(), default=-1) + 1
        size.num_calls = size.num_steps = size.num_samples = size.num_measured = 0
        size.rival, size.borrowed = self._best(size), None
        if size.pause_steps:
            self._shares.age()

    def _end_trial_if_due(self, size: _Size) -> None:
        is_measured = size.num_samples >= TRIAL_SAMPLES and size.num_measured >= TRIAL_STEPS
        if not is_measured and size.num_calls < MAX_TRIAL_CALLS:
            return
        num_steps, size.trial, size.num_steps = size.num_steps, None, 0
        if size.is_return_paid:
            self._depth, size.is_return_paid = max(self._depth, size.rival), False
        # Where steps of this depth cannot be measured, those of others may not be either: no hurry.
        if is_measured and any(depth not in size.tried_at for depth in self._worth_trying(size)):
            size.pause_steps = 0
            return
        best = self._best(size)
        known = [depth for depth in range(self.max_depth + 1) if size.durations_s[depth]]
        tokens_s = [self._token_s(size, depth, size.step_s(depth)) for depth in known]
        is_near = sum(NEAR * token_s < min(tokens_s) for token_s in tokens_s) > 1
        least = NEAR_PAUSE if is_near else PAUSE
        size.pause = min(max(2 * size.pause, least), MAX_PAUSE) if best == size.rival else least
        size.pause_steps = size.pause * num_steps

    def _worth_trying(self, size: _Size) -> list[int]:
        best = self._best(size)
        if not size.durations_s[0]:
            return [0]
        return [
            depth
            for depth in range(self.max_depth + 1)
            if depth != best and (abs(depth - best) == 1 or self._may_win(size, depth, best))
        ]

    def _best(self, size: _Size) -> int:
        """Of the depths that pay the one whose steps give the most tokens in a second."""
        known = [depth for depth, durations_s in enumerate(size.durations_s) if durations_s]
        paying = [depth for depth in known if self._pays(size, depth, size.step_s(depth))]
        return max(paying, key=lambda depth: self._rate(size, depth, size.step_s(depth)), default=0)

    def _may_win(self, size: _Size, depth: int, best: int) -> bool:
        """If its steps are faster than they were measured, or as fast as shallower ones."""
        if size.durations_s[depth]:
            step_s = size.step_s(depth) / HOPE
        else:
            shallower = max(less for less in range(depth) if size.durations_s[less])
            if shallower == 0 and depth > 1:
                return False  # the first draft comes first
            step_s = size.step_s(shallower)
        least = self._rate(size, best, size.step_s(best))
        return self._pays(size, depth, step_s) and self._rate(size, depth, step_s) > least

    def _rate(self, size: _Size, depth: int, step_s: float) -> float:
        """Tokens per second of steps that take so long."""
        return size.num_sequences * self._shares.tokens_per_step(depth) / step_s

    def _lost_s(self, size: _Size, depth: int) -> float:
        """In a step, whose tokens the best depth had sampled sooner."""
        rate, best_rate = (self._rate(size, each, size.step_s(each)) for each in (depth, self._best(size)))
        return size.step_s(depth) * max(1.0 - rate / best_rate, 0.0)

    def _pays(self, size: _Size, depth: int, step_s: float) -> bool:
        """Whether tokens come sooner than without drafts, reading prompts included."""
        if depth == 0 or not size.durations_s[0]:
            return True
        return MARGIN * self._token_s(size, depth, step_s) < self._token_s(size, 0, size.step_s(0))

    def _token_s(self, size: _Size, depth: int, step_s: float) -> float:
        """Seconds from one token of the batch to the next, with what modules read for it."""
        return 1 / self._rate(size, depth, step_s) + self._reading_s(size, depth)

    def _reading_s(self, size: _Size, depth: int) -> float:
        """That modules read for a token which is sampled."""
        return self._module_s(size, depth) * self._num_read / self._num_sampled

    def _module_s(self, size: _Size, depth: int) -> float:
        """Of a token that the first modules read; what was not measured is as the nearest."""
        if depth == 0 or not self._readings_s:
            return 0.0
        bits = size.num_sequences.bit_length()
        nearest = bits, depth
        if nearest not in self._readings_s:
            nearest = min(self._readings_s, key=lambda key: (abs(key[0] - bits), abs(key[1] - depth)))
        return _lower_median(self._readings_s[nearest]) * depth / nearest[1]


def _num_behind(moment: Moment, depth: int) -> int:
    """Tokens that the last module of a depth has not run."""
    return moment.num_behind[depth - 1] if depth and moment.num_behind else 0


def _lower_median(durations_s: Sequence[float]) -> float:
    """Never 0."""
    return max(median_low(durations_s), 1e-9) if durations_s else 1e-9
