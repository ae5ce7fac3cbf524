"""Chooses the speculation depth: the one that gives the most tokens per second, or 0 where no depth pays.

    tokens per second of depth K = sequences · (1 + Σ_{k ≤ K} share_k) / seconds of a step of depth K
    share_k = share_{k−1} · acceptance rate of draft k where those before it are accepted

Acceptance rates depend on the text: they are running averages with a high prior, so that deep enough depths are tried.
Step times depend on the batch size and are stored by its power of two. Disturbances only lengthen a step, so the lower
median of few measurements counts.

An unmeasured depth is tried for a few steps if it may win: step time does not fall with depth, so shallower depths
bound what a deeper one can give. One draft may not pay where three do, so comparing neighbours is not enough. Because
text and lengths change, every depth that may win is tried again from time to time, sooner where the race is close. A
new batch size uses the best depth of the nearest size for a while: batches shrink through many sizes as completions
end, and do not stay there.

MTP modules that draft also prefill the prompts, which decode step times do not show. With long prompts, short
completions and large batches that costs more than drafts save. So the prefilled tokens per sampled token are averaged
over ended requests, the modules' prefill time is measured, and a depth pays if a token including its share of that time
takes less than without drafts. Among the depths that pay, the one with the most tokens per second of its steps is
chosen.

Modules that do not draft do not run, and prefill the tokens they missed when they draft again (model_runner.py): where
no depth pays, only trials cost time. On a GPU such an MTP prefill step costs as much as tens of decode steps, unless it
prefills prompts anyway, and more the larger the lag. So the depth increases only if the remaining tokens repay the MTP
prefill; a trial that would be mostly MTP prefill waits for the next prompt prefill; repeated trials wait until they
fit into a small share of all time, and become rarer when they change nothing. Prompts are prefilled at the depth of the
batch that they will join, not of the smaller batch that runs while others wait.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil, inf
from statistics import median_low
from typing import Protocol

MEMORY_DRAFTS = 500
"""Window, in verified drafts, of the averaged acceptance rate."""
OLD_DRAFTS = 16
"""Weight, in drafts, of the history before a trial, so that a few trials notice text that has changed."""
PRIOR_DRAFTS, PRIOR_ACCEPTANCE = 6, 0.9
"""Prior: number of drafts and their acceptance rate."""


@dataclass(frozen=True)
class Moment:
    """The state of the batch by which the next steps' depth is chosen."""

    num_sequences: int
    num_after_prefill: int = 0
    """During prefill, the number of sequences that will run once all waiting prompts are prefilled; else 0."""
    is_separate_step: bool = True
    """Whether MTP prefill takes a separate step instead of one of several decode steps run together."""
    mtp_lag: Sequence[int] = ()
    """By MTP module: tokens that the main model has run and the module has not; empty if unknown."""
    num_remaining: float = inf
    """Average number of tokens a sequence still samples unless it stops early."""
    max_mtp_prefill: float = inf
    """Largest number of tokens that modules prefill in one step."""


