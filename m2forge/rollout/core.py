"""The engine itself, one step at a time: prompts in, chunks of their completions out. Synchronous, for one thread.

A step computes the tokens that the scheduler chose, all sequences in one batch, and draws the next token of each
sequence whose tokens are all computed. However prompts arrive, are read in parts, share, are preempted and read again,
a completion is the one that the plain loop (model/generate.py) gives, up to rounding; with a seed its draws are too.

Every sample of a prompt that was added ends in exactly one chunk with a finish reason, unless `add` refused the prompt.

Speculation would enter in `_run`: a span may hold several tokens of a sequence that is being completed, of which all
rows, not the last alone, are drawn from.
"""

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from m2forge.errors import RequestError
from m2forge.model.transformer import Transformer
from m2forge.protocols import Chunk, Prompt
from m2forge.records import FinishReason, PolicyVersion
from m2forge.rollout.config import RolloutConfig
from m2forge.rollout.paged_plan import PagedCache, PagedPlan, Span, arranged
from m2forge.rollout.request import Decode, Draw, Request
from m2forge.rollout.sampler import Row, draw
from m2forge.rollout.scheduler import Scheduler, num_blocks_for
from m2forge.rollout.weight_update import WeightUpdate, from_folder, from_memory

SEED_BITS = 64


