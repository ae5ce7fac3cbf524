"""The synchronous engine core, for one thread: takes prompts, runs one step at a time, returns chunks of completions.

A step computes the tokens that the scheduler chose, all sequences in one batch, and samples the next token of each
sequence whose tokens are all computed, or several where drafts of the MTP modules are accepted. Chunked prefill, prefix
sharing, preemption and speculative decoding do not change a completion: it equals that of a loop that runs the whole
sequence through the network for every token, up to rounding, and with a seed its sampled tokens do too.

Every sample of an accepted prompt ends in exactly one chunk with a finish reason.
"""

# Reading path: decode. A decode step.
# The files that run, in reading order; dev/paths.py compares this list with a trace:
#     rollout/core.py                the step: schedule, run, sample, send chunks
#     rollout/kv/scheduler.py        requests of the batch and their blocks
#     rollout/request.py             one sequence
#     rollout/execution/model_runner.py  the batch as tensors
#     rollout/kv/paged_plan.py       the paged KV cache and its attention mask
#     model/transformer.py           the network
#     model/rotary.py                cos and sin of the rotary embedding
#     model/config.py                its sizes
#     kernels/arithmetic.py          precision, and the C kernels of a CPU
#     kernels/pointwise.py           norm, rotary embedding, gate
#     kernels/linear.py              matrix products
#     kernels/paged_attention.py     attention over blocks
#     kernels/expert.py              the experts
#     rollout/execution/sampler.py   the next tokens and their logprobs

import logging
import math
import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from m2forge.errors import CheckpointError, ConfigError, M2ForgeError, RequestError
from m2forge.model.checkpoint import open_source
from m2forge.model.config import ModelConfig
from m2forge.model.staging import Arrival, Staged
from m2forge.model.tensor_source import refuse_misfits
from m2forge.model.transformer import Transformer, pack_weights
from m2forge.observe.log import warn_once
from m2forge.protocols import Chunk, Prompt
from m2forge.records import FinishReason, PolicyVersion
from m2forge.rollout.config import RolloutConfig
from m2forge.rollout.execution.model_runner import Candidate, DecodeBatch, Runner
from m2forge.rollout.kv.paged_plan import Span, arranged
from m2forge.rollout.kv.scheduler import Scheduler, num_blocks_for
from m2forge.rollout.request import Decode, Drawn, Request
from m2forge.rollout.speculation.adaptive_depth import DepthChooser, MeasuredDepth
from m2forge.rollout.speculation.drafting import Drafting, is_mtp_prefilled, is_prefilling

SEED_BITS = 64
Experts = npt.NDArray[np.int16]
"""(tokens, layers, chosen)."""
_TRAINING_FIELDS = {
    "init_std": True,
    "max_context": True,
    "moe": {"bias_update", "bias_rate", "aux_loss_weight"},
}
"""Config fields that do not change how the network computes."""
_log = logging.getLogger(__name__)


class Broadcasts(Protocol):
    """Versions that come by broadcast."""

    def start(self, model: Transformer) -> None:
        """Receive versions for this network from now on."""
        ...

    def take(self, version: PolicyVersion) -> Arrival | None:
        """A version that has come, which is then released here; None if it did not come whole."""
        ...


