"""The completion calls that benchmarks/tree.py trains on, drawn from a seed, and the rows that others make of them.

    group      answers to one prompt
    episodes   attempts at one task, turn by turn: a call's prompt is all before it, then comes a tool's result
    branching  attempts with sub-agents, which start from a prompt of their own that they all share, and with context
               compaction: a context that grew too long becomes prompt, summary and last turns

Rows are what trains without trees: one per call, or linear ones, in which calls that continue one another are one row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from m2forge.records import Call, FinishReason, IntArray
from m2forge.tree.flat import FlatTree
from m2forge.tree.pack import Leaves
from m2forge.tree.token_tree import TokenTree


class TokenCall(NamedTuple):
    """Ids of a completion call and what came with them, as a gateway hands them over."""

    prompt_ids: IntArray
    response_ids: IntArray
    logprobs: npt.NDArray[np.float32]
    versions: IntArray

    @property
    def num_tokens(self) -> int:
        return self.prompt_ids.size + self.response_ids.size

    def check(self) -> Call:
        return Call(*self, finish_reason=FinishReason.STOP, started_s=0.0, finished_s=1.0)


class Draw:
    """Random token ids, and calls that answer with them."""

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        self._vocab_size, self._generator = vocab_size, np.random.default_rng(seed)
        self.calls: list[TokenCall] = []

    def ids(self, size: int) -> IntArray:
        return self._generator.integers(0, self._vocab_size, size).astype(np.int32)

    def size(self, least: int, most: int) -> int:
        return int(self._generator.integers(least, most + 1))

    def happens(self, probability: float) -> bool:
        return bool(self._generator.random() < probability)

    def answer(self, prompt_ids: IntArray, size: int) -> IntArray:
        """Record a call; prompt and response are returned."""
        response = self.ids(size)
        logprobs = -self._generator.random(size, np.float32)
        self.calls.append(TokenCall(prompt_ids, response, logprobs, np.zeros(size, np.int32)))
        return np.concatenate((prompt_ids, response))


def group(draw: Draw, *, num_answers: int, prompt: int, answer: int) -> None:
    prompt_ids = draw.ids(prompt)
    for _ in range(num_answers):
        draw.answer(prompt_ids.copy(), answer)


def episodes(draw: Draw, *, num_episodes: int, prompt: int, turns: int, action: int, observation: int) -> None:
    prompt_ids = draw.ids(prompt)
    contexts = [prompt_ids.copy() for _ in range(num_episodes)]
    for turn in range(turns):
        for episode, context in enumerate(contexts):
            seen = np.concatenate((context, draw.ids(observation))) if turn else context
            contexts[episode] = draw.answer(seen, action)


def branching(draw: Draw, *, num_episodes: int, prompt: int, agent_prompt: int, turns: int, limit: int) -> None:
    """`agent_prompt`: of the sub-agents. `limit`: a context above it is compacted."""
    prompt_ids, agent_ids = draw.ids(prompt), draw.ids(agent_prompt)
    for _ in range(num_episodes):
        context, starts = prompt_ids.copy(), list[int]()
        for _ in range(turns):
            starts.append(context.size)
            context = draw.answer(context, draw.size(32, 256))
            if draw.happens(0.1):
                _sub_agent(draw, agent_ids)
            context = np.concatenate((context, draw.ids(draw.size(32, 256))))
            if context.size > limit:
                request = np.concatenate((context, draw.ids(64)))
                summary = draw.answer(request, 256)[request.size :]
                last_turns = context[starts[-3:][0] :]
                context = np.concatenate((prompt_ids, summary, last_turns))
                starts.clear()


def _sub_agent(draw: Draw, agent_ids: IntArray) -> None:
    context = np.concatenate((agent_ids, draw.ids(draw.size(64, 256))))
    for _ in range(draw.size(3, 10)):
        context = np.concatenate((draw.answer(context, draw.size(32, 128)), draw.ids(draw.size(32, 256))))


@dataclass(frozen=True)
class Workload:
    name: str
    text: str
    """What it is, for the table."""
    every: int
    """Rows per call are measured on every n-th call by length and scaled by FLOPs; 1: on all calls."""
    fill: Callable[[Draw], None]

    def calls(self, vocab_size: int) -> list[TokenCall]:
        draw = Draw(vocab_size)
        self.fill(draw)
        return draw.calls


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload(
            "group",
            "16 answers of 1024 to one prompt of 8192",
            1,
            lambda draw: group(draw, num_answers=16, prompt=8192, answer=1024),
        ),
        Workload(
            "agent",
            "8 episodes, prompt 4096, 24 turns of 128+128",
            8,
            lambda draw: episodes(draw, num_episodes=8, prompt=4096, turns=24, action=128, observation=128),
        ),
        Workload(
            "deep",
            "16 episodes, prompt 8192, 96 turns of 64+64",
            8,
            lambda draw: episodes(draw, num_episodes=16, prompt=8192, turns=96, action=64, observation=64),
        ),
        Workload(
            "branching",
            "8 episodes of 40 turns, sub-agents, contexts compacted above 10240",
            8,
            lambda draw: branching(draw, num_episodes=8, prompt=4096, agent_prompt=1024, turns=40, limit=10_240),
        ),
    )
}
SMALL_AGENT = Workload(
    "agent",
    "scaled down: 8 episodes, prompt 256, 24 turns of 8+8",
    8,
    lambda draw: episodes(draw, num_episodes=8, prompt=256, turns=24, action=8, observation=8),
)


def build_tree(calls: Sequence[TokenCall], vocab_size: int) -> TokenTree:
    tree = TokenTree(vocab_size)
    for index, call in enumerate(calls):
        tree.add(call.check(), str(index))
    return tree


@dataclass(frozen=True)
class Row:
    tokens: IntArray
    position: npt.NDArray[np.int64]
    """Index of the token that predicts, by loss edge."""
    target: IntArray
    sample: npt.NDArray[np.int64]
    """Which sample each loss edge belongs to."""

    @property
    def num_tokens(self) -> int:
        return self.tokens.size


def call_rows(tree: TokenTree) -> list[Row]:
    """One row per call."""
    return [_row(tree.path(index), tree, [index]) for index in range(len(tree.samples))]


def linear_rows(tree: TokenTree, flat: FlatTree) -> list[Row]:
    """One row per longest call; the calls that it continues lie in it."""
    last_L = Leaves.of(flat).last_L
    leaf_S = last_L.searchsorted(flat.last_S, "left")
    rows = []
    for leaf in range(last_L.size):
        (samples,) = (leaf_S == leaf).nonzero()
        longest = max(samples.tolist(), key=lambda index: tree.samples[index].num_tokens)
        rows.append(_row(tree.path(longest), tree, samples.tolist()))
    return rows


def _row(path: IntArray, tree: TokenTree, samples: Sequence[int]) -> Row:
    spans = [(tree.samples[index].num_prompt, tree.samples[index].num_tokens) for index in samples]
    child = np.concatenate([np.arange(*span) for span in spans])
    sample = np.repeat(np.array(samples, np.int64), [end - start for start, end in spans])
    return Row(path, child - 1, path[child], sample)


def pack_rows(rows: Sequence[Row], budget: int) -> list[list[Row]]:
    """As few packs as fit the budget, as equally full as can be: longest row first, each to the emptiest pack."""
    num_packs = -(-sum(row.num_tokens for row in rows) // budget)
    while True:
        packs: list[list[Row]] = [[] for _ in range(num_packs)]
        sizes = [0] * num_packs
        for row in sorted(rows, key=lambda row: row.num_tokens, reverse=True):
            emptiest = sizes.index(min(sizes))
            packs[emptiest].append(row)
            sizes[emptiest] += row.num_tokens
        if max(sizes) <= budget:
            return packs
        num_packs += 1