class Core:
    def __init__(
        self,
        model: Transformer,
        config: RolloutConfig,
        version: PolicyVersion,
        decode: Decode | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`decode`: token ids to bytes, which stop texts are looked for in. `clock`: seconds, for time limits."""
        self.model, self.config, self.version = model, config, version
        self.max_context = min(config.max_context or model.config.max_context, model.config.max_context)
        weight = model.embedding.weight
        self._device = weight.device
        self._cache = PagedCache(model.config, config.num_blocks, config.block_tokens, weight.device, weight.dtype)
        self._scheduler = Scheduler(config)
        self._requests: dict[str, list[Request]] = {}
        """Those not finished, by the id of their prompt."""
        self._outbox: list[tuple[str, Chunk]] = []
        self._pending: WeightUpdate | None = None
        self._next_deadline_s = math.inf
        """No request has an earlier one."""
        self._decode, self._clock = decode, clock
        self._seeds = random.Random(config.seed)
        self._totals = dict.fromkeys(("prompts", "steps", "computed_tokens", "sampled_tokens", "loads"), 0) | {
            f"{reason}_samples": 0 for reason in FinishReason
        }

    # -- prompts ------------------------------------------------------------------------------------------------------

    def add(self, id: str, prompt: Prompt) -> None:
        """Raises RequestError, and keeps nothing, if the prompt can never be served."""
        self._refuse_unservable(id, prompt)
        seed = self._seeds.getrandbits(SEED_BITS) if prompt.seed is None else prompt.seed
        deadline_s = math.inf if prompt.timeout_s is None else self._clock() + prompt.timeout_s
        self._next_deadline_s = min(self._next_deadline_s, deadline_s)
        arrival = self._totals["prompts"]
        requests = [
            Request(id, sample, prompt, seed=seed, arrival=arrival, deadline_s=deadline_s)
            for sample in range(prompt.num_samples)
        ]
        self._requests[id] = requests.copy()
        for request in requests:
            self._scheduler.add(request)
        self._totals["prompts"] += 1

    def abort(self, id: str) -> None:
        """End what is not finished of a prompt; the next step tells so. An id that is not known has ended already."""
        for request in self._requests.get(id, []).copy():
            self._end(request, FinishReason.ABORT)
        self._load_if_due()

    def _refuse_unservable(self, id: str, prompt: Prompt) -> None:
        if id in self._requests:
            raise RequestError(f"prompt {id!r}: this id is being served; give every prompt an id of its own")
        vocab_size, ids = self.model.config.vocab_size, np.asarray(prompt.ids)
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise RequestError(f"prompt {id!r}: ids: expected a row of integers, received {ids.shape} of {ids.dtype}")
        strange = ids[(ids < 0) | (ids >= vocab_size)]
        if strange.size:
            found = strange[:8].tolist()
            raise RequestError(f"prompt {id!r}: ids outside 0..{vocab_size - 1}: {found}; another tokenizer's?")
        num_tokens = ids.size + prompt.max_tokens
        sizes = f"{ids.size} tokens and {prompt.max_tokens} to sample"
        if num_tokens > self.max_context:
            raise RequestError(f"prompt {id!r}: {sizes} exceed the context of {self.max_context}; ask for less")
        # The last token is sampled but never computed.
        if num_blocks_for(num_tokens - 1, self.config.block_tokens) > self.config.num_blocks:
            num_places = self.config.num_blocks * self.config.block_tokens
            raise RequestError(
                f"prompt {id!r}: {sizes} exceed a cache of {num_places}; ask for less, or raise num_blocks"
            )
        if "" in prompt.stop_texts:
            raise RequestError(f"prompt {id!r}: stop_texts: expected text, received ''")
        if prompt.stop_texts and self._decode is None:
            raise RequestError(f"prompt {id!r}: stop_texts: this engine has no tokenizer; give stop_ids instead")

    # -- steps --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self) -> list[tuple[str, Chunk]]:
        """Run one batch, and hand out what there is; nothing where there is nothing to do."""
        self._expire()
        batch = self._scheduler.schedule(self.version, admits=self._pending is None)
        if batch:
            self._run(batch)
        self._load_if_due()
        chunks, self._outbox = self._outbox, []
        return chunks

    def _expire(self) -> None:
        if self._next_deadline_s > (now_s := self._clock()):
            return
        for request in [request for requests in self._requests.values() for request in requests]:
            if request.deadline_s <= now_s:
                self._end(request, FinishReason.ABORT)
        left = (request.deadline_s for requests in self._requests.values() for request in requests)
        self._next_deadline_s = min(left, default=math.inf)
        self._load_if_due()

    def _run(self, batch: Mapping[Request, int]) -> None:
        requests = list(batch)
        spans = [
            Span(request.num_computed, num_tokens, [block.index for block in request.blocks])
            for request, num_tokens in batch.items()
        ]
        order = arranged(spans)
        requests, spans = [requests[place] for place in order], [spans[place] for place in order]
        self._cache.copy(self._scheduler.copies)
        tokens = [
            token
            for request, span in zip(requests, spans, strict=True)
            for token in request.ids[span.start : span.start + span.num_tokens]
        ]
        output = self.model(
            torch.tensor(tokens, device=self._device),
            PagedPlan(self._cache, spans),
            with_mtp=False,
            returns_experts=any(request.prompt.returns_experts for request in requests),
        )
        if output.experts_NLK is not None:
            self._note_experts(requests, spans, output.experts_NLK)
        self._totals["steps"] += 1
        self._totals["computed_tokens"] += len(tokens)
        ready, last_rows, end = [], [], 0
        for request, span in zip(requests, spans, strict=True):
            end += span.num_tokens
            self._scheduler.advance(request, span.num_tokens, self.version)
            if request.num_left == 0:
                ready.append(request)
                last_rows.append(end - 1)
        if ready:
            self._draw(ready, self.model.logits(output.hidden_ND[torch.tensor(last_rows, device=self._device)]))

    def _draw(self, requests: Sequence[Request], logits_BV: Tensor) -> None:
        drawn = draw(logits_BV, [_row(request) for request in requests])
        columns = (column.tolist() for column in drawn)
        is_broken = False
        for request, token, logprob, raw_logprob in zip(requests, *columns, strict=True):
            if not math.isfinite(logprob + raw_logprob):
                # Weights that are broken give no numbers: nothing can be drawn, now or later.
                self._end(request, FinishReason.ABORT)
                is_broken = True
                continue
            request.append(Draw(token, logprob, raw_logprob, self.version.step), self._decode)
            self._totals["sampled_tokens"] += 1
            if request.finish_reason is not None:
                self._end(request, request.finish_reason)
            elif self.config.on_load != "restart":
                self._outbox.append((request.id, request.chunk()))
        if is_broken:
            self._drop_cache()

    def _drop_cache(self) -> None:
        """Whoever runs reads all of its tokens again. Zeros, because what is no number would outlast its block: the
        attention multiplies by 0 what is unseen."""
        self._scheduler.preempt_all()
        self._scheduler.pool.clear()
        self._cache.zero()

    def _note_experts(self, requests: Sequence[Request], spans: Sequence[Span], experts_NLK: Tensor) -> None:
        parts = experts_NLK.to(torch.int16).cpu().split([span.num_tokens for span in spans])
        for request, span, part in zip(requests, spans, parts, strict=True):
            if request.prompt.returns_experts:
                request.note_experts(span.start, part.numpy())

    def _end(self, request: Request, reason: FinishReason) -> None:
        request.finish_reason = reason
        self._scheduler.remove(request)
        self._outbox.append((request.id, request.chunk()))
        self._totals[f"{reason}_samples"] += 1
        left = self._requests[request.id]
        left.remove(request)
        if not left:
            del self._requests[request.id]
            self._scheduler.forget(request.id)

    # -- weights ------------------------------------------------------------------------------------------------------

    def load(self, source: Path | Mapping[str, Tensor], version: PolicyVersion) -> None:
        """Take over weights: those of a model folder, or tensors under the names of the network's state. They are
        checked at once (CheckpointError) and take effect between two steps, as `on_load` says. A version names one
        state of the weights. Of several loads that wait the last one counts."""
        if isinstance(source, Path):
            self._pending = from_folder(self.model, source, version)
        else:
            self._pending = from_memory(self.model, source, version, copies=self._is_busy)
        self._load_if_due()

    @property
    def _is_busy(self) -> bool:
        """Whether weights that arrive must wait."""
        return self.config.on_load == "finish" and any(self._scheduler.has_started(id) for id in self._requests)

    def _load_if_due(self) -> None:
        if self._pending is None or self._is_busy:
            return
        update, self._pending = self._pending, None
        if self.config.old_cache == "drop":
            self._drop_cache()
        if self.config.on_load == "restart":
            self._scheduler.preempt_all()
            for request in (request for requests in self._requests.values() for request in requests):
                request.restart()
        update.fill(self.model)
        self.version = update.version
        self._totals["loads"] += 1

    # -- what is going on ---------------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether a step would do nothing."""
        return not self._requests and not self._outbox

    @property
    def num_running(self) -> int:
        return len(self._scheduler.running)

    @property
    def num_waiting(self) -> int:
        return len(self._scheduler.waiting)

    def metrics(self) -> dict[str, float]:
        """Totals since the start, and the state of the moment."""
        pool = self._scheduler.pool
        return {
            **{f"total_{name}": float(total) for name, total in self._totals.items()},
            "total_cached_tokens": float(self._scheduler.num_cached),
            "total_preemptions": float(self._scheduler.num_preempted),
            "num_running": float(self.num_running),
            "num_waiting": float(self.num_waiting),
            "num_blocks": float(pool.num_blocks),
            "num_held_blocks": float(pool.num_held),
            "num_unused_blocks": float(pool.num_unused),
            "version": float(self.version.step),
        }

    def audit(self) -> None:
        """Check all accounting, at a cost: for tests."""
        self._scheduler.audit()
        alive = [request for requests in self._requests.values() for request in requests]
        assert {*alive} == {*self._scheduler.running, *self._scheduler.waiting}, "a request is lost"
        assert len(alive) == self.num_running + self.num_waiting, "a request is there twice"


def _row(request: Request) -> Row:
    sampling, prompt, sampled = request.prompt.sampling, list[int](), list[int]()
    if sampling.is_penalised:
        prompt, sampled = request.ids[: request.num_prompt], request.ids[request.num_prompt :]
    return Row(sampling, request.seed, request.sample, request.num_sampled, prompt, sampled)