class Core:
    def __init__(
        self,
        model: Transformer,
        config: RolloutConfig,
        version: PolicyVersion,
        decode: Decode | None = None,
        clock: Callable[[], float] = time.monotonic,
        depth: DepthChooser | None = None,
        multi_step: bool | None = None,
        max_context: int | None = None,
        broadcasts: Broadcasts | None = None,
    ) -> None:
        """`decode` maps token ids to bytes, which the core searches for stop texts. `clock` returns seconds, for
        deadlines and to measure what speculation gains. `depth` chooses the number of drafts; by default from measured
        step times. `multi_step`: whether decode-only steps run as one function (decode.py); by default only where a
        CUDA graph holds it. `max_context` replaces the limit of config and model, to measure beyond their context.
        `broadcasts`: brings versions before their folders are complete, if there is a broadcast."""
        if config.speculation > len(model.mtp):
            raise ConfigError(
                f"speculation: {config.speculation} drafts need as many MTP modules; this model has {len(model.mtp)}, "
                "so lower speculation to that"
            )
        self.model, self.config, self.version = model, config, version
        self.max_context = max_context or min(config.max_context or model.config.max_context, model.config.max_context)
        self._runner = Runner(model, config)
        pack_weights(model, model.head_weight)
        self._multi_step = self._runner.multi_step if multi_step is None else multi_step
        if config.prefill == "separate" and not self._multi_step:
            warn_once(_log, 'rollout.prefill = "separate" has no effect here: decode steps are not captured as graphs')
        self._is_prefill_separate = self._multi_step and config.prefill == "separate"
        self._scheduler = Scheduler(config, self.max_context)
        chooser = depth or (MeasuredDepth(config.speculation) if config.speculation else None)
        self._drafting = None if chooser is None else Drafting(config, self._scheduler, self._runner, chooser, clock)
        self._requests: dict[str, list[Request]] = {}
        """Unfinished requests, by the id of their prompt."""
        self._outbox: list[tuple[str, Chunk]] = []
        self._pending: WeightUpdate | None = None
        self._folder: Path | None = None
        """Folder of the weights, if `load` brought them."""
        self._load_s = 0.0
        """Time in which no step ran because weights were copied in."""
        self._broadcasts = broadcasts
        if broadcasts is not None:
            broadcasts.start(model)
        self._next_deadline_s = math.inf
        """The earliest deadline of any request, or a lower bound on it."""
        self._decode, self._clock = decode, clock
        self._seeds = random.Random(config.seed)
        self._totals = dict.fromkeys(
            ("prompts", "steps", "whole_steps", "computed_tokens", "sampled_tokens", "loads"), 0
        ) | {f"{reason}_samples": 0 for reason in FinishReason}

    # -- prompts ------------------------------------------------------------------------------------------------------

    def add(self, id: str, prompt: Prompt) -> None:
        """Raises RequestError and stores nothing if the engine can never serve the prompt."""
        if id in self._requests:
            raise RequestError(f"prompt {id!r}: a prompt with this id is in flight; use a unique id")
        refuse_unservable(id, prompt, self.config, self.model.config.vocab_size, self.max_context)
        if prompt.stop_texts and self._decode is None:
            raise RequestError(f"prompt {id!r}: stop_texts: this engine has no tokenizer; use stop_ids instead")
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
        """Abort the unfinished samples of a prompt; the next step returns their final chunks. Ignores unknown ids,
        whose prompts have already ended."""
        for request in self._requests.get(id, []).copy():
            self._end(request, FinishReason.ABORT)
        self._apply_pending_update()

    # -- steps --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self) -> list[tuple[str, Chunk]]:
        """Run one batch and return the chunks that are ready; returns an empty list when idle."""
        self._expire()
        batch = self._scheduler.schedule(self.version, admits=self._pending is None)
        if batch:
            self._run(batch)
        self._apply_pending_update()
        chunks, self._outbox = self._outbox, []
        return chunks

    def _expire(self) -> None:
        if self._next_deadline_s > (now_s := self._clock()):
            return
        for request in [request for requests in self._requests.values() for request in requests]:
            if request.deadline_s <= now_s:
                self._end(request, FinishReason.ABORT)
        unfinished = (request.deadline_s for requests in self._requests.values() for request in requests)
        self._next_deadline_s = min(unfinished, default=math.inf)
        self._apply_pending_update()

    def _run(self, batch: Mapping[Request, int]) -> None:
        self._runner.copy(self._scheduler.copies)
        can_multi_step = self._multi_step and is_uniform_decode(batch)
        if self._drafting is not None:
            self._run_measured(batch, self._drafting, can_multi_step)
            return
        decoding = {request: num for request, num in batch.items() if request.num_uncomputed == 1}
        if can_multi_step or not (self._is_prefill_separate and decoding and is_uniform_decode(decoding)):
            self._run_at(batch, 0, can_multi_step)
            return
        self._run_at({request: num for request, num in batch.items() if request not in decoding}, 0, False)
        if all(request.blocks for request in decoding):  # else broken weights have dropped the cache
            self._run_at(decoding, 0, True)

    def _run_at(self, batch: Mapping[Request, int], depth: int, is_multi_step: bool) -> int:
        """Run the batch with up to `depth` drafts per sequence; returns the number of steps run."""
        num_steps = self._run_multi_step(batch, depth) if is_multi_step else self._run_single_step(batch, depth)
        self._totals["steps"] += num_steps
        return num_steps

    def _run_measured(self, batch: Mapping[Request, int], drafting: Drafting, can_multi_step: bool) -> None:
        """Run the batch at the depth that is chosen for it, and report how long that took."""
        start_s, num_captured, is_prefill = self._clock(), self._runner.num_captured, is_prefilling(batch)
        num_drafts = sum(max(num_tokens - request.num_uncomputed, 0) for request, num_tokens in batch.items())
        depth = drafting.choose(batch, can_multi_step=can_multi_step)
        is_multi_step = can_multi_step and is_mtp_prefilled(batch, depth)
        num_steps = self._run_at(batch, depth, is_multi_step)
        if can_multi_step and not is_multi_step:
            drafting.chooser.note_mtp_prefill_step(len(batch), self._clock() - start_s)
        # A depth's cost is measured only on steps that verify about as many drafts as they make, prefill no prompts and
        # capture no CUDA graph.
        is_even = 3 * depth * len(batch) <= 4 * num_drafts <= 4 * depth * len(batch)
        if is_even and not is_prefill and self._runner.num_captured == num_captured:
            drafting.chooser.note_steps(depth, len(batch), num_steps, self._clock() - start_s)

    def _run_multi_step(self, batch: Mapping[Request, int], depth: int) -> int:
        """Verify, sample and draft without host syncs; returns the number of steps run."""
        # A batch with more drafts than `depth` would need its own CUDA graph for one step, whose capture
        # would take longer than it saves.
        requests, drafts = list(batch), [request.drafts[: min(num - 1, depth)] for request, num in batch.items()]
        tokens_per_step = 1.0 if self._drafting is None else self._drafting.chooser.tokens_per_step(depth)
        num_steps = self._scheduler.num_steps_per_sync(requests, depth, tokens_per_step)
        granted = [1 + len(tokens) for tokens in drafts]
        capacities = self._scheduler.reserve_steps(requests, granted, depth, num_steps)
        num_positions = max(
            request.num_computed + capacity for request, capacity in zip(requests, capacities, strict=True)
        )
        table_BS = self._scheduler.table_of([request.slot for request in requests], num_positions)
        decoded = self._runner.decode(DecodeBatch.of(requests, drafts, capacities, table_BS), depth, num_steps)
        self._totals["whole_steps"] += num_steps
        self._totals["computed_tokens"] += int((decoded.num_drafts_BN + 1).sum())
        experts = None
        if decoded.experts_BNJLK is not None and any(request.prompt.returns_experts for request in requests):
            experts = decoded.experts_BNJLK.to(torch.int16).cpu().numpy()
        is_broken, num_appended = False, []
        for index, (request, capacity) in enumerate(zip(requests, capacities, strict=True)):
            start, num_before = request.num_computed, request.num_sampled
            # Tokens beyond the request's blocks were not computed.
            drawn = decoded.drawn[index].first(capacity)
            part = None if experts is None else experts[index][decoded.is_token_BNJ[index]]
            is_broken |= not self._advance(request, start, 1, drawn, part, depth)
            num_appended.append(request.num_sampled - num_before)
            if depth and request.blocks:
                num_there = max(min(request.num_remaining - 1, capacity - num_appended[-1]), 0)
                request.drafts = decoded.drafts[index][:num_there]
        if is_broken:
            self._drop_cache()
        if depth and self._drafting is not None:
            self._drafting.note_drafts(*decoded.drafted(np.array(num_appended)))
        return num_steps

    def _run_single_step(self, batch: Mapping[Request, int], depth: int) -> int:
        """Run the main model over the batch, sample the next token (or accepted drafts and one more) of each sequence
        whose tokens are all computed, then draft for the next step."""
        requests, is_prefill = list(batch), depth > 0 and is_prefilling(batch)
        spans = [Span(request.num_computed, batch[request], self._scheduler.table(request)) for request in requests]
        order = arranged(spans)
        requests, spans = [requests[index] for index in order], [spans[index] for index in order]
        num_drafts = [
            max(span.num_tokens - request.num_uncomputed, 0) for request, span in zip(requests, spans, strict=True)
        ]
        tokens: list[int] = []
        for request, span, num in zip(requests, spans, num_drafts, strict=True):
            tokens += request.ids[span.start : span.start + span.num_tokens] + request.drafts[:num]
        self._totals["computed_tokens"] += len(tokens)
        hidden_ND, experts_NLK = self._runner.main(tokens, spans)
        drawn = self._draw(requests, spans, num_drafts, hidden_ND)
        experts = None
        if experts_NLK is not None and any(request.prompt.returns_experts for request in requests):
            experts = experts_NLK.to(torch.int16).cpu().numpy()
        is_broken, end = False, 0
        for request, span in zip(requests, spans, strict=True):
            end += span.num_tokens
            part = None if experts is None else experts[end - span.num_tokens : end]
            is_broken |= not self._advance(request, span.start, span.num_tokens, drawn.get(request), part)
        if is_broken:
            self._drop_cache()
        elif depth and self._drafting is not None:
            self._drafting.draft([request for request in requests if request.blocks], depth, is_prefill=is_prefill)
        return 1

    def _draw(
        self, requests: Sequence[Request], spans: Sequence[Span], num_drafts: Sequence[int], hidden_ND: Tensor
    ) -> dict[Request, Drawn]:
        """Samples the next tokens of every request whose tokens are all computed."""
        ready, candidates, end = [], [], 0
        for request, span, num in zip(requests, spans, num_drafts, strict=True):
            end += span.num_tokens
            if span.num_tokens >= request.num_uncomputed:
                ready.append(request)
                candidates.append(Candidate(end - 1, request.drafts[:num], request.slot, request.rows(num + 1)))
        if not ready:
            return {}
        drawn = dict(zip(ready, self._runner.sample(hidden_ND, candidates), strict=True))
        drafted = [
            (num, len(drawn[request].tokens) - 1) for request, num in zip(requests, num_drafts, strict=True) if num
        ]
        if drafted and self._drafting is not None:
            self._drafting.note_drafts(*np.array(drafted).T)
        return drawn

    def _advance(
        self,
        request: Request,
        start: int,
        num_tokens: int,
        drawn: Drawn | None,
        experts: Experts | None,
        depth: int = 0,
    ) -> bool:
        """Apply a step's result to a request that ran `num_tokens` tokens from `start`, as did the first `depth` MTP
        modules. Returns False if a logprob is NaN or infinite."""
        num_computed, is_finite = num_tokens, True
        request.num_prefilled += min(num_tokens, request.num_uncomputed) - (drawn is not None)
        if drawn is not None:
            num_computed, request.drafts = request.num_uncomputed, []
            if not math.isfinite(sum(drawn.logprobs) + sum(drawn.raw_logprobs)):
                # Broken weights give NaN logprobs: no token can be sampled from them, in this step or later.
                is_finite, drawn = False, drawn.first(drawn.num_sound)
            num_appended = request.extend(drawn, self.version.step, self._decode)
            num_computed += max(num_appended - 1, 0)  # accepted drafts, which this step has computed
            self._totals["sampled_tokens"] += num_appended
        if experts is not None and request.prompt.returns_experts:
            request.note_experts(start, experts[:num_computed])
        if depth:
            # Before its blocks are published: publishing may exchange a block for an equal one over which fewer modules
            # have run.
            self._scheduler.note_mtp_computed(request, depth, start + num_computed)
        self._scheduler.advance(request, num_computed, self.version)
        self._scheduler.trim(request)
        if not is_finite:
            self._end(request, FinishReason.ABORT)
        elif request.finish_reason is not None:
            self._end(request, request.finish_reason)
        elif drawn is not None and self.config.on_weight_update != "restart":
            self._outbox.append((request.id, request.chunk()))
        return is_finite

    def _drop_cache(self) -> None:
        """Drop the KV cache; running requests are prefilled again. Zero the memory, because attention multiplies masked
        values by 0, which does not silence NaN."""
        self._scheduler.preempt_all()
        self._scheduler.pool.clear()
        self._runner.cache.zero()

    def _end(self, request: Request, reason: FinishReason) -> None:
        request.finish_reason = reason
        self._scheduler.remove(request)
        self._outbox.append((request.id, request.chunk()))
        self._totals[f"{reason}_samples"] += 1
        if self._drafting is not None:
            self._drafting.chooser.note_end(request.num_prefilled, request.num_sampled)
        unfinished = self._requests[request.id]
        unfinished.remove(request)
        if not unfinished:
            del self._requests[request.id]
            self._scheduler.forget(request.id)

    # -- weights ------------------------------------------------------------------------------------------------------

    def stage(self, folder: Path, version: PolicyVersion) -> Callable[[], None]:
        """Validate the weights of a model folder (CheckpointError) and read them into host memory, in any thread while
        the core steps. The function that it returns loads them, between two steps."""
        arrival = None if self._broadcasts is None else self._broadcasts.take(version)
        update = from_folder(self.model, folder, version, self._folder, arrival)
        return partial(self.load, update, version)

    def load(self, source: "WeightUpdate | Path | Mapping[str, Tensor]", version: PolicyVersion) -> None:
        """Load weights that were staged, from a model folder, or from tensors named as in the network's state dict.
        They are validated at once (CheckpointError) and take effect between two steps, as `on_weight_update` says. A
        version names one state of the weights. If several loads are pending, only the last takes effect."""
        if isinstance(source, Path):
            self.stage(source, version)()
            return
        if isinstance(source, Mapping):
            source = from_memory(self.model, source, version, copies=self._is_busy)
        self._pending = source
        self._apply_pending_update()

    @property
    def _is_busy(self) -> bool:
        """Whether a weight update must wait."""
        return self.config.on_weight_update == "finish" and any(
            self._scheduler.has_started(id) for id in self._requests
        )

    def _apply_pending_update(self) -> None:
        if self._pending is None or self._is_busy:
            return
        started_s, update, self._pending = self._clock(), self._pending, None
        if self.config.stale_cache == "drop":
            self._drop_cache()
        if self.config.on_weight_update == "restart":
            self._scheduler.preempt_all()
            for request in (request for requests in self._requests.values() for request in requests):
                request.restart()
        for request in self._scheduler.running:
            request.drafts = []
        update.fill(self.model, self._folder)
        self._folder = update.folder
        pack_weights(self.model, self.model.head_weight)
        self.version = update.version
        self._totals["loads"] += 1
        self._load_s += self._clock() - started_s

    # -- state and metrics --------------------------------------------------------------------------------------------

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
        """Totals since the start, and current gauges."""
        totals = self._totals | ({} if self._drafting is None else self._drafting.totals)
        return {
            **{f"total_{name}": float(total) for name, total in totals.items()},
            "total_load_seconds": self._load_s,
            **self._scheduler.metrics(),
            "version": float(self.version.step),
        }

    def audit(self) -> None:
        """Check all accounting; slow, for tests."""
        self._scheduler.audit()
        unfinished = [request for requests in self._requests.values() for request in requests]
        assert {*unfinished} == {*self._scheduler.running, *self._scheduler.waiting}, "a request is lost"
        assert len(unfinished) == self.num_running + self.num_waiting, "a request is there twice"


