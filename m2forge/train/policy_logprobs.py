"""Logprobs of the tokens that a step trained, under the policy before the update, as the loss computed them.

They are copied to the host asynchronously, as one array over all packs, and are complete when the step's report has
been read, so they cause no host sync.

Shapes: M loss edges.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from m2forge.records import FloatArray
from m2forge.tree.flat import FlatTree
from m2forge.tree.sample import Sample
from m2forge.tree.token_tree import TokenTree


class TokenLogprobs:
    def __init__(self, trees: Sequence[TokenTree], packs: Sequence[FlatTree], logp: Sequence[Tensor]) -> None:
        """`logp`: logprobs of each pack's edges."""
        self._trees, self._packs = trees, packs
        every_M = torch.cat(list(logp)).float() if logp else torch.empty(0)
        self._logp_M = every_M.to("cpu", non_blocking=True)

    def read(self) -> list[tuple[Sample, FloatArray]]:
        """Each trained sample with one logprob per sampled token. The device must have finished the step."""
        found: list[tuple[Sample, FloatArray]] = []
        logp_M: FloatArray = self._logp_M.numpy()
        first = 0
        for pack in self._packs:
            for index, (tree, sample) in enumerate(zip(pack.tree_S.tolist(), pack.sample_S.tolist(), strict=True)):
                edges = pack.edges_of(index)
                found.append((self._trees[tree].samples[sample], logp_M[first + edges.start : first + edges.stop]))
            first += pack.num_edges
        return found
