"""What evaluation computes with a model: logits at chosen positions of some documents, in one forward pass, completions
of prompts, and the loss on held-out documents.

The caller decides which documents share a pass and what to do with the logits, so a scripted predictor can replace the
model. `batches` limits the tokens of a pass.

The rollout engine decodes completions: evaluation and RL share one decode path. A completion depends on its prompt, its
seed (seed + index for prompt number index) and the weights, not on the prompts decoded beside it, up to the rounding of
a differently shaped batch.

The loss of packs is one record per domain:

    nats per token = Σ −ln p(target) / number of targets
    bits per byte  = Σ −ln p(target) / ln 2 / bytes of the targets       (special tokens count as 0 bytes)

The MTP module at depth i predicts the same targets as the main model from a main hidden state that is i tokens old; its
loss and its agreement with the main model are measured where that state exists, so not on a document's first i tokens.
"""

import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from m2forge.evaluate.report import DomainLoss, ModuleLoss, readable_bytes
from m2forge.logit_chunk import chunk_rows
from m2forge.model.plan import AttentionPlan, CausalRows, Documents
from m2forge.model.transformer import Transformer
from m2forge.protocols import Prompt
from m2forge.records import NO_TARGET, FinishReason, IntArray, Pack, PolicyVersion, Sampling
from m2forge.rollout.config import RolloutConfig
from m2forge.rollout.core import Core
from m2forge.text.tokenizer import Tokenizer

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


# -- held-out loss ----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Sum:
    """Sums of one domain and one head; head 0 is the main model, head i the MTP module at depth i."""

    nats: float = 0.0
    num_tokens: int = 0
    num_bytes: int = 0
    num_agreed: int = 0

    def add(self, other: "_Sum") -> None:
        self.nats += other.nats
        self.num_tokens += other.num_tokens
        self.num_bytes += other.num_bytes
        self.num_agreed += other.num_agreed


def held_out_loss(
    model: Transformer,
    packs: Iterable[Pack],
    domains: Sequence[str],
    *,
    bytes_of_id: IntArray | None = None,
    advance: Callable[[int], None] = lambda count: None,
) -> list[DomainLoss]:
    """The loss over all domains first, then of each domain that occurred. `domains`: names that the packs' tags index
    into. `advance` is called with the tokens of each finished pack."""
    sums = [[_Sum() for _ in range(1 + len(model.mtp))] for _ in domains]
    for pack in packs:
        _add_pack(model, pack, bytes_of_id, sums)
        advance(pack.tokens.size)
    everything = [_Sum() for _ in range(1 + len(model.mtp))]
    for by_head in sums:
        for total, part in zip(everything, by_head, strict=True):
            total.add(part)
    rows = [("all", everything), *zip(domains, sums, strict=True)]
    return [_record(domain, by_head, bytes_of_id is not None) for domain, by_head in rows if by_head[0].num_tokens]


def byte_lengths(tokenizer: Tokenizer, vocab_size: int) -> IntArray:
    """Bytes of text per id; 0 for special tokens and ids that the tokenizer does not have."""
    lengths, specials = np.zeros(vocab_size, np.int32), set(tokenizer.special_ids.values())
    for token in range(min(vocab_size, tokenizer.vocab_size)):
        if token not in specials:
            lengths[token] = len(readable_bytes(tokenizer, [token], unknown=b""))
    return lengths


@torch.no_grad()
def _add_pack(model: Transformer, pack: Pack, bytes_of_id: IntArray | None, sums: list[list[_Sum]]) -> None:
    device = model.embedding.weight.device
    plan = Documents(pack.lengths.tolist(), device)
    output = model(torch.tensor(pack.tokens, dtype=torch.int64, device=device), plan)
    position = np.flatnonzero(pack.targets != NO_TARGET).astype(np.int32)
    target = pack.targets[position]
    tag = np.repeat(pack.tags, pack.lengths)[position]
    age = plan.position_N.cpu().numpy()[position]
    main_choice: IntArray | None = None
    for depth, hidden_ND in enumerate((output.hidden_ND, *output.mtp_hidden_ND)):
        nll, choice = _nll_and_choice(model, hidden_ND, position, target)
        main_choice = choice if main_choice is None else main_choice
        for domain, by_head in enumerate(sums):
            mine = (tag == domain) & (age >= depth)
            num_bytes = 0 if bytes_of_id is None else int(bytes_of_id[target[mine]].sum())
            agreed = int((choice[mine] == main_choice[mine]).sum())
            by_head[depth].add(_Sum(float(nll[mine].sum()), int(mine.sum()), num_bytes, agreed))


def _nll_and_choice(
    model: Transformer, hidden_ND: Tensor, position: IntArray, target: IntArray
) -> tuple[np.ndarray[tuple[int], np.dtype[np.float64]], IntArray]:
    """Loss and argmax token at each position, computed over chunks of logits."""
    nll, choice = np.empty(len(position), np.float64), np.empty(len(position), np.int32)
    # The float32 copy of the logits exists beside the original.
    rows = max(1, chunk_rows(model.config.vocab_size, hidden_ND.element_size(), hidden_ND.device.type) // 4)
    for start in range(0, len(position), rows):
        chunk = slice(start, start + rows)
        index_C = torch.as_tensor(position[chunk], dtype=torch.int64).to(hidden_ND.device)
        target_C1 = torch.as_tensor(target[chunk], dtype=torch.int64).to(hidden_ND.device)[:, None]
        logits_CV = model.logits(hidden_ND[index_C])
        choice[chunk] = logits_CV.argmax(-1).cpu().numpy()
        logits_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
        nll_C = logits_CV.logsumexp(-1) - logits_CV.gather(1, target_C1)[:, 0]
        nll[chunk] = nll_C.double().cpu().numpy()
    return nll, choice


def _record(domain: str, by_head: Sequence[_Sum], has_bytes: bool) -> DomainLoss:
    main, modules = by_head[0], by_head[1:]
    return DomainLoss(
        domain=domain,
        num_tokens=main.num_tokens,
        nats_per_token=main.nats / main.num_tokens,
        bits_per_byte=main.nats / math.log(2) / main.num_bytes if has_bytes and main.num_bytes else None,
        modules=tuple(
            ModuleLoss(
                depth=depth, nats_per_token=part.nats / part.num_tokens, agreement=part.num_agreed / part.num_tokens
            )
            for depth, part in enumerate(modules, start=1)
            if part.num_tokens
        ),
    )