# -- prompts that can be served ----------------------------------------------------------------------------------------


def refuse_unservable(id: str, prompt: Prompt, config: RolloutConfig, vocab_size: int, max_context: int) -> None:
    """Raises RequestError if the prompt can never be served, so that every waiting request can run eventually."""
    ids = np.asarray(prompt.ids)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise RequestError(f"prompt {id!r}: ids: expected a 1-D array of integers, received {ids.shape} of {ids.dtype}")
    invalid = ids[(ids < 0) | (ids >= vocab_size)]
    if invalid.size:
        found = invalid[:8].tolist()
        raise RequestError(
            f"prompt {id!r}: ids outside 0..{vocab_size - 1}: {found}; were they encoded with another tokenizer?"
        )
    num_tokens = ids.size + prompt.max_tokens
    sizes = f"{ids.size} tokens and {prompt.max_tokens} to sample"
    if num_tokens > max_context:
        raise RequestError(
            f"prompt {id!r}: {sizes} exceed the context length of {max_context}; lower max_tokens or shorten the prompt"
        )
    # The last token is sampled but never computed.
    if num_blocks_for(num_tokens - 1, config.block_tokens) > config.num_blocks:
        num_positions = config.num_blocks * config.block_tokens
        raise RequestError(
            f"prompt {id!r}: {sizes} exceed the KV cache of {num_positions}; lower max_tokens, or raise num_blocks"
        )
    if "" in prompt.stop_texts:
        raise RequestError(f"prompt {id!r}: stop_texts: expected text, received ''")


