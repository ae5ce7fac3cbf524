"""Random forests, as the node tables that tree attention takes."""

import torch
from hypothesis import strategies as st
from torch import Tensor

from m2forge.kernels.tree_attention import TreeLayout


@st.composite
def layouts(draw: st.DrawFn, lengths: st.SearchStrategy[int] | None = None, max_nodes: int = 24) -> TreeLayout:
    """Nodes hang from any node on the path to the one before, or begin a tree; `lengths`: tokens of a node."""
    lengths = st.integers(1, 3) | st.integers(1, 40) if lengths is None else lengths
    path: list[int] = []
    """Nodes from the root down to the one before."""
    parents, ends = [], [0]
    for node in range(draw(st.integers(1, max_nodes))):
        # Seldom a tree of its own, often a child of the last node or of one near it.
        kept = draw(st.sampled_from((len(path), max(0, len(path) - 1), max(0, len(path) - 2), len(path) // 2)))
        del path[kept:]
        parents.append(path[-1] if path else -1)
        path.append(node)
        ends.append(ends[-1] + draw(lengths))
    return layout_of(parents, ends)


def layout_of(parents: list[int], bounds: list[int]) -> TreeLayout:
    """`bounds`: where each node starts, then where the last one ends."""
    exits = list(bounds[1:])
    for node in reversed(range(len(parents))):
        if parents[node] >= 0:
            exits[parents[node]] = max(exits[parents[node]], exits[node])
    return TreeLayout(*(torch.tensor(column) for column in (bounds[:-1], bounds[1:], parents, exits)))


def exit_of(layout: TreeLayout) -> Tensor:
    """exit_N."""
    return layout.exit_V.repeat_interleave(layout.end_V - layout.start_V)


def position_of(layout: TreeLayout) -> Tensor:
    """Depth of each token."""
    depth: list[int] = []
    for start, end, parent in zip(*(x.tolist() for x in (layout.start_V, layout.end_V, layout.parent_V)), strict=True):
        first = 0 if parent < 0 else depth[int(layout.end_V[parent]) - 1] + 1
        depth += range(first, first + end - start)
    return torch.tensor(depth)


def seen(layout: TreeLayout) -> Tensor:
    """(N, N): whether the query of the row is the key of the column or below it, by its chain of parents."""
    num_tokens = layout.num_tokens
    sees = torch.zeros(num_tokens, num_tokens, dtype=torch.bool)
    for start, end, parent in zip(*(x.tolist() for x in (layout.start_V, layout.end_V, layout.parent_V)), strict=True):
        for token in range(start, end):
            before = token - 1 if token > start else int(layout.end_V[parent]) - 1 if parent >= 0 else None
            if before is not None:
                sees[token] = sees[before]
            sees[token, token] = True
    return sees
