"""Trees in, packs within a token budget out, each for one forward and backward pass.

Trees above the budget are cut first. The sub-trees, largest first, each go into the fullest pack in which they fit;
sub-trees of one tree in the same pack are merged again. `tree_S` and `sample_S` of a pack identify each sample; over
all packs every sample, and so every loss edge, occurs exactly once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from m2forge.tree.cut import Subtree, cut_tree
from m2forge.tree.flat import FlatTree, join
from m2forge.tree.flatten import flatten
from m2forge.tree.token_tree import TokenTree


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
