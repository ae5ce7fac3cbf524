"""Token trees and packs of documents in; tensors on the model's device out, with attention plan and loss edges.

Samples that cannot be trained are refused first: each is removed from its tree and reported by name and reason; the
others stay, with their order, numbers and recorded routing. A sample with extreme numbers would dominate the step or
make it NaN: hence the bounds.

A loss edge is a position that predicts and the token it should predict, plus what its loss needs: for a pack the tag
that its loss is counted under, for a tree the numbers of its sample.

Packs and trees arrive without padding; only this file pads. A compiled model recompiles for each sequence length, so a
step uses few lengths. Padding tokens form separate documents (or a separate tree) that no other token attends to, and
have count 0 in the plan: they have no loss edges and add nothing to expert loads, balance loss or token counts.

Shapes: N tokens, M edges, L layers with a router, K experts chosen.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from m2forge.model.config import ModelConfig
from m2forge.model.plan import AttentionPlan, CausalRows, Documents, Trees
from m2forge.model.transformer import Output
from m2forge.records import NO_TARGET, Pack
from m2forge.train.config import PolicyConfig
from m2forge.tree.flat import FlatTree
from m2forge.tree.token_tree import UNKNOWN_EXPERT, ExpertArray, Sample, TokenTree

MAX_ADVANTAGE = 1e6
WEIGHTS = (1e-12, 1e12)
MIN_LOGPROB = -1e4


# -- samples that can be trained ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Problem:
    """A refused sample."""

    name: str
    group: str
    """Index of its tree in the step."""
    reason: str


def refuse_untrainable(
    trees: Sequence[TokenTree], model: ModelConfig, policy: PolicyConfig
) -> tuple[list[TokenTree], tuple[Problem, ...]]:
    """(trainable trees, problems)."""
    accepted: list[TokenTree] = []
    problems: list[Problem] = []
    for index, tree in enumerate(trees):
        reasons = dict(_reasons(tree, model, policy))
        problems += [
            Problem(tree.samples[sample_index].name, str(index), reason) for sample_index, reason in reasons.items()
        ]
        if not reasons:
            accepted.append(tree)
        elif len(reasons) < len(tree.samples):
            accepted.append(_without(tree, reasons.keys(), model, policy))
    return accepted, tuple(problems)


def _reasons(tree: TokenTree, model: ModelConfig, policy: PolicyConfig) -> Iterator[tuple[int, str]]:
    """(index of a sample, why it cannot be trained)"""
    routing = _routing_reason(tree, model) if policy.replay == "recorded" else None
    is_suspect = _highest_id(tree, model) >= model.vocab_size
    for sample_index, sample in enumerate(tree.samples):
        reason = routing or _number_reason(sample, policy) or _length_reason(sample, policy)
        if reason is None and is_suspect:
            reason = _content_reason(tree, sample_index, model)
        if reason is not None:
            yield sample_index, f"Sample {sample.name}: {reason}"


def _routing_reason(tree: TokenTree, model: ModelConfig) -> str | None:
    if tree.experts_shape is None:
        return None
    num_sparse = sum(model.is_sparse(layer) for layer in range(model.num_layers))
    expected = (num_sparse, 0 if model.moe is None else model.moe.top_k)
    if tree.experts_shape == expected:
        return None
    return f"experts: expected {expected} (layers, chosen) per token, received {tree.experts_shape}: of another network"


def _number_reason(sample: Sample, policy: PolicyConfig) -> str | None:
    if not abs(sample.advantage) <= MAX_ADVANTAGE:
        return f"advantage: expected at most {MAX_ADVANTAGE:g} either way, received {sample.advantage}"
    if not WEIGHTS[0] <= sample.weight <= WEIGHTS[1]:
        return f"weight: expected {WEIGHTS[0]:g} to {WEIGHTS[1]:g}, received {sample.weight}"
    problem = policy.sampling_problem(sample.sampling)
    if problem is not None:
        return f"sampling: {problem}"
    if policy.loss != "sft" and sample.logprobs.size and sample.logprobs.min() < MIN_LOGPROB:
        return f"logprobs: expected {MIN_LOGPROB:g} or more, received {sample.logprobs.min():g}"
    return None


def _length_reason(sample: Sample, policy: PolicyConfig) -> str | None:
    if sample.num_tokens <= policy.pack_tokens:
        return None
    return f"path: expected at most pack_tokens, {policy.pack_tokens} tokens, received {sample.num_tokens}"


def _content_reason(tree: TokenTree, sample_index: int, model: ModelConfig) -> str | None:
    highest_id = int(tree.path(sample_index).max())
    if highest_id < model.vocab_size:
        return None
    return f"path: expected ids below the network's vocabulary of {model.vocab_size}, received {highest_id}"


def _highest_id(tree: TokenTree, model: ModelConfig) -> int:
    if tree.vocab_size <= model.vocab_size:
        return -1
    return max((int(node.tokens.max()) for node in tree.nodes()[0]), default=-1)


def _without(tree: TokenTree, refused: Collection[int], model: ModelConfig, policy: PolicyConfig) -> TokenTree:
    """The tree of the remaining samples."""
    rest = TokenTree(min(tree.vocab_size, model.vocab_size))
    for sample_index, sample in enumerate(tree.samples):
        if sample_index not in refused:
            rest.add(
                tree.call(sample_index),
                sample.name,
                episode=sample.episode,
                advantage=sample.advantage,
                weight=sample.weight,
                experts=tree.routing(sample_index) if policy.replay == "recorded" else None,
            )
    return rest


# -- recorded routing --------------------------------------------------------------------------------------------------


def replayable(flat: FlatTree, model: ModelConfig) -> FlatTree:
    """A copy in which routing that this model could not choose (expert index out of range, or one expert twice) is
    marked unknown: the routers choose for those tokens."""
    if flat.experts_NLK is None:
        return flat
    num_experts = 0 if model.moe is None else model.moe.num_experts
    sorted_NLK = np.sort(flat.experts_NLK, -1)
    is_repeated_N = (np.diff(sorted_NLK, axis=-1) == 0).any((1, 2))
    is_past_N = (sorted_NLK[..., -1] >= num_experts).any(1)
    is_usable_N = _is_known(flat.experts_NLK) & ~is_repeated_N & ~is_past_N
    experts_NLK = np.where(is_usable_N[:, None, None], flat.experts_NLK, np.int16(UNKNOWN_EXPERT))
    return replace(flat, experts_NLK=experts_NLK)


def num_replayed(flat: FlatTree) -> int:
    return 0 if flat.experts_NLK is None else int(_is_known(flat.experts_NLK).sum())


def _is_known(experts_NLK: ExpertArray) -> npt.NDArray[np.bool]:
    known_N: npt.NDArray[np.bool] = experts_NLK[:, 0, 0] != UNKNOWN_EXPERT
    return known_N


# -- trees to tensors --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TreeBatch:
    tokens_N: Tensor
    plan: AttentionPlan
    experts_NLK: Tensor | None
    """Recorded expert choices for routing replay; None: the routers choose."""
    position_M: Tensor
    target_M: Tensor
    old_M: Tensor
    """Logprob of each target when it was sampled."""
    advantage_M: Tensor
    weight_M: Tensor
    """Weight of each edge's loss term; the weights sum to 1 over the step."""
    inverse_temperature_M: Tensor | None
    """1 / sampling temperature of each edge; None: all temperatures are 1."""
    version_M: Tensor


