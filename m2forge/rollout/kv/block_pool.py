"""The blocks of the paged KV cache: reference counts, prefix sharing and eviction.

A block stores the keys and values of `block_tokens` tokens. It is free, held by requests, or unused: no request holds
it, but its contents stay cached for later hits. A prefix tree identifies a block's contents: its tokens, the policy
version that computed them, and the block before it. Requests with a common prefix hold the same blocks.

    root ── [a b c d] v3 ── [e f g h] v3 ── [i j] v3       the last one is a tail: a block not full
                         └─ [e f x y] v3

A request that holds a block holds all blocks before it. It releases them from last to first, so the least recently used
block has no child: eviction (LRU) always removes a leaf.

No tensors here: a block is an index.
"""

from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from m2forge.records import PolicyVersion

Content = tuple[PolicyVersion, tuple[int, ...]]


class Block:
    __slots__ = ("children", "content", "index", "num_holders", "num_modules", "parent", "sorted")

    def __init__(self, index: int) -> None:
        self.index = index
        self.num_holders = 0
        self.num_modules = 0
        """How many MTP modules have run over all of its tokens."""
        self.content: Content | None = None
        """None while the block is not in the tree, where other requests cannot find it."""
        self.parent: Block | None = None
        self.children: dict[Content, Block] = {}
        self.sorted: dict[PolicyVersion, list[tuple[int, ...]]] = {}
        """The tokens of the children, by version, sorted, so that the longest common prefixes are adjacent."""


class Match(NamedTuple):
    """The cached prefix of a token sequence."""

    blocks: list[Block]
    tail: Block | None
    """A block that matches only in its first `num_tail` tokens, so it must be copied rather than shared."""
    num_tail: int


class BlockPool:
    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        self.num_blocks, self.block_tokens = num_blocks, block_tokens
        self._blocks = [Block(index) for index in range(num_blocks)]
        self._free = self._blocks[::-1]
        self._unused: OrderedDict[Block, None] = OrderedDict()
        """In LRU order, the least recently held first."""
        self._root = Block(-1)

    @property
    def num_available(self) -> int:
        """Blocks that `take` can return: free and unused ones."""
        return len(self._free) + len(self._unused)

    @property
    def num_unused(self) -> int:
        return len(self._unused)

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_available

    def take(self) -> Block:
        """Returns a block to write into, with one holder: a free one, or else the evicted LRU block."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._unused.popitem(last=False)
            self._unlink(block)
        block.num_holders, block.num_modules = 1, 0
        return block

    def hold(self, block: Block) -> None:
        if block.num_holders == 0:
            del self._unused[block]
        block.num_holders += 1

    def release(self, blocks: Sequence[Block]) -> None:
        """Release the last blocks of a request, or all of them, given in sequence order."""
        for block in reversed(blocks):
            block.num_holders -= 1
            if block.num_holders:
                continue
            if block.content is None:
                self._free.append(block)
            else:
                self._unused[block] = None

    def match(self, tokens: Sequence[int], version: PolicyVersion, most: int) -> Match:
        """Finds the cached blocks of at most the first `most` tokens; does not hold them."""
        size, node = self.block_tokens, self._root
        blocks: list[Block] = []
        while (len(blocks) + 1) * size <= most:
            start = len(blocks) * size
            child = node.children.get((version, tuple(tokens[start : start + size])))
            if child is None:
                break
            blocks.append(child)
            node = child
        start = len(blocks) * size
        return Match(blocks, *_longest(node, version, tokens[start : min(start + size, most)]))

    def publish(self, block: Block, parent: Block | None, version: PolicyVersion, tokens: Sequence[int]) -> Block:
        """Add a held block to the tree behind `parent`. If the tree has an equal block, hold and return that one and
        release the given one."""
        node, content = parent or self._root, (version, tuple(tokens))
        known = node.children.get(content)
        if known is not None:
            self.hold(known)
            self.release([block])
            return known
        block.content, block.parent = content, node
        node.children[content] = block
        insort(node.sorted.setdefault(version, []), content[1])
        return block

    def clear(self) -> None:
        """Empty the prefix cache. No block may be held."""
        assert not self.num_held, "the prefix cache is cleared while requests hold blocks"
        while self._unused:
            block, _ = self._unused.popitem(last=False)
            self._unlink(block)
            self._free.append(block)

    def _unlink(self, block: Block) -> None:
        assert block.content is not None
        assert block.parent is not None
        assert not block.children, "a block with children is evicted"
        (version, tokens), node = block.content, block.parent
        del node.children[block.content]
        siblings = node.sorted[version]
        del siblings[bisect_left(siblings, tokens)]
        if not siblings:
            del node.sorted[version]
        block.content = block.parent = None

    def audit(self, holders: Iterable[Sequence[Block]]) -> None:
        """Check every count and link against the blocks that the requests hold."""
        held: Counter[Block] = Counter()
        for blocks in holders:
            held.update(blocks)
            assert len(set(blocks)) == len(blocks), "a request holds a block twice"
            for before, block in zip([self._root, *blocks], blocks, strict=False):
                assert block.parent in (None, before), "a request's previous block is not the block's parent"
                assert block.content is None or before is self._root or before.content is not None, "a gap in the tree"
        for node in (self._root, *self._blocks):
            contents = [(version, tokens) for version, each in node.sorted.items() for tokens in each]
            assert Counter(contents) == Counter(node.children.keys()), "children and their order differ"
            assert all(each == sorted(each) and each for each in node.sorted.values()), "children are out of order"
        rank = {block: rank for rank, block in enumerate(self._unused)}
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        for block in self._blocks:
            assert block.num_holders == held[block], (
                f"block {block.index} counts {block.num_holders}, has {held[block]}"
            )
            states = (block in free, block in rank, block.num_holders > 0)
            assert sum(states) == 1, f"block {block.index} is free, unused, held: {states}"
            assert (block.content is None) == (block.parent is None)
            assert not (block in free and block.content), "a free block is in the prefix tree"
            assert not (block in rank and block.content is None), "an unused block is not in the prefix tree"
            if block.parent is not None and block.content is not None:
                assert block.parent.children.get(block.content) is block
                assert len(block.content[1]) == self.block_tokens or not block.children, "a partial block has children"
            for child in block.children.values():
                assert child.parent is block
                assert block.num_holders >= child.num_holders, "a request holds a block without the one before it"
                assert block not in rank or rank[child] < rank[block], "a block would be evicted before its child"


def _longest(node: Block, version: PolicyVersion, tokens: Sequence[int]) -> tuple[Block | None, int]:
    """The child of `node` with the longest common prefix, and that prefix's length."""
    siblings, wanted = node.sorted.get(version, []), tuple(tokens)
    rank = bisect_left(siblings, wanted)
    near = siblings[max(rank - 1, 0) : rank + 1]
    most, best = max(((_num_equal(other, wanted), other) for other in near), default=(0, ()))
    return (node.children[version, best], most) if most else (None, 0)


def _num_equal(some: Sequence[int], others: Sequence[int]) -> int:
    """Length of the common prefix."""
    different = (rank for rank, (a, b) in enumerate(zip(some, others, strict=False)) if a != b)
    return next(different, min(len(some), len(others)))
