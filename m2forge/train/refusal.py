"""Token trees in; the trainable part of them out, and for each refused sample its name and the reason.

A refused sample is removed from its tree; the others stay, with their order, numbers and recorded routing. A sample
with extreme numbers would dominate the step or make it NaN: hence the bounds.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from m2forge.model.config import ModelConfig
from m2forge.train.config import PolicyConfig
from m2forge.tree.build import Problem
from m2forge.tree.flat import FlatTree
from m2forge.tree.sample import UNKNOWN_EXPERT, ExpertArray, Sample
from m2forge.tree.token_tree import TokenTree

MAX_ADVANTAGE = 1e6
WEIGHTS = (1e-12, 1e12)
MIN_LOGPROB = -1e4


def refuse_untrainable(
    trees: Sequence[TokenTree], model: ModelConfig, policy: PolicyConfig
) -> tuple[list[TokenTree], tuple[Problem, ...]]:
    """(trainable trees, problems); the group of a problem is the index of its tree in `trees`."""
    kept: list[TokenTree] = []
    problems: list[Problem] = []
    for index, tree in enumerate(trees):
        reasons = dict(_reasons(tree, model, policy))
        problems += [Problem(tree.samples[place].name, str(index), reason) for place, reason in reasons.items()]
        if not reasons:
            kept.append(tree)
        elif len(reasons) < len(tree.samples):
            kept.append(_without(tree, reasons.keys(), model, policy))
    return kept, tuple(problems)


def _reasons(tree: TokenTree, model: ModelConfig, policy: PolicyConfig) -> Iterator[tuple[int, str]]:
    """(index of a sample, why it cannot be trained)"""
    routing = _routing_reason(tree, model) if policy.replay == "recorded" else None
    is_suspect = _highest_id(tree, model) >= model.vocab_size
    for place, sample in enumerate(tree.samples):
        reason = routing or _number_reason(sample, policy) or _length_reason(sample, policy)
        if reason is None and is_suspect:
            reason = _content_reason(tree, place, model)
        if reason is not None:
            yield place, f"Sample {sample.name}: {reason}"


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


def _content_reason(tree: TokenTree, place: int, model: ModelConfig) -> str | None:
    highest_id = int(tree.path(place).max())
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
    for place, sample in enumerate(tree.samples):
        if place not in refused:
            rest.add(
                tree.call(place),
                sample.name,
                episode=sample.episode,
                advantage=sample.advantage,
                weight=sample.weight,
                experts=tree.routing(place) if policy.replay == "recorded" else None,
            )
    return rest


# -- recorded routing -------------------------------------------------------------------------------------------------


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