class DepthChooser(Protocol):
    def choose(self, moment: Moment) -> int: ...

    def note_steps(self, depth: int, num_sequences: int, num_steps: int, duration_s: float) -> None:
        """Record that `num_steps` steps took `duration_s` in total; they verified and made `depth` drafts per sequence
        and did nothing else."""
        ...

    def note_mtp_prefill_step(self, num_sequences: int, duration_s: float) -> None:
        """Record the duration of a separate MTP prefill step."""
        ...

    def note_mtp_prefill(self, depth: int, num_sequences: int, num_tokens: int, duration_s: float) -> None:
        """Record that, in a prefill step, the first `depth` modules ran `num_tokens` tokens in `duration_s` of extra
        time."""
        ...

    def note_end(self, num_prefilled: int, num_sampled: int) -> None:
        """Record the prefilled and the sampled tokens of a request that ended."""
        ...

    def note_drafts(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Record, by draft index, how many drafts were verified and how many were accepted with all before them."""
        ...

    def tokens_per_step(self, depth: int) -> float:
        """Expected tokens that one sequence samples in a step."""
        ...


class AcceptanceRates:
    """Acceptance rates by draft index, given that all earlier drafts are accepted."""

    def __init__(self) -> None:
        self._num: list[float] = []
        """By draft index: verified drafts whose predecessors were all accepted."""
        self._num_accepted: list[float] = []
        self._tokens_per_step: dict[int, float] = {}
        """By depth, since the rates changed last."""

    def note(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        num_new = max(len(drafted) - len(self._num), 0)
        self._num += [float(PRIOR_DRAFTS)] * num_new
        self._num_accepted += [PRIOR_DRAFTS * PRIOR_ACCEPTANCE] * num_new
        rate_before = 1.0
        for index, (num, num_accepted) in enumerate(zip(drafted, accepted, strict=True)):
            if not num:
                break
            self._num[index] += num * rate_before
            self._num_accepted[index] += num_accepted
            self._limit_window(index, MEMORY_DRAFTS)
            rate_before = num_accepted / num
        self._tokens_per_step.clear()

    def age(self) -> None:
        for index in range(len(self._num)):
            self._limit_window(index, OLD_DRAFTS)
        self._tokens_per_step.clear()

    def _limit_window(self, index: int, most: int) -> None:
        scale = min(most / self._num[index], 1.0)
        self._num[index] *= scale
        self._num_accepted[index] *= scale

    def tokens_per_step(self, depth: int) -> float:
        if depth not in self._tokens_per_step:
            self._tokens_per_step[depth] = self._expected_tokens(depth)
        return self._tokens_per_step[depth]

    def _expected_tokens(self, depth: int) -> float:
        total, share = 1.0, 1.0
        for index in range(depth):
            is_known = index < len(self._num)
            share *= self._num_accepted[index] / self._num[index] if is_known else PRIOR_ACCEPTANCE
            total += share
        return total


class FixedDepth:
    """A constant depth, against which the measured one is compared."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._acceptance = AcceptanceRates()

    def choose(self, moment: Moment) -> int:
        return self.depth

    def note_steps(self, depth: int, num_sequences: int, num_steps: int, duration_s: float) -> None:
        pass

    def note_mtp_prefill_step(self, num_sequences: int, duration_s: float) -> None:
        pass

    def note_mtp_prefill(self, depth: int, num_sequences: int, num_tokens: int, duration_s: float) -> None:
        pass

    def note_end(self, num_prefilled: int, num_sampled: int) -> None:
        pass

    def note_drafts(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        self._acceptance.note(drafted, accepted)

    def tokens_per_step(self, depth: int) -> float:
        return self._acceptance.tokens_per_step(depth)


TRIAL_SAMPLES = 2
TRIAL_STEPS = 3
"""Measurements, and measured steps, that a trial needs."""
MAX_TRIAL_CALLS, MAX_PREFILL_TRIAL_CALLS = 24, 384
"""Calls of `choose` after which a trial is abandoned: the first while decoding, the second during prompt or MTP
prefill."""
PAUSE = 50
"""Steps between two trials, as a multiple of one trial's steps; doubled after each trial that changed nothing."""
CLOSE_PAUSE = 16
"""The same where another depth is about as good."""
MAX_PAUSE = 400
CLOSE_RATIO = 0.85
MARGIN = 1.05
"""Factor by which drafts must beat no drafts: with speculation completions end one by one and leave smaller batches."""
HORIZON_STEPS = 256
"""Steps within which a deeper depth must repay the MTP prefill, because completions may end early."""
TRIAL_SHARE = 0.02
"""Share of all time that repeated trials may cost."""
RETRY_SPEEDUP = 1.5
"""A depth is tried again if it would win with steps this many times faster than measured."""
BORROWED_STEPS = 96
"""Steps for which a new batch size uses the best depth of the nearest size."""
MEMORY_SAMPLES = 9
"""Number of latest measurements, whose lower median counts."""
MIN_S = 1e-9
"""No duration is taken for shorter."""
MEMORY_REQUESTS = 256
"""Window, in requests, of the averaged prefill per sampled token."""


class _Latest:
    """The latest measurements of one duration, and their lower median: the engine asks for it several times a step."""

    def __init__(self) -> None:
        self._durations_s: deque[float] = deque(maxlen=MEMORY_SAMPLES)
        self.median_s = MIN_S

    def __bool__(self) -> bool:
        return bool(self._durations_s)

    def note(self, duration_s: float) -> None:
        self._durations_s.append(duration_s)
        self.median_s = max(median_low(self._durations_s), MIN_S)


@dataclass
class _Size:
    """Measurements of batches of about one size."""

    durations_s: list[_Latest]
    """Step durations, by depth."""
    mtp_prefill_steps_s: deque[float]
    """Durations of MTP prefill steps."""
    num_sequences: int
    """Sequences in the batch measured last."""
    trial: int | None = None
    """The depth of the current trial."""
    num_calls: float = 0.0
    num_steps: int = 0
    """Steps of this trial, or since the last one."""
    num_samples: int = 0
    num_measured: int = 0
    """Measured steps of this trial; `num_samples` counts the measurements."""
    pause_steps: int = 0
    pause: int = 0
    """`pause_steps`, the steps until the next trial, as a multiple of the last trial's steps."""
    borrowed: int | None = None
    """The best depth of the nearest size, used until this size is tried."""
    rival: int = 0
    """The best depth when the trial began."""
    is_repeated: bool = False
    """Whether the depth of the trial was tried before."""
    is_return_paid: bool = False
    """Whether the trial's budget already covers the modules' prefill after it."""
    tried_at: dict[int, int] = field(default_factory=dict)
    """By depth: index of its last trial."""

    def step_s(self, depth: int) -> float:
        return self.durations_s[depth].median_s


class MeasuredDepth:
    def __init__(self, max_depth: int) -> None:
        self.max_depth = max_depth
        self._acceptance = AcceptanceRates()
        self._sizes: dict[int, _Size] = {}
        self._depth = 0
        """The depth chosen last; deeper modules lag."""
        self._prefill_token_s: dict[tuple[int, int], _Latest] = {}
        """Seconds per token prefilled by the modules, by batch size bits and number of modules."""
        self._num_prefilled, self._num_sampled = 0.0, 1.0
        """Decaying totals of prefilled and sampled tokens over ended requests."""
        self._total_s = self._spent_s = 0.0
        """Seconds of all steps, and seconds spent on repeated trials."""

    def choose(self, moment: Moment) -> int:
        if self.max_depth == 0:
            return 0
        # Prompts are prefilled for the batch to come: at another depth the modules would have to prefill all of
        # them later.
        size = self._size(max(moment.num_sequences, moment.num_after_prefill))
        if size.trial is not None:
            self._end_trial_if_measured(size)
        if size.trial is None and size.num_steps >= size.pause_steps:
            self._start_trial(size, moment)
        is_prefilling = bool(moment.num_after_prefill or _mtp_lag(moment, size.trial or 0))
        size.num_calls += MAX_TRIAL_CALLS / MAX_PREFILL_TRIAL_CALLS if is_prefilling else 1
        size.num_steps += 1
        self._depth = self._target_depth(size, moment)
        return self._depth

    def _target_depth(self, size: _Size, moment: Moment) -> int:
        if size.trial is not None:
            # Prompts prefilled now will be decoded at the rival depth once the trial is over.
            return max(size.trial, size.rival) if moment.num_after_prefill else size.trial
        best = self._best(size) if size.borrowed is None else size.borrowed
        if best <= self._depth:
            return best
        price_s = self._mtp_prefill_cost_s(size, best, moment)
        is_known = bool(size.durations_s[self._depth] and size.durations_s[best])
        pays = self._gain_s(size, best, moment) > price_s if is_known else price_s == 0
        return best if pays else self._depth

    def _gain_s(self, size: _Size, best: int, moment: Moment) -> float:
        """Seconds that the best depth saves in the remaining steps."""
        now_s = size.step_s(self._depth)
        share = 1.0 - self._rate(size, self._depth, now_s) / self._rate(size, best, size.step_s(best))
        num_steps_left = moment.num_remaining / self._acceptance.tokens_per_step(self._depth)
        return share * min(num_steps_left, HORIZON_STEPS) * now_s

    def _mtp_prefill_cost_s(self, size: _Size, depth: int, moment: Moment) -> float:
        """Seconds until the modules of the depth have prefilled all tokens they lag behind."""
        mtp_lag = _mtp_lag(moment, depth)
        num_apart = max(ceil(mtp_lag / moment.max_mtp_prefill), 1) if moment.is_separate_step else 0
        return num_apart * min(size.mtp_prefill_steps_s, default=0.0) + mtp_lag * self._module_s(size, depth)

    def _size(self, num_sequences: int) -> _Size:
        key = num_sequences.bit_length()
        if key not in self._sizes:
            durations_s = [_Latest() for _ in range(self.max_depth + 1)]
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
        size.durations_s[depth].note(duration_s / num_steps)
        size.num_sequences = num_sequences
        size.num_steps += num_steps - 1  # one was counted when it was chosen
        self._total_s += duration_s
        if depth == size.trial:
            size.num_samples += 1
            size.num_measured += num_steps

    def note_mtp_prefill_step(self, num_sequences: int, duration_s: float) -> None:
        self._size(num_sequences).mtp_prefill_steps_s.append(duration_s)

    def note_mtp_prefill(self, depth: int, num_sequences: int, num_tokens: int, duration_s: float) -> None:
        key = num_sequences.bit_length(), depth
        self._prefill_token_s.setdefault(key, _Latest()).note(duration_s / num_tokens)
        size = self._size(num_sequences)
        if depth == size.trial and size.is_repeated:
            self._spent_s += duration_s * max(depth - size.rival, 0) / depth

    def note_end(self, num_prefilled: int, num_sampled: int) -> None:
        decay = 1 - 1 / MEMORY_REQUESTS
        self._num_prefilled = decay * self._num_prefilled + num_prefilled
        self._num_sampled = decay * self._num_sampled + num_sampled

    def note_drafts(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        self._acceptance.note(drafted, accepted)

    def tokens_per_step(self, depth: int) -> float:
        return self._acceptance.tokens_per_step(depth)

    def _start_trial(self, size: _Size, moment: Moment) -> None:
        """Start a trial of the depth tried longest ago, or never; depth 0 first."""
        depths = self._trial_depths(size)
        if not depths:
            size.num_steps = 0
            return
        trial = min(depths, key=lambda depth: size.tried_at.get(depth, -1))
        if moment.is_separate_step and _mtp_lag(moment, trial) > moment.num_sequences * moment.num_remaining:
            return  # mostly MTP prefill: wait for the next prompt prefill
        size.is_repeated = trial in size.tried_at
        if size.is_repeated:
            # Modules prefill at the start of the trial, or after it.
            steps_s, best = TRIAL_STEPS * self._lost_s(size, trial), self._best(size)
            budget_s = TRIAL_SHARE * self._total_s
            if self._spent_s + steps_s + self._mtp_prefill_cost_s(size, trial, moment) > budget_s:
                return
            # Spend the whole budget, so that it does not accumulate for many trials in a row.
            self._spent_s, size.is_return_paid = budget_s, moment.is_separate_step and trial < best
        size.trial = trial
        size.tried_at[trial] = max(size.tried_at.values(), default=-1) + 1
        size.num_calls = size.num_steps = size.num_samples = size.num_measured = 0
        size.rival, size.borrowed = self._best(size), None
        if size.pause_steps:
            self._acceptance.age()

    def _end_trial_if_measured(self, size: _Size) -> None:
        is_measured = size.num_samples >= TRIAL_SAMPLES and size.num_measured >= TRIAL_STEPS
        if not is_measured and size.num_calls < MAX_TRIAL_CALLS:
            return
        num_steps, size.trial, size.num_steps = size.num_steps, None, 0
        if size.is_return_paid:
            self._depth, size.is_return_paid = max(self._depth, size.rival), False
        # If steps of this depth cannot be measured, those of others may not be either: do not hurry to the next trial.
        if is_measured and any(depth not in size.tried_at for depth in self._trial_depths(size)):
            size.pause_steps = 0
            return
        best = self._best(size)
        known = [depth for depth in range(self.max_depth + 1) if size.durations_s[depth]]
        tokens_s = [self._token_s(size, depth, size.step_s(depth)) for depth in known]
        is_close = sum(CLOSE_RATIO * token_s < min(tokens_s) for token_s in tokens_s) > 1
        least = CLOSE_PAUSE if is_close else PAUSE
        size.pause = min(max(2 * size.pause, least), MAX_PAUSE) if best == size.rival else least
        size.pause_steps = size.pause * num_steps

    def _trial_depths(self, size: _Size) -> list[int]:
        best = self._best(size)
        if not size.durations_s[0]:
            return [0]
        return [
            depth
            for depth in range(self.max_depth + 1)
            if depth != best and (abs(depth - best) == 1 or self._may_win(size, depth, best))
        ]

    def _best(self, size: _Size) -> int:
        """The depth with the most tokens per second among those that pay."""
        known = [depth for depth, durations_s in enumerate(size.durations_s) if durations_s]
        paying = [depth for depth in known if self._pays(size, depth, size.step_s(depth))]
        return max(paying, key=lambda depth: self._rate(size, depth, size.step_s(depth)), default=0)

    def _may_win(self, size: _Size, depth: int, best: int) -> bool:
        """Whether the depth would win if its steps were faster than measured or, if unmeasured, as fast as shallower
        ones."""
        if size.durations_s[depth]:
            step_s = size.step_s(depth) / RETRY_SPEEDUP
        else:
            shallower = max(less for less in range(depth) if size.durations_s[less])
            if shallower == 0 and depth > 1:
                return False  # depth 1 is tried first
            step_s = size.step_s(shallower)
        least = self._rate(size, best, size.step_s(best))
        return self._pays(size, depth, step_s) and self._rate(size, depth, step_s) > least

    def _rate(self, size: _Size, depth: int, step_s: float) -> float:
        """Tokens per second of steps that take `step_s`."""
        return size.num_sequences * self._acceptance.tokens_per_step(depth) / step_s

    def _lost_s(self, size: _Size, depth: int) -> float:
        """Seconds that a step of this depth loses against the best one."""
        rate, best_rate = (self._rate(size, each, size.step_s(each)) for each in (depth, self._best(size)))
        return size.step_s(depth) * max(1.0 - rate / best_rate, 0.0)

    def _pays(self, size: _Size, depth: int, step_s: float) -> bool:
        """Whether a token, prefill included, takes less time than without drafts."""
        if depth == 0 or not size.durations_s[0]:
            return True
        return MARGIN * self._token_s(size, depth, step_s) < self._token_s(size, 0, size.step_s(0))

    def _token_s(self, size: _Size, depth: int, step_s: float) -> float:
        """Seconds per token of the batch, including the modules' prefill for it."""
        return 1 / self._rate(size, depth, step_s) + self._prefill_s(size, depth)

    def _prefill_s(self, size: _Size, depth: int) -> float:
        """Seconds of the modules' prefill per sampled token."""
        return self._module_s(size, depth) * self._num_prefilled / self._num_sampled

    def _module_s(self, size: _Size, depth: int) -> float:
        """Seconds per token that the first `depth` modules prefill; unmeasured sizes and depths use the nearest
        measured one."""
        if depth == 0 or not self._prefill_token_s:
            return 0.0
        bits = size.num_sequences.bit_length()
        nearest = bits, depth
        if nearest not in self._prefill_token_s:
            nearest = min(self._prefill_token_s, key=lambda key: (abs(key[0] - bits), abs(key[1] - depth)))
        return self._prefill_token_s[nearest].median_s * depth / nearest[1]


def _mtp_lag(moment: Moment, depth: int) -> int:
    """Tokens by which the last module of the depth lags."""
    return moment.mtp_lag[depth - 1] if depth and moment.mtp_lag else 0
