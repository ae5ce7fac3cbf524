"""Drafts of the running requests: how many a step makes, the MTP modules' run that makes them, how many are accepted.

depth chosen for the batch ──▶ the main model verifies drafts and samples ──▶ modules prefill what they lack, draft
            ▲                                                                              │
            └───────────────── step times and acceptance (`adaptive_depth`) ◀──────────────┘
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from m2forge.rollout.config import RolloutConfig
from m2forge.rollout.execution.model_runner import MTPSequence, Runner
from m2forge.rollout.kv.scheduler import Scheduler
from m2forge.rollout.request import Request
from m2forge.rollout.speculation.adaptive_depth import DepthChooser, Moment

MTP_PREFILL_STEPS = 4
"""Limit on the tokens that an MTP module prefills in one step, as a multiple of `step_tokens`."""
PREFILL_FACTOR = 4
"""The modules' time counts as prefill when they run more than this many times the tokens that decoding can give."""


class Drafting:
    def __init__(
        self,
        config: RolloutConfig,
        scheduler: Scheduler,
        runner: Runner,
        chooser: DepthChooser,
        clock: Callable[[], float],
    ) -> None:
        """`chooser` decides the depth, the number of drafts per sequence, by times that `clock` measures in seconds."""
        self.chooser = chooser
        self._num_modules, self._max_prefill = config.speculation, MTP_PREFILL_STEPS * config.step_tokens
        self._scheduler, self._runner, self._clock = scheduler, runner, clock
        self.totals: dict[str, int] = {}
        """Drafts verified and accepted since the start, by their index from 1."""
        for index in range(1, config.speculation + 1):
            self.totals |= {f"drafted_{index}": 0, f"accepted_{index}": 0}

    def choose(self, batch: Mapping[Request, int], *, can_multi_step: bool) -> int:
        """The depth of a step over the batch."""
        mtp_lag = [
            sum(request.num_computed - request.num_mtp_computed[module] for request in batch)
            for module in range(self._num_modules)
        ]
        num_after_prefill = self._scheduler.num_after_prefill if is_prefilling(batch) else 0
        num_remaining = sum(request.num_remaining for request in batch) / len(batch)
        return self.chooser.choose(
            Moment(len(batch), num_after_prefill, can_multi_step, mtp_lag, num_remaining, self._max_prefill)
        )

    def draft(self, requests: Sequence[Request], depth: int, *, is_prefill: bool) -> None:
        """Run the MTP modules over the tokens that the main model has computed, and draft. Modules that lag far behind,
        because speculation was off, are prefilled first, some tokens in each step."""
        start_s, budget, sequences = self._clock(), self._max_prefill, []
        for request in requests:
            mtp_lag = request.num_computed - request.num_mtp_computed[depth - 1]
            num_tokens = min(mtp_lag, budget)
            budget -= num_tokens
            num_drafts = 0
            if request.num_uncomputed == 1 and num_tokens == mtp_lag:
                num_drafts = self._scheduler.reserve(request, min(depth, request.num_remaining - 1))
            end = request.num_mtp_computed[depth - 1] + num_tokens
            starts = [min(start, end) for start in request.num_mtp_computed]
            sequences.append(
                MTPSequence(
                    request.ids, starts, end, request.rows(num_drafts), self._scheduler.table(request), request.slot
                )
            )
        drafts = self._runner.run_mtp(sequences, depth)
        for request, sequence, tokens in zip(requests, sequences, drafts, strict=True):
            request.drafts = tokens
            self._scheduler.note_mtp_computed(request, depth, sequence.end)
            self._scheduler.trim(request)
        num_prefilled = self._max_prefill - budget
        # A request that drafts has sampled a token, for which the host synced: since then only the modules took time.
        if is_prefill and num_prefilled > PREFILL_FACTOR * (1 + depth) * len(requests) and any(drafts):
            num_sequences = max(len(requests), self._scheduler.num_after_prefill)
            self.chooser.note_mtp_prefill(depth, num_sequences, num_prefilled, self._clock() - start_s)

    def note_drafts(self, num_drafts_R: npt.NDArray[np.int64], num_accepted_R: npt.NDArray[np.int64]) -> None:
        """Counts drafts by index: `num_drafts_R` verified and `num_accepted_R` accepted in each row."""
        draft_K1 = np.arange(self._num_modules)[:, None]
        drafted, accepted = ((draft_K1 < num_R).sum(1).tolist() for num_R in (num_drafts_R, num_accepted_R))
        self.chooser.note_drafts(drafted, accepted)
        for index, (num, num_accepted) in enumerate(zip(drafted, accepted, strict=True), 1):
            self.totals[f"drafted_{index}"] += num
            self.totals[f"accepted_{index}"] += num_accepted


def is_prefilling(batch: Mapping[Request, int]) -> bool:
    """Whether any request is in prefill: computes more than its last token and drafts."""
    return any(min(num_tokens, request.num_uncomputed) > 1 for request, num_tokens in batch.items())


def is_mtp_prefilled(requests: Iterable[Request], depth: int) -> bool:
    """Whether the MTP modules that draft have run over all tokens the main model has computed."""
    return not depth or all(request.num_mtp_computed[depth - 1] == request.num_computed for request in requests)
