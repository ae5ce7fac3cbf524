"""Token trees in; what can be trained of them out, and by name what cannot, and why.

A sample that cannot be trained leaves its tree; those beside it stay, with their order, numbers and recorded routing.
"""

import math
from collections.abc import Collection, Iterator, Sequence

import numpy as np

from m2forge.model.config import ModelConfig
from m2forge.train.config import PolicyConfig
from m2forge.tree.build import Problem
from m2forge.tree.flatten import flatten
from m2forge.tree.sample import UNKNOWN_EXPERT, Sample
from m2forge.tree.token_tree import TokenTree


def refuse_untrainable(
    trees: Sequence[TokenTree], model: ModelConfig, policy: PolicyConfig
) -> tuple[list[TokenTree], tuple[Problem, ...]]:
    """The group of a problem is the place of its tree in `trees`."""
    kept: list[TokenTree] = []
    problems: list[Problem] = []
    for index, tree in enumerate(trees):
        reasons = dict(_reasons(tree, model, policy))
        problems += [Problem(tree.samples[place].name, str(index), reason) for place, reason in reasons.items()]
        if not reasons:
            kept.append(tree)
        elif len(reasons) < len(tree.samples):
            kept.append(_without(tree, reasons.keys(), model.vocab_size))
    return kept, tuple(problems)


def _reasons(tree: TokenTree, model: ModelConfig, policy: PolicyConfig) -> Iterator[tuple[int, str]]:
    """(place of a sample, why it cannot be trained)"""
    routing = _routing_reason(tree, model)
    is_suspect = _highest_id(tree, model) >= model.vocab_size or _highest_expert(tree, policy) >= _num_experts(model)
    for place, sample in enumerate(tree.samples):
        reason = routing or _number_reason(sample, policy) or _length_reason(sample, policy)
        if reason is None and is_suspect:
            reason = _content_reason(tree, place, model, policy)
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
    if not math.isfinite(sample.advantage):
        return f"advantage: expected a finite number, received {sample.advantage}"
    if not 0 < sample.weight < math.inf:
        return f"weight: expected a finite number above 0, received {sample.weight}"
    if policy.loss == "sft":
        return None
    if sample.sampling.temperature <= 0:
        return "sampling: temperature: expected a number above 0, received 0: a greedy choice has no log-probability"
    if sample.sampling.is_truncated and policy.truncated_sampling == "refuse":
        return f'sampling: expected none cut off, received {sample.sampling}; truncated_sampling = "allow" takes it'
    return None


def _length_reason(sample: Sample, policy: PolicyConfig) -> str | None:
    if sample.num_tokens <= policy.pack_tokens:
        return None
    return f"path: expected at most pack_tokens, {policy.pack_tokens} tokens, received {sample.num_tokens}"


def _content_reason(tree: TokenTree, place: int, model: ModelConfig, policy: PolicyConfig) -> str | None:
    flat = flatten(tree, [place])
    highest_id = int(flat.tokens_N.max())
    if highest_id >= model.vocab_size:
        return f"path: expected ids below the network's vocabulary of {model.vocab_size}, received {highest_id}"
    if flat.experts_NLK is None or policy.replay == "none":
        return None
    highest_expert = int(flat.experts_NLK.max())
    if highest_expert < _num_experts(model):
        return None
    return f"experts: expected numbers below {_num_experts(model)}, received {highest_expert}"


def _num_experts(model: ModelConfig) -> int:
    return 0 if model.moe is None else model.moe.num_experts


def _highest_id(tree: TokenTree, model: ModelConfig) -> int:
    if tree.vocab_size <= model.vocab_size:
        return -1
    return max((int(node.tokens.max()) for node in tree.nodes()[0]), default=-1)


def _highest_expert(tree: TokenTree, policy: PolicyConfig) -> int:
    shape = tree.experts_shape
    if shape is None or policy.replay == "none":
        return UNKNOWN_EXPERT
    return max((int(node.experts(shape).max()) for node in tree.nodes()[0]), default=UNKNOWN_EXPERT)


def _without(tree: TokenTree, refused: Collection[int], vocab_size: int) -> TokenTree:
    """The tree that the other samples make. Routing stays up to the first token of a path that has none."""
    rest = TokenTree(min(tree.vocab_size, vocab_size))
    for place, sample in enumerate(tree.samples):
        if place not in refused:
            experts_NLK = flatten(tree, [place]).experts_NLK
            if experts_NLK is not None:
                is_known_N = experts_NLK[:, 0, 0] != UNKNOWN_EXPERT
                experts_NLK = experts_NLK[: int(np.logical_and.accumulate(is_known_N).sum())]
            rest.add(
                tree.call(place),
                sample.name,
                episode=sample.episode,
                advantage=sample.advantage,
                weight=sample.weight,
                experts=experts_NLK,
            )
    return rest
