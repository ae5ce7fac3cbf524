"""The token tree: completion calls are added one by one, each common prefix is stored once.

Two calls share a token exactly if they agree on it and on all before it. So the tree depends only on the calls, not on
their order: nodes end exactly where paths branch. Adding a call costs a few vector comparisons, one per node of its
path. A call is validated before anything changes: a refused call leaves the tree as it was.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import NoReturn, Self, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from m2forge.errors import RecordError
from m2forge.records import Call, FinishReason, FloatArray, IntArray, RequestedSampling, Sampling, plain_sampling

ExpertArray: TypeAlias = npt.NDArray[np.int16]
"""(tokens, layers, chosen): the experts chosen for each token, in every layer with a router."""
UNKNOWN_EXPERT = -1
"""Value of all entries of a token whose routing was not recorded."""
MAX_VOCAB_SIZE = 2**31


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """A completion call without its token ids, which the tree stores once for all samples."""

    name: str
    """Name in errors and results; unique in its tree."""
    num_prompt: int
    """Prompt tokens of its path; the rest of the path was sampled."""
    logprobs: FloatArray
    """Logprob of each sampled token, under the distribution it was sampled from."""
    versions: IntArray
    """Policy version (step) that sampled each token."""
    finish_reason: FinishReason
    started_s: float
    finished_s: float
    episode: str = ""
    """The attempt it belongs to, if samples of one attempt are weighted together."""
    advantage: float = 0.0
    """Advantage of its tokens; 0 until rewards are known."""
    sampling: Sampling = field(default_factory=plain_sampling)
    weight: float = 1.0
    """Weight of each of its tokens, relative to those of other samples in the same optimizer step."""
    requested: RequestedSampling | None = None
    """The requested sampling, if `sampling` replaced it."""
    notices: tuple[str, ...] = ()
    """What the gateway did not honour of the request, one short text each."""

    def __post_init__(self) -> None:
        if not self.name:
            raise RecordError("Sample: name: expected text, received ''")
        if not math.isfinite(self.advantage):
            raise RecordError(f"Sample {self.name}: advantage: expected a finite number, received {self.advantage!r}")
        if not 0 <= self.weight < math.inf:
            raise RecordError(
                f"Sample {self.name}: weight: expected a finite number, at least 0, received {self.weight!r}"
            )

    @property
    def num_response(self) -> int:
        return self.logprobs.size

    @property
    def num_tokens(self) -> int:
        return self.num_prompt + self.logprobs.size

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sample):
            return NotImplemented
        return all(np.array_equal(getattr(self, item.name), getattr(other, item.name)) for item in fields(self))


def checked_experts(experts: npt.NDArray[np.integer]) -> ExpertArray:
    """(tokens, layers, chosen) as int16; a token's routing is complete or absent."""
    if experts.size and not UNKNOWN_EXPERT <= int(experts.min()) <= int(experts.max()) <= np.iinfo(np.int16).max:
        raise RecordError(f"expected -1 to 32767, received {experts.min()} to {experts.max()}")
    unknown = experts == UNKNOWN_EXPERT
    if bool((unknown.any((1, 2)) != unknown.all((1, 2))).any()):
        raise RecordError("expected all experts of a token or none, received a token routed in part")
    return experts.astype(np.int16)


class Node:
    """A run of tokens within which no paths branch. A node without children grows at its end. Splitting takes constant
    time: both halves are views of one buffer; the lower half, the only one that may still grow, owns the tail.
    """

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
        following = path[self.depth : self.depth + self.size]
        differs = self._tokens[: following.size] != following
        first = int(differs.argmax())
        return first if differs[first] else following.size

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


