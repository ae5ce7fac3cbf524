"""A pack in, micro-batches out: its segments (tree/segment.py), depth-first. `recompute = "walk"`.

The forward sweep runs a segment without gradients and keeps its keys and values on a stack (model/path.py), and its
last states, which MTP modules below need. In the backward sweep the segment is a micro-batch: it runs again with
gradients, over the keys and values of its ancestors, and its backward pass adds to their gradients. A segment follows
all segments below it, so its own gradients are complete. A leaf runs in the backward sweep only.

    segments a (b c (d e)):     down a, back b, down c, back d, back e, back c, back a

One path from a root to a leaf is held at a time, and the activations of one segment; no ancestor runs again for another
leaf. The balance loss needs the expert loads of the whole step before the first backward pass. Then `loads` takes the
forward sweep of every segment first, and keeps the keys and values of all that are not leaves until the backward sweep.

`sweep` is the forward sweep alone, for a loss without gradients.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Generic, Protocol

import numpy as np
import torch
from torch import Tensor

from m2forge.kernels.arithmetic import at_least_float32
from m2forge.model.path import Chain, PathPlan, PathStack, Subtrees
from m2forge.model.plan import Trees
from m2forge.model.transformer import Output
from m2forge.records import Pack
from m2forge.train.batch import Batch, BatchT, BatchT_co, TreeBatch, make_batch
from m2forge.train.config import WalkConfig
from m2forge.tree.flat import FlatTree
from m2forge.tree.segment import Segment, cut_documents, cut_segments, edges_by_segment, slice_tree


class Segments(Protocol[BatchT_co]):
    """A pack cut into segments."""

    @property
    def segments(self) -> Sequence[Segment]: ...

    def batch(self, index: int) -> tuple[BatchT_co, Subtrees | None]:
        """The batch of a segment, and its tokens; None if it holds whole trees."""
        ...


class Walk(Generic[BatchT]):
    def __init__(self, pack: Segments[BatchT], forward: Callable[[BatchT], Output], config: WalkConfig) -> None:
        self._pack, self._segments, self._forward = pack, pack.segments, forward
        # Padding fills a segment up to segment_tokens at most.
        num_tokens = max(segment.depth for segment in self._segments) + config.segment_tokens
        self._stack = PathStack(num_tokens, config.stack == "host")
        self._states: dict[int, list[Tensor]] = {}
        """Last states of each inner segment on the path."""
        self._state_grads: dict[int, list[Tensor | None]] = {}
        """Their gradients."""
        self._kept: dict[int, tuple[dict[tuple[str, int], Tensor], list[Tensor]]] = {}
        """Keys, values and last states of the inner segments, once `loads` has run."""
        self._visited: list[int] = []
        """Segments in the order of `batches`."""

    @property
    def num_batches(self) -> int:
        return len(self._segments)

    def loads(self) -> Iterator[Tensor | None]:
        for index, segment in enumerate(self._segments):
            yield self._down(index)
            if not segment.is_leaf:
                self._kept[index] = (
                    self._stack.copy(segment.depth, segment.depth + segment.num_tokens),
                    self._states[index],
                )

    def batches(self) -> Iterator[BatchT]:
        path: list[int] = []
        for index, segment in enumerate(self._segments):
            while path and path[-1] != segment.parent:
                yield from self._back(path.pop())
            if segment.is_leaf:
                yield from self._back(index)
            else:
                self._reach(index)
                path.append(index)
        while path:
            yield from self._back(path.pop())

    def sweep(self) -> Iterator[BatchT]:
        for index, segment in enumerate(self._segments):
            batch, plan = self._batch(index, self._states.get(segment.parent, []))
            yield batch
            self._keep_states(index, plan)

    def _reach(self, index: int) -> None:
        if index in self._kept:
            copied, self._states[index] = self._kept.pop(index)
            self._stack.restore(self._segments[index].depth, copied)
        else:
            self._down(index)

    @torch.no_grad()
    def _down(self, index: int) -> Tensor | None:
        segment = self._segments[index]
        batch, plan = self._batch(index, self._states.get(segment.parent, []))
        output: Output = self._forward(batch)
        self._keep_states(index, plan)
        return output.load_LE

    def _keep_states(self, index: int, plan: PathPlan | None) -> None:
        if plan is not None and not plan.is_leaf:
            self._states[index] = [state.clone() for state in plan.last_states]

    def _back(self, index: int) -> Iterator[BatchT]:
        parent = self._segments[index].parent
        above = [state.detach().requires_grad_() for state in self._states.get(parent, [])]
        batch, _ = self._batch(index, above, self._state_grads.pop(index, []))
        self._visited.append(index)
        yield batch
        self._states.pop(index, None)
        if above:
            totals = self._state_grads.setdefault(parent, [None] * len(above))
            self._state_grads[parent] = [_sum(total, state.grad) for total, state in zip(totals, above, strict=True)]

    def _batch(
        self, index: int, states_above: Sequence[Tensor], grads_below: Sequence[Tensor | None] = ()
    ) -> tuple[BatchT, PathPlan | None]:
        segment = self._segments[index]
        batch, subtrees = self._pack.batch(index)
        if subtrees is None:
            return batch, None
        plan = PathPlan(
            self._stack,
            subtrees,
            depth=segment.depth,
            num_tokens=segment.num_tokens,
            is_leaf=segment.is_leaf,
            states_above=states_above,
            grads_below=grads_below,
        )
        return replace(batch, plan=plan), plan


def _sum(total: Tensor | None, grad: Tensor | None) -> Tensor | None:
    if grad is None:
        return total
    grad = grad.to(at_least_float32(grad.dtype))
    return grad if total is None else total + grad


# -- packs of documents and trees --------------------------------------------------------------------------------------


class RowSegments:
    def __init__(
        self, pack: Pack, device: torch.device, max_tokens: int, length: int | None, min_tokens: int = 1
    ) -> None:
        """`length`: number of tokens to pad to; None: only segments shorter than `min_tokens` are padded, to these."""
        self._pack, self._device, self._length, self._min_tokens = pack, device, length, min_tokens
        self.segments = cut_documents(pack.lengths.tolist(), max_tokens)

    def batch(self, index: int) -> tuple[Batch, Subtrees | None]:
        segment, pack = self.segments[index], self._pack
        length = self._length
        if length is None and segment.num_tokens < self._min_tokens:
            length = self._min_tokens
        tokens = slice(segment.start, segment.end)
        start_D = pack.lengths.cumsum() - pack.lengths
        first, last = (int(start_D.searchsorted(token, "right")) - 1 for token in (segment.start, segment.end - 1))
        documents = slice(first, last + 1)
        lengths = pack.lengths[documents] if segment.is_whole else np.array([segment.num_tokens], np.int32)
        part = Pack(pack.tokens[tokens], pack.targets[tokens], lengths, pack.tags[documents])
        batch = make_batch(part, self._device, length)
        if segment.is_whole:
            return batch, None
        return batch, Chain(segment.depth, segment.num_tokens, self._device, length)


class TreeSegments:
    def __init__(self, flat: FlatTree, make: Callable[[FlatTree], TreeBatch], max_tokens: int) -> None:
        self._flat, self._make = flat, make
        self.segments = cut_segments(flat, max_tokens)
        self.edges = edges_by_segment(flat, self.segments)
        """Edges of the pack that each segment holds."""

    def batch(self, index: int) -> tuple[TreeBatch, Subtrees | None]:
        segment = self.segments[index]
        batch = self._make(slice_tree(self._flat, segment, self.edges[index]))
        assert isinstance(batch.plan, Trees)
        return batch, None if segment.is_whole else batch.plan


class TreeWalk(Walk[TreeBatch]):
    def __init__(self, pack: TreeSegments, forward: Callable[[TreeBatch], Output], config: WalkConfig) -> None:
        super().__init__(pack, forward, config)
        self._edges = pack.edges

    def in_pack_order(self, values: Sequence[Tensor]) -> Tensor:
        """Values of each batch's edges, in the order of `batches`, as those of the pack's edges."""
        value_M = torch.cat(list(values))
        order_M = np.concatenate([self._edges[index] for index in self._visited])
        return value_M[torch.from_numpy(np.argsort(order_M)).to(value_M.device)]
