"""Random sets of branching calls, and the plain twin of a token tree: the set of all prefixes of all paths."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from m2forge.records import Call, FinishReason, RequestedSampling, Sampling
from m2forge.tree.flat import FlatTree
from m2forge.tree.token_tree import TokenTree

VOCAB = 5
EXPERTS_SHAPE = (2, 3)
SAMPLINGS = (Sampling(), Sampling(0.7), Sampling(), Sampling(1.2, top_p=0.9, top_k=7, min_p=0.1), Sampling(0.0))

IdsLike = Sequence[int] | npt.NDArray[np.integer]

Prefix = tuple[int, ...]
Edge = tuple[Prefix, int, str, float, int]
"""Tokens before, token predicted, name of the sample, old log-probability, version."""


def make_call(prompt: IdsLike, response: IdsLike, seed: int = 0) -> Call:
    generator = np.random.default_rng(seed)
    return Call(
        prompt_ids=np.array(prompt, np.int32),
        response_ids=np.array(response, np.int32),
        logprobs=-generator.random(len(response), np.float32),
        versions=np.sort(generator.integers(0, 4, len(response))).astype(np.int32),
        finish_reason=list(FinishReason)[seed % 3],
        started_s=float(seed),
        finished_s=seed + 0.5,
        sampling=SAMPLINGS[seed % len(SAMPLINGS)],
        requested=RequestedSampling(SAMPLINGS[seed % 2], (None, 7, -(2**63))[seed % 3]) if seed % 4 else None,
        notices=((), ("image: replaced",), ("a", "é"))[seed % 3],
    )


@st.composite
def call_sets(draw: st.DrawFn, max_calls: int = 14) -> list[Call]:
    """Calls that continue, repeat, shorten or leave one another's paths, on few ids, so that much is shared."""
    paths: list[list[int]] = [[]]
    calls = []
    tokens = st.lists(st.integers(0, VOCAB - 1), max_size=7)
    for seed in range(draw(st.integers(1, max_calls))):
        source = draw(st.sampled_from(paths))
        path = source[: draw(st.integers(0, len(source)))] + draw(tokens)
        path = path or [draw(st.integers(0, VOCAB - 1))]
        num_prompt = draw(st.integers(1, len(path)))
        calls.append(make_call(path[:num_prompt], path[num_prompt:], seed))
        paths.append(path)
    return calls


def build(calls: Sequence[Call], names: Sequence[str] | None = None) -> TokenTree:
    tree = TokenTree(VOCAB)
    for index, call in enumerate(calls):
        name = names[index] if names else f"s{index}"
        tree.add(call, name, episode=f"e{index % 3}", advantage=index / 7, weight=1 / (index + 1))
    return tree


def path_of(call: Call) -> Prefix:
    return (*call.prompt_ids.tolist(), *call.response_ids.tolist())


def naive_multiplicity(calls: Sequence[Call]) -> Counter[Prefix]:
    """Every prefix of every path, with how many paths have it."""
    return Counter(path_of(call)[:end] for call in calls for end in range(1, len(path_of(call)) + 1))


def naive_edges(calls: Sequence[Call], names: Sequence[str] | None = None) -> Counter[Edge]:
    edges: Counter[Edge] = Counter()
    for index, call in enumerate(calls):
        path, first = path_of(call), call.prompt_ids.size
        for place, (logprob, version) in enumerate(zip(call.logprobs.tolist(), call.versions.tolist(), strict=True)):
            name = names[index] if names else f"s{index}"
            edges[path[: first + place], path[first + place], name, logprob, version] += 1
    return edges


def prefixes(flat: FlatTree) -> list[Prefix]:
    """The path to each token, by its chain of parents."""
    found: list[Prefix] = []
    for token, parent in zip(flat.tokens_N.tolist(), flat.parent_N.tolist(), strict=True):
        assert parent < len(found)
        found.append((*found[parent], token) if parent >= 0 else (token,))
    return found


def flat_edges(flat: FlatTree, trees: Sequence[TokenTree]) -> Counter[Edge]:
    prefix = prefixes(flat)
    edges: Counter[Edge] = Counter()
    columns = (
        flat.edge_position_M,
        flat.edge_target_M,
        flat.edge_sample_M,
        flat.edge_logprob_M,
        flat.edge_version_M,
        flat.edge_child_M,
    )
    for position, target, sample, logprob, version, child in zip(*(c.tolist() for c in columns), strict=True):
        assert prefix[child] == (*prefix[position], target)
        name = trees[flat.tree_S[sample]].samples[flat.sample_S[sample]].name
        edges[prefix[position], target, name, logprob, version] += 1
    return edges