class TokenTree:
    def __init__(self, vocab_size: int) -> None:
        if not 1 <= vocab_size <= MAX_VOCAB_SIZE:
            raise RecordError(f"TokenTree: vocab_size: expected 1 to {MAX_VOCAB_SIZE}, received {vocab_size}")
        self.vocab_size = vocab_size
        self.experts_shape: tuple[int, int] | None = None
        """(layers, experts per layer) of recorded routing; None while no call has any."""
        self.num_tokens = 0
        """Stored tokens, shared ones counted once."""
        self.num_input_tokens = 0
        """Tokens of all calls, shared ones counted each time."""
        self._root = Node(np.empty(0, np.int32), 0, None)
        """Has no tokens, so that calls may differ from the first token on."""
        self._samples: list[Sample] = []
        self._ends: list[Node] = []
        """For each sample the node where its path ends, or a descendant of it: splits need not update samples."""
        self._names: set[str] = set()

    @classmethod
    def assemble(
        cls,
        vocab_size: int,
        nodes: Sequence[Node],
        samples: Sequence[Sample],
        ends: Sequence[Node],
        experts_shape: tuple[int, int] | None = None,
    ) -> Self:
        """A tree of nodes that are already linked; those without a parent become its roots."""
        tree = cls(vocab_size)
        tree.experts_shape = experts_shape
        for node in nodes:
            if node.parent is None:
                node.parent = tree._root
                tree._root.children[int(node.tokens[0])] = node
        tree.num_tokens = sum(node.size for node in nodes)
        for sample, end in zip(samples, ends, strict=True):
            tree._enter(sample, end)
        return tree

    @property
    def samples(self) -> tuple[Sample, ...]:
        return tuple(self._samples)

    def add(
        self,
        call: Call,
        name: str,
        *,
        episode: str = "",
        advantage: float = 0.0,
        weight: float = 1.0,
        experts: npt.NDArray[np.integer] | None = None,
    ) -> int:
        """Merge a call and return the index of its sample.

        `experts`: routing of the first tokens of the path, (tokens, layers, chosen), −1 for tokens computed by another
        request; an engine knows it for all but the last token. Where calls share a token, the first recorded routing
        stays.
        """
        if name in self._names:
            raise RecordError(f"Sample {name}: name: expected one that is not in the tree yet")
        sample = Sample(
            name=name,
            num_prompt=call.prompt_ids.size,
            logprobs=call.logprobs,
            versions=call.versions,
            finish_reason=call.finish_reason,
            started_s=call.started_s,
            finished_s=call.finished_s,
            episode=episode,
            advantage=advantage,
            sampling=call.sampling,
            weight=weight,
            requested=call.requested,
            notices=call.notices,
        )
        routed = None if experts is None else self._checked_experts(sample, experts)
        path = call.path()
        node, num_shared = self._descend(path)
        if num_shared < path.size:
            node = self._branch(sample, node, path, num_shared)
        if routed is not None:
            self._learn(node, routed)
        return self._enter(sample, node)

    def path(self, sample: int) -> IntArray:
        """Token ids of a sample, prompt and response."""
        parts: list[IntArray] = []
        num_left = self._samples[sample].num_tokens
        node: Node | None = self._ends[sample]
        while node is not None:
            parts.append(node.tokens[: max(0, num_left - node.depth)])
            node = node.parent
        return np.concatenate(parts[::-1])

    def call(self, index: int) -> Call:
        """The call of a sample."""
        return self._make_call(index, self.path(index))

    def calls(self) -> list[Call]:
        """Every call, as returned by `call`. Calls along one branch share the memory of its longest path, so that a
        conversation of n calls is copied once instead of n times."""
        found: dict[int, Call] = {}
        branches: dict[int, IntArray] = {}
        """Path of a branch through each node, by the node's id."""
        for index in sorted(range(len(self._samples)), key=lambda index: -self._samples[index].num_tokens):
            end = self._ends[index]
            if id(end) not in branches:
                parts: list[IntArray] = []
                node: Node | None = end
                while node is not None:
                    parts.append(node.tokens)
                    node = node.parent
                path = np.concatenate(parts[::-1])
                path.flags.writeable = False
                node = end
                while node is not None and id(node) not in branches:
                    branches[id(node)] = path
                    node = node.parent
            found[index] = self._make_call(index, branches[id(end)][: self._samples[index].num_tokens])
        return [found[index] for index in range(len(self._samples))]

    def _make_call(self, index: int, path: IntArray) -> Call:
        sample = self._samples[index]
        return Call(
            prompt_ids=path[: sample.num_prompt],
            response_ids=path[sample.num_prompt :],
            logprobs=sample.logprobs,
            versions=sample.versions,
            finish_reason=sample.finish_reason,
            started_s=sample.started_s,
            finished_s=sample.finished_s,
            sampling=sample.sampling,
            requested=sample.requested,
            notices=sample.notices,
        )

    def routing(self, index: int) -> ExpertArray | None:
        """Recorded routing of a sample's path, (tokens, layers, chosen), −1 where unknown; None if the tree has none.
        Includes what other samples recorded for shared tokens."""
        if self.experts_shape is None:
            return None
        parts: list[ExpertArray] = []
        num_left = self._samples[index].num_tokens
        node: Node | None = self._ends[index]
        while node is not None:
            parts.append(node.experts(self.experts_shape)[: max(0, num_left - node.depth)])
            node = node.parent
        return np.concatenate(parts[::-1])

    def nodes(self) -> tuple[list[Node], list[int]]:
        """All nodes in depth-first order, children by first token, and the index of each node's parent, −1 if none."""
        nodes: list[Node] = []
        parents: list[int] = []
        pending = [(self._root.children[token], -1) for token in sorted(self._root.children, reverse=True)]
        while pending:
            node, parent = pending.pop()
            pending += [(node.children[token], len(nodes)) for token in sorted(node.children, reverse=True)]
            nodes.append(node)
            parents.append(parent)
        return nodes, parents

    def ends(self) -> list[Node]:
        """For each sample the node that contains the last token of its path."""
        for index, sample in enumerate(self._samples):
            node = self._ends[index]
            while node.depth >= sample.num_tokens and node.parent is not None:
                node = node.parent
            self._ends[index] = node
        return list(self._ends)

    def __eq__(self, other: object) -> bool:
        """Whether both have the same samples in the same order, including paths and recorded routing."""
        if not isinstance(other, TokenTree):
            return NotImplemented
        ours, theirs = self.nodes()[0], other.nodes()[0]
        if (
            self.vocab_size != other.vocab_size
            or self.experts_shape != other.experts_shape
            or self._samples != other._samples
            or len(ours) != len(theirs)
        ):
            return False
        twin = dict(zip(ours, theirs, strict=True))
        return all(_same_node(node, twin[node], self.experts_shape) for node in ours) and all(
            twin[end] is other_end for end, other_end in zip(self.ends(), other.ends(), strict=True)
        )

    def _descend(self, path: IntArray) -> tuple[Node, int]:
        """The deepest node that shares a token with `path`, and the length of the prefix of `path` in the tree."""
        node, num_shared = self._root, 0
        while num_shared == node.end and num_shared < path.size:
            child = node.children.get(int(path[num_shared]))
            if child is None:
                break
            node = child
            num_shared += node.match(path)
        return node, num_shared

    def _branch(self, sample: Sample, node: Node, path: IntArray, num_shared: int) -> Node:
        """Add the rest of `path` below the shared part of `node`; returns the node with its end."""
        tokens = path[num_shared:]
        # The ufunc reduction, because for a short array the method's overhead dominates.
        if np.maximum.reduce(tokens) >= self.vocab_size:
            self._refuse_id(sample, path)
        self.num_tokens += tokens.size
        if num_shared == node.end and not node.children and node is not self._root:
            node.grow(tokens)
            return node
        if num_shared < node.end:
            node = node.split(num_shared - node.depth)
        # A copy, because a view would keep the rest of the path in memory.
        leaf = Node(tokens.copy(), num_shared, node)
        node.children[int(tokens[0])] = leaf
        return leaf

    def _refuse_id(self, sample: Sample, path: IntArray) -> NoReturn:
        index = int((path >= self.vocab_size).argmax())
        in_prompt = index < sample.num_prompt
        field = f"prompt_ids[{index}]" if in_prompt else f"response_ids[{index - sample.num_prompt}]"
        expected = f"expected an id below the vocabulary's {self.vocab_size}, received {path[index]}"
        raise RecordError(f"Sample {sample.name}: {field}: {expected}")

    def _checked_experts(self, sample: Sample, experts: npt.NDArray[np.integer]) -> ExpertArray:
        array = np.asarray(experts)
        record = f"Sample {sample.name}: experts"
        if (
            array.ndim != 3
            or array.dtype.kind not in "iu"
            or array.shape[0] > sample.num_tokens
            or 0 in array.shape[1:]
        ):
            raise RecordError(
                f"{record}: expected integers (tokens, layers, chosen) of at most {sample.num_tokens} tokens, "
                f"received {array.dtype} {array.shape}"
            )
        if self.experts_shape not in (None, array.shape[1:]):
            raise RecordError(
                f"{record}: expected {self.experts_shape} per token as before, received {array.shape[1:]}"
            )
        try:
            return checked_experts(array)
        except RecordError as error:
            raise RecordError(f"{record}: {error}") from error

    def _learn(self, node: Node, experts: ExpertArray) -> None:
        self.experts_shape = (experts.shape[1], experts.shape[2])
        above: Node | None = node
        while above is not None:
            if above.depth < experts.shape[0] and above.size:
                above.learn(experts[above.depth : above.end])
            above = above.parent

    def _enter(self, sample: Sample, end: Node) -> int:
        self._names.add(sample.name)
        self._samples.append(sample)
        self._ends.append(end)
        self.num_input_tokens += sample.num_tokens
        return len(self._samples) - 1


def _same_node(ours: Node, theirs: Node, experts_shape: tuple[int, int] | None) -> bool:
    return (
        ours.depth == theirs.depth
        and np.array_equal(ours.tokens, theirs.tokens)
        and (experts_shape is None or np.array_equal(ours.experts(experts_shape), theirs.experts(experts_shape)))
    )