def make_tree_batch(
    flat: FlatTree,
    device: torch.device,
    policy: PolicyConfig,
    *,
    total_weight: float,
    dtype: torch.dtype,
    length: int | None = None,
) -> TreeBatch:
    """Build the batch of one packed tree. `total_weight`: sum of the weights of all edges in the step. `dtype`: dtype
    of the per-edge numbers. `length`: number of tokens to pad to."""
    length = flat.num_tokens if length is None else length
    sample_M = flat.edge_sample_M
    is_scaled = policy.loss != "sft" and bool((flat.temperature_S != 1).any())
    return TreeBatch(
        tokens_N=_on(device, np.pad(flat.tokens_N, (0, length - flat.num_tokens))),
        plan=Trees(flat, device, length),
        experts_NLK=_experts(flat, device, length) if policy.replay == "recorded" else None,
        position_M=_on(device, flat.edge_position_M),
        target_M=_on(device, flat.edge_target_M),
        old_M=_on(device, flat.edge_logprob_M, dtype),
        advantage_M=_on(device, flat.advantage_S[sample_M], dtype),
        weight_M=_on(device, flat.weight_S[sample_M] / total_weight, dtype),
        inverse_temperature_M=_on(device, 1 / flat.temperature_S[sample_M], dtype) if is_scaled else None,
        version_M=_on(device, flat.edge_version_M),
    )


