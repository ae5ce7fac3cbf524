"""Trees in, packs within a token budget out, each for one forward and backward pass.

Trees above the budget are cut first. The sub-trees, largest first, each go into the fullest pack in which they fit;
sub-trees of one tree in the same pack are merged again. `tree_S` and `sample_S` of a pack identify each sample; over
all packs every sample, and so every loss edge, occurs exactly once.

A sub-tree is a set of samples and the union of their paths. Every sample goes to exactly one sub-tree, whole, so every
loss edge is computed once, with all its ancestors, and the gradient is that of the uncut tree. Tokens that sub-trees
share are computed in each; there a token counts for the samples of that sub-tree, and the counts add up to those of the
uncut tree. Few ancestors should repeat. Only leaves matter: a sample that ends above a leaf goes along with it. Leaves
are in depth-first order, and each shares its first `shared` tokens with the one before; any two share the minimum of
`shared` between them. So the size of a set of leaves is a sum over its members:

    size(l_1 < l_2 < …) = depth(l_1) + Σ_{k≥2} [ depth(l_k) − min(shared(l_{k−1}+1 … l_k)) ]

Up to MAX_EXACT_LEAVES leaves the optimal partition is found. Above, sets of leaves are merged from the deepest branch
upwards, where merging saves most, by best fit; on small trees that repeats 0.3% more than the optimum, on average.

Shapes: L leaves.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from m2forge.errors import RecordError
from m2forge.tree.flat import FlatTree, Indices, flatten, join
from m2forge.tree.token_tree import TokenTree

MAX_EXACT_LEAVES = 10
"""The search over all partitions takes 3^L steps, about 20 ms at this many leaves."""


@dataclass(frozen=True, slots=True)
class Subtree:
    samples: tuple[int, ...]
    """Indices of its samples in the tree."""
    num_tokens: int


@dataclass(slots=True)
class _Bin:
    num_tokens: int = 0
    samples: dict[int, list[int]] = field(default_factory=dict)
    """Samples by index of the tree."""

    def add(self, tree_index: int, subtree: Subtree) -> None:
        self.num_tokens += subtree.num_tokens
        self.samples.setdefault(tree_index, []).extend(subtree.samples)


def pack_trees(trees: Sequence[TokenTree], budget: int, *, with_experts: bool = True) -> list[FlatTree]:
    """Raises RecordError, naming the sample, if a single path exceeds the budget. Without recorded routing, trees of
    different models can be packed together."""
    subtrees = [(index, subtree) for index, tree in enumerate(trees) for subtree in cut_tree(tree, budget)]
    bins: list[_Bin] = []
    for tree_index, subtree in sorted(subtrees, key=lambda item: item[1].num_tokens, reverse=True):
        fitting = [other for other in bins if other.num_tokens + subtree.num_tokens <= budget]
        if fitting:
            fullest = max(fitting, key=lambda other: other.num_tokens)
        else:
            fullest = _Bin()
            bins.append(fullest)
        fullest.add(tree_index, subtree)
    return [
        join(
            [
                flatten(trees[index], sorted(samples), index, with_experts=with_experts)
                for index, samples in sorted(filled.samples.items())
            ]
        )
        for filled in bins
    ]


# -- cutting a tree above the budget -----------------------------------------------------------------------------------


def cut_tree(tree: TokenTree, budget: int) -> list[Subtree]:
    """Sub-trees of at most `budget` tokens that together hold every sample once."""
    _require_paths_fit(tree, budget)
    if not tree.samples:
        return []
    if tree.num_tokens <= budget:
        return [Subtree(tuple(range(len(tree.samples))), tree.num_tokens)]
    flat = flatten(tree)
    leaves = Leaves.of(flat)
    sets = partition(leaves, budget)
    set_L = np.empty(leaves.depth_L.size, np.int64)
    for index, members in enumerate(sets):
        set_L[members] = index
    # Any leaf below a sample's last token works: the first one that ends there or later.
    set_S = set_L[leaves.last_L.searchsorted(flat.last_S, "left")]
    return [
        Subtree(tuple((set_S == index).nonzero()[0].tolist()), leaves.size(members))
        for index, members in enumerate(sets)
    ]


@dataclass(frozen=True)
class Leaves:
    """The leaves of a tree in depth-first order: all that the size of a sub-tree depends on."""

    depth_L: Indices
    """Length of the path to each leaf in tokens."""
    shared_L: Indices
    """Number of tokens shared with the path to the previous leaf, 0 for the first."""
    last_L: Indices
    """Index of the last token of each leaf."""

    @classmethod
    def of(cls, flat: FlatTree) -> "Leaves":
        num_nodes = flat.node_start_V.size
        is_parent_V = np.zeros(num_nodes + 1, np.bool_)
        is_parent_V[flat.node_parent_V] = True
        (leaf_L,) = (~is_parent_V[:num_nodes]).nonzero()
        num_V = flat.node_end_V - flat.node_start_V
        # The node after a leaf is a child of the last ancestor that this leaf shares with the next one.
        shared_L = np.concatenate(([0], flat.node_depth_V[leaf_L[:-1] + 1]))
        return cls(
            depth_L=(flat.node_depth_V + num_V)[leaf_L].astype(np.int64),
            shared_L=shared_L.astype(np.int64),
            last_L=(flat.node_end_V - 1)[leaf_L].astype(np.int64),
        )

    def size(self, members: Sequence[int]) -> int:
        """Tokens in the union of the paths to an ascending set of leaves."""
        between = [int(self.shared_L[a + 1 : b + 1].min()) for a, b in pairwise(members)]
        return int(self.depth_L[list(members)].sum()) - sum(between)


def partition(leaves: Leaves, budget: int) -> list[list[int]]:
    """Sets of leaves, each within the budget, with few tokens in total."""
    if leaves.depth_L.size <= MAX_EXACT_LEAVES:
        return partition_exactly(leaves, budget)
    return partition_by_merging(leaves, budget)


def partition_exactly(leaves: Leaves, budget: int) -> list[list[int]]:
    """The partition with the fewest tokens.

    best(set) = min over subsets within the budget that contain the first leaf of the set: size(subset) + best(rest)
    """
    num_leaves = leaves.depth_L.size
    size = _subset_sizes(leaves)
    cost = np.where(size <= budget, size, np.iinfo(np.int64).max // 2)
    best = np.zeros(1 << num_leaves, np.int64)
    choice = np.zeros(1 << num_leaves, np.int64)
    for members in range(1, 1 << num_leaves):
        first = members & -members
        subsets = first | _subsets(members ^ first)
        totals = cost[subsets] + best[members ^ subsets]
        at = int(totals.argmin())
        best[members], choice[members] = totals[at], subsets[at]
    sets = []
    rest = (1 << num_leaves) - 1
    while rest:
        chosen = int(choice[rest])
        sets.append([leaf for leaf in range(num_leaves) if chosen >> leaf & 1])
        rest ^= chosen
    return sets


def partition_by_merging(leaves: Leaves, budget: int) -> list[list[int]]:
    """Merge sets of leaves at the branch where they join, deepest branches first."""
    num_leaves = leaves.depth_L.size
    depth, shared = leaves.depth_L.tolist(), [*leaves.shared_L.tolist(), 0]
    open_branches: list[tuple[int, list[_LeafSet]]] = []
    """Branches on the path to the current leaf, deepest last: depth, and the sets that join there."""
    for leaf in range(num_leaves):
        sets = [_LeafSet([leaf], depth[leaf])]
        branch = shared[leaf + 1]
        while open_branches and open_branches[-1][0] > branch:
            closed, siblings = open_branches.pop()
            sets = _merge(siblings + sets, closed, budget)
        if open_branches and open_branches[-1][0] == branch:
            open_branches[-1][1].extend(sets)
        else:
            open_branches.append((branch, sets))
    # At depth 0 nothing is shared, so merging would save nothing.
    return [sorted(members.leaves) for _, sets in open_branches for members in sets]


@dataclass(slots=True)
class _LeafSet:
    leaves: list[int]
    size: int


def _merge(sets: list[_LeafSet], branch: int, budget: int) -> list[_LeafSet]:
    """Merge sets that share exactly `branch` tokens: largest first, each into the fullest set in which it fits."""
    merged: list[_LeafSet] = []
    for members in sorted(sets, key=lambda members: members.size, reverse=True):
        fitting = [other for other in merged if other.size + members.size - branch <= budget]
        if fitting:
            fullest = max(fitting, key=lambda other: other.size)
            fullest.leaves += members.leaves
            fullest.size += members.size - branch
        else:
            merged.append(members)
    return merged


def _subset_sizes(leaves: Leaves) -> Indices:
    """Size of every set of leaves, indexed by bit mask."""
    sizes, highest = np.zeros(1, np.int64), np.full(1, -1, np.int64)
    for leaf in range(leaves.depth_L.size):
        # Tokens that this leaf shares with each of the leaves 0 … leaf − 1; 0 if there is no earlier leaf (−1).
        between = np.minimum.accumulate(leaves.shared_L[leaf:0:-1])[::-1]
        with_earlier = np.append(between, 0)
        sizes = np.concatenate((sizes, sizes + leaves.depth_L[leaf] - with_earlier[highest]))
        highest = np.concatenate((highest, np.full(highest.size, leaf)))
    return sizes


def _subsets(members: int) -> Indices:
    """All subsets of a bit mask."""
    subsets = np.zeros(1, np.int64)
    while members:
        bit = members & -members
        subsets = np.concatenate((subsets, subsets | bit))
        members ^= bit
    return subsets


def _require_paths_fit(tree: TokenTree, budget: int) -> None:
    for sample in tree.samples:
        if sample.num_tokens > budget:
            raise RecordError(
                f"Sample {sample.name}: its path of {sample.num_tokens} tokens is above the budget of {budget}; "
                "raise the budget or leave the sample out"
            )
