"""The model interface of evaluation: logits at chosen positions of some documents, in one forward pass, and completions
of prompts.

The caller decides which documents share a pass and what to do with the logits, so a scripted predictor can replace the
model. `batches` limits the tokens of a pass.

The rollout engine decodes completions: evaluation and RL share one decode path. A completion depends on its prompt, its
seed (seed + index for prompt number index) and the weights, not on the prompts decoded beside it, up to the rounding of
a differently shaped batch.
"""

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from m2forge.model.plan import AttentionPlan, CausalRows, Documents
from m2forge.model.transformer import Transformer
from m2forge.protocols import Prompt
from m2forge.records import FinishReason, IntArray, PolicyVersion, Sampling
from m2forge.rollout.config import RolloutConfig
from m2forge.rollout.core import Core

STEP_TOKENS = 4096
"""Token budget of an engine step: the size of a prefill chunk."""
MAX_RUNNING = 256

_log = logging.getLogger(__name__)


class Completes(Protocol):
    """The part of a predictor that decodes."""

    def complete(
        self, prompts: Sequence[Prompt], *, cache_tokens: int, advance: Callable[[int], None]
    ) -> list[list[int]]:
        """The sampled tokens of each prompt. `cache_tokens` limits the KV cache, unless one prompt needs more;
        `advance` is called with the number of prompts finished."""
        ...


class EngineDecoder:
    """Decodes with an engine core whose KV cache grows to what the prompts need. The weights must not change while it
    is in use, because later prompts hit the prefix cache of earlier ones."""

    def __init__(self, model: Transformer) -> None:
        self._model = model
        self._core: Core | None = None

    def complete(
        self, prompts: Sequence[Prompt], *, cache_tokens: int, advance: Callable[[int], None]
    ) -> list[list[int]]:
        new: list[list[int]] = [[] for _ in prompts]
        if not prompts:
            return new
        core, num_aborted = self._core_for([prompt.ids.size + prompt.max_tokens for prompt in prompts], cache_tokens), 0
        for index, prompt in enumerate(prompts):
            core.add(str(index), prompt)
        while not core.is_idle:
            chunks = core.step()
            for id, chunk in chunks:
                new[int(id)] += chunk.ids.tolist()
                num_aborted += chunk.finish_reason is FinishReason.ABORT
            if num_ended := sum(chunk.finish_reason is not None for _, chunk in chunks):
                advance(num_ended)
        if num_aborted:
            _log.warning("%d of %d completions end early: the network's logits are not finite", num_aborted, len(new))
        return new

    def _core_for(self, lengths: Sequence[int], cache_tokens: int) -> Core:
        block_tokens = RolloutConfig().block_tokens
        nums = [-(-length // block_tokens) for length in lengths]
        limit = max(cache_tokens // block_tokens, *nums)
        if self._core is None or self._core.config.num_blocks < min(sum(nums), limit):
            # The old cache is freed before a larger one is allocated, a power of two so that this happens seldom.
            self._core, num_blocks = None, min(1 << (sum(nums) - 1).bit_length(), limit)
            config = RolloutConfig(num_blocks=num_blocks, step_tokens=STEP_TOKENS, max_running=MAX_RUNNING)
            # Lengths beyond the network's context are measured too.
            max_context = num_blocks * block_tokens
            self._core = Core(self._model, config, PolicyVersion("eval", 0), max_context=max_context)
        return self._core


def complete(
    predictor: Completes,
    prompts: Sequence[Sequence[int] | IntArray],
    *,
    max_new_tokens: int | Sequence[int],
    stop_ids: Collection[int] = (),
    temperature: float = 0.0,
    seed: int = 0,
    max_pack_tokens: int = 1 << 16,
    advance: Callable[[int], None] = lambda count: None,
) -> list[list[int]]:
    """The completion of each prompt: at most `max_new_tokens` (one limit, or one each), ending with the first token in
    `stop_ids`. Temperature 0 decodes greedily. `advance` is called with the number of prompts finished."""
    if any(len(prompt) == 0 for prompt in prompts):
        raise ValueError("a prompt is empty; give each at least one token")
    bounds = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else list(max_new_tokens)
    sampling, new = Sampling(temperature=temperature), [list[int]() for _ in prompts]
    wanted = [index for index, bound in enumerate(bounds) if bound > 0]
    if len(wanted) < len(prompts):
        advance(len(prompts) - len(wanted))
    requests = [
        Prompt(
            np.asarray(prompts[index], np.int32), bounds[index], sampling, stop_ids=tuple(stop_ids), seed=seed + index
        )
        for index in wanted
    ]
    completions = predictor.complete(requests, cache_tokens=max_pack_tokens, advance=advance)
    for index, completion in zip(wanted, completions, strict=True):
        new[index] = completion
    return new


MAX_PADDING = 0.25
"""Share of padding up to which padded rows still run faster on a GPU than packed documents with a mask."""


class Predictor(Completes, Protocol):
    @property
    def max_context(self) -> int: ...

    def logits(self, documents: Sequence[IntArray], positions: Sequence[IntArray]) -> Tensor:
        """(M, V): logits of the token after each of `positions[d]` of each document d, in that order."""
        ...


class ModelPredictor:
    """Runs a `Transformer` over all documents in one pass: packed, or as rows padded to the longest. Its weights must
    not change while the predictor is in use."""

    def __init__(self, model: Transformer, layout: Literal["auto", "documents", "rows"] = "auto") -> None:
        """auto: rows on a GPU if their lengths are similar, else packed documents. Both give the same logits, up to
        rounding."""
        self._model, self._layout = model, layout
        self._decoder = EngineDecoder(model)

    @property
    def max_context(self) -> int:
        return self._model.config.max_context

    @torch.no_grad()
    def logits(self, documents: Sequence[IntArray], positions: Sequence[IntArray]) -> Tensor:
        device = self._model.embedding.weight.device
        lengths = [len(document) for document in documents]
        plan: AttentionPlan
        if self._pads_rows(lengths):
            longest = max(lengths)
            tokens, starts = _padded(documents, longest), np.arange(len(lengths)) * longest
            plan = CausalRows(len(lengths), longest, device)
        else:
            tokens, starts = np.concatenate(documents), np.cumsum([0, *lengths[:-1]])
            plan = Documents(lengths, device)
        indices = np.concatenate([start + where for start, where in zip(starts, positions, strict=True)])
        tokens_N = torch.as_tensor(tokens, dtype=torch.int64).to(device)
        hidden_ND = self._model(tokens_N, plan, with_mtp=False).hidden_ND
        return self._model.logits(hidden_ND[torch.as_tensor(indices, dtype=torch.int64).to(device)])

    def complete(
        self, prompts: Sequence[Prompt], *, cache_tokens: int, advance: Callable[[int], None]
    ) -> list[list[int]]:
        return self._decoder.complete(prompts, cache_tokens=cache_tokens, advance=advance)

    def _pads_rows(self, lengths: Sequence[int]) -> bool:
        if self._layout != "auto":
            return self._layout == "rows"
        on_gpu = self._model.embedding.weight.device.type == "cuda"
        return on_gpu and max(lengths) * len(lengths) <= (1 + MAX_PADDING) * sum(lengths)


def batches(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Indices into `lengths`, longest first, in batches of at most `max_tokens` tokens when padded to the batch's
    longest; a longer one runs alone."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if batch and lengths[batch[0]] * (len(batch) + 1) > max_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _padded(documents: Sequence[IntArray], length: int) -> IntArray:
    # Padding is at the end of its row, so causal attention never reads it.
    return np.concatenate([np.pad(document, (0, length - len(document))) for document in documents])
