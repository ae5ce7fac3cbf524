"""A node of a token tree: a run of tokens within which no paths branch.

A node without children grows at its end. Splitting takes constant time: both halves are views of one buffer; the lower
half, the only one that may still grow, owns the tail.
"""

from typing import Self, TypeVar

import numpy as np

from m2forge.records import IntArray
from m2forge.tree.sample import UNKNOWN_EXPERT, ExpertArray


class Node:
    __slots__ = ("_experts", "_tokens", "children", "depth", "parent", "size")

    def __init__(self, tokens: IntArray, depth: int, parent: Self | None) -> None:
        """`tokens` is not copied, and must belong to this node alone."""
        self._tokens = tokens
        """At least `size` tokens; the rest is spare capacity."""
        self._experts: ExpertArray | None = None
        """As many rows as the token buffer."""
        self.size = tokens.size
        self.depth = depth
        """Number of tokens above this node on its path."""
        self.parent = parent
        self.children: dict[int, Self] = {}
        """Children by first token."""

    @property
    def end(self) -> int:
        """Depth after the last token."""
        return self.depth + self.size

    @property
    def tokens(self) -> IntArray:
        return self._tokens[: self.size]

    def experts(self, shape: tuple[int, int]) -> ExpertArray:
        """One row of `shape` per token, UNKNOWN_EXPERT where no routing was recorded."""
        if self._experts is None:
            return np.full((self.size, *shape), UNKNOWN_EXPERT, np.int16)
        return self._experts[: self.size]

    def match(self, path: IntArray) -> int:
        """Length of the common prefix of this node and `path` from this node's depth on. `path` reaches deeper."""
        ahead = path[self.depth : self.depth + self.size]
        differs = self._tokens[: ahead.size] != ahead
        first = int(differs.argmax())
        return first if differs[first] else ahead.size

    def split(self, size: int) -> Self:
        """Move the first `size` tokens to a new node above, which replaces this one in its parent and is returned."""
        above = type(self)(self._tokens[:size], self.depth, self.parent)
        above.children[int(self._tokens[size])] = self
        if self.parent is not None:
            self.parent.children[int(self._tokens[0])] = above
        self._tokens = self._tokens[size:]
        if self._experts is not None:
            above._experts, self._experts = self._experts[:size], self._experts[size:]
        self.size, self.depth, self.parent = self.size - size, self.depth + size, above
        return above

    def grow(self, tokens: IntArray) -> None:
        """Append tokens. Capacity doubles, so that a chain of many calls has amortized constant copying cost."""
        needed = self.size + tokens.size
        if needed > self._tokens.size:
            capacity = max(needed, 2 * self.size)
            self._tokens = _enlarged(self._tokens, self.size, capacity)
            if self._experts is not None:
                self._experts = _enlarged(self._experts, self.size, capacity)
        self._tokens[self.size : needed] = tokens
        if self._experts is not None:
            self._experts[self.size : needed] = UNKNOWN_EXPERT
        self.size = needed

    def learn(self, experts: ExpertArray) -> None:
        """Record the routing of this node's first tokens where it is unknown; −1 stays unknown."""
        if self._experts is None:
            self._experts = np.full((self._tokens.size, *experts.shape[1:]), UNKNOWN_EXPERT, np.int16)
        known = self._experts[: experts.shape[0]]
        unknown = known[:, 0, 0] == UNKNOWN_EXPERT
        known[unknown] = experts[unknown]


_Array = TypeVar("_Array", IntArray, ExpertArray)


def _enlarged(array: _Array, size: int, capacity: int) -> _Array:
    larger = np.empty((capacity, *array.shape[1:]), array.dtype)
    larger[:size] = array[:size]
    return larger