# -- batches that run as one function ----------------------------------------------------------------------------------


def is_uniform_decode(requests: Collection[Request]) -> bool:
    """Whether all requests decode, all greedily or none, with temperature as the only parameter: then a step can run as
    one function, unless MTP modules lag."""
    is_greedy = next(iter(requests)).prompt.sampling.temperature == 0
    return all(
        request.num_uncomputed == 1 and (request.prompt.sampling.temperature == 0) == is_greedy and request.is_bare
        for request in requests
    )


# -- weight updates ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WeightUpdate:
    """A weight update in host memory, validated against the network; it is copied in between two steps."""

    version: PolicyVersion
    folder: Path | None
    """Where the weights come from; None: from memory."""
    fill: Callable[[Transformer, Path | None], None]
    """Copies the weights into the network against which they were validated; the path is the folder of the weights that
    it holds, where there is one."""


def from_folder(
    model: Transformer, folder: Path, version: PolicyVersion, loaded: Path | None, arrival: Arrival | None
) -> WeightUpdate:
    """The files are read on return, so the folder may be deleted then. `loaded`: the folder of the weights that the
    network holds. `arrival`: what came of the version by broadcast."""
    try:
        source = open_source(folder) if arrival is None else open_source(folder, arrival.images)
        if _arithmetic(source.config) != _arithmetic(model.config):
            raise CheckpointError(
                f"{folder} holds a network of another architecture than the one being served; start another engine for "
                "it"
            )
        refuse_misfits(source)
        staged = Staged(model, source, loaded, None if arrival is None else arrival.staged(folder))
    except M2ForgeError:
        raise
    except Exception as error:
        # The weights have not changed yet, so a bad path or file is a rejected request, not an engine failure.
        raise CheckpointError(
            f"{folder} cannot be read ({type(error).__name__}: {error}); choose another folder"
        ) from error
    return WeightUpdate(version, folder, staged.fill)


def from_memory(
    model: Transformer, tensors: Mapping[str, Tensor], version: PolicyVersion, *, copies: bool = False
) -> WeightUpdate:
    """`copies`: clone the tensors, in case the caller changes them before the update is applied."""
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    misfits = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if misfits:
        shown = "; ".join(
            f"{name}: expected {expected.get(name, 'none')}, received {found.get(name, 'none')}" for name in misfits[:8]
        )
        raise CheckpointError(f"{len(misfits)} tensors do not fit the network being served: {shown}")

    if copies:
        tensors = {name: tensor.detach().clone() for name, tensor in tensors.items()}

    @torch.no_grad()
    def copy(served: Transformer, loaded: Path | None) -> None:
        state = served.state_dict()
        for name, tensor in tensors.items():
            state[name].copy_(tensor)

    return WeightUpdate(version, None, copy)


def _arithmetic(config: ModelConfig) -> dict[str, object]:
    return config.model_dump(exclude=_TRAINING_FIELDS)  # type: ignore[arg-type]