def bucket_length(num_tokens: int, bucket: int, limit: int) -> int:
    """`num_tokens` rounded up to a multiple of `bucket`, at most `limit`."""
    return min(-(-num_tokens // bucket) * bucket, limit)


def _experts(flat: FlatTree, device: torch.device, length: int) -> Tensor | None:
    if flat.experts_NLK is None:
        return None
    padding = ((0, length - flat.num_tokens), (0, 0), (0, 0))
    return _on(device, np.pad(flat.experts_NLK, padding, constant_values=UNKNOWN_EXPERT))


# -- packs of documents to tensors -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    tokens_N: Tensor
    plan: AttentionPlan
    position_M: Tensor
    target_M: Tensor
    tag_M: Tensor


def make_batch(pack: Pack, device: torch.device, length: int | None = None) -> Batch:
    """Build the batch of one pack. `length`: number of tokens to pad to."""
    num_padding = 0 if length is None else length - pack.tokens.size
    if num_padding < 0:
        raise ValueError(f"a pack of {pack.tokens.size} tokens does not fit into {length}")
    (position_M,) = (pack.targets != NO_TARGET).nonzero()
    tag_N = np.repeat(pack.tags, pack.lengths)
    return Batch(
        tokens_N=_on(device, np.pad(pack.tokens, (0, num_padding))),
        plan=_plan(pack, device, length),
        position_M=_on(device, position_M),
        target_M=_on(device, pack.targets[position_M]),
        tag_M=_on(device, tag_N[position_M]),
    )


def num_targets(pack: Pack) -> int:
    return int((pack.targets != NO_TARGET).sum())


def _plan(pack: Pack, device: torch.device, length: int | None) -> AttentionPlan:
    num_tokens, lengths = pack.tokens.size, pack.lengths.tolist()
    if length is not None:
        # Padding documents are no longer than the longest real one: attention to padding costs no more than to text.
        whole, rest = divmod(length - num_tokens, max(lengths))
        lengths += [max(lengths)] * whole + [rest] * (rest > 0)
        # Rows of equal length need only the causal mask, for which CUDA has a faster attention kernel.
    is_even = len(set(lengths)) == 1
    plan = CausalRows(len(lengths), lengths[0], device) if is_even else Documents(lengths, device)
    if length is not None:
        # Set even without padding, so that one compiled graph serves all packs.
        plan.count_N = _on(device, np.arange(length) < num_tokens)
    return plan


# -- the micro-batches of a pack ---------------------------------------------------------------------------------------


BatchT = TypeVar("BatchT", bound=Batch | TreeBatch)
BatchT_co = TypeVar("BatchT_co", bound=Batch | TreeBatch, covariant=True)


class MicroBatches(Protocol[BatchT_co]):
    @property
    def num_batches(self) -> int: ...

    def loads(self) -> Iterator[Tensor | None]:
        """Runs forward without gradients; the expert loads, which add up to the pack's."""
        ...

    def batches(self) -> Iterator[BatchT_co]:
        """The caller runs each batch forward and backward before it takes the next."""
        ...

    def sweep(self) -> Iterator[BatchT_co]:
        """The caller runs each batch forward alone, without gradients, before it takes the next."""
        ...


class WholePack(Generic[BatchT]):
    """The pack as one batch; `Walk` (walk.py) is the other kind."""

    num_batches = 1

    def __init__(self, make: Callable[[], BatchT], forward: Callable[[BatchT], Output]) -> None:
        self._make, self._forward = make, forward

    def loads(self) -> Iterator[Tensor | None]:
        yield self._forward(self._make()).load_LE

    def batches(self) -> Iterator[BatchT]:
        yield self._make()

    sweep = batches


# -- blank batches -----------------------------------------------------------------------------------------------------


def blank_batch(device: torch.device) -> Batch:
    """A batch with no loss edges and token count 0, for a rank that has fewer packs than another."""
    none_M = torch.empty(0, dtype=torch.int64, device=device)
    return Batch(torch.zeros(1, dtype=torch.int64, device=device), _blank_plan(device), none_M, none_M, none_M)


def blank_tree_batch(device: torch.device, dtype: torch.dtype) -> TreeBatch:
    """`blank_batch` for trees."""
    rows = blank_batch(device)
    none_M, number_M = rows.position_M, torch.empty(0, dtype=dtype, device=device)
    return TreeBatch(
        tokens_N=rows.tokens_N,
        plan=rows.plan,
        experts_NLK=None,
        position_M=none_M,
        target_M=none_M,
        old_M=number_M,
        advantage_M=number_M,
        weight_M=number_M,
        inverse_temperature_M=None,
        version_M=none_M,
    )


def _blank_plan(device: torch.device) -> CausalRows:
    plan = CausalRows(1, 1, device)
    plan.count_N = torch.zeros(1, dtype=torch.int64, device=device)
    return plan


def _on(
    device: torch.device,
    array: npt.NDArray[np.integer] | npt.NDArray[np.floating] | npt.NDArray[np.bool_],
    dtype: torch.dtype = torch.int64,
) -> Tensor:
    # Copies, because records are read-only and torch has no read-only tensors.
    host = torch.tensor(array, dtype=dtype)
    if device.type == "cuda":
        return host.pin_memory().to(device, non_blocking=True)
    return host
