"""The token tree of an episode by call: for each call what it added, and to which call.

    leg      the tokens of a call's path that no earlier call has, from `start` on; the completion is its end
    parent   the call that first had the token before the leg
    chain    calls that each continue where their parent ended
    lane     the column in which a chain is drawn; chains that overlap in time have different ones

A leg depends only on earlier calls, so the first calls of a long episode can be shown before the rest is read.
"""

import bisect
import heapq
from dataclasses import dataclass

import numpy as np

from m2forge.records import IntArray
from m2forge.tree.token_tree import Node, Sample, TokenTree

NO_CALL = -1


@dataclass(frozen=True, slots=True)
class Leg:
    parent: int
    """Index of the parent call; NO_CALL at a root."""
    start: int
    num_prompt: int
    num_tokens: int
    """Tokens of the whole path, prompt and completion."""


class Trajectory:
    def __init__(self, tree: TokenTree) -> None:
        self.tree = tree
        self.samples: tuple[Sample, ...] = tree.samples
        self._ends = tree.ends()
        self.legs = _find_legs(self.samples, self._ends)
        self.chains = _find_chains(self.legs)
        self.lanes = _find_lanes(self.chains)

    def tokens(self, call: int, start: int, end: int) -> IntArray:
        """Tokens `start` to `end` of a call's path; nothing before `start` is gathered."""
        parts: list[IntArray] = []
        node: Node | None = self._ends[call]
        while node is not None and node.end > start:
            parts.append(node.tokens[max(0, start - node.depth) : max(0, end - node.depth)])
            node = node.parent
        return np.concatenate(parts[::-1]) if parts else np.empty(0, np.int32)


def _find_legs(samples: tuple[Sample, ...], ends: list[Node]) -> list[Leg]:
    held: dict[Node, tuple[list[int], list[int]]] = {}
    """For each node the depths up to which calls have its tokens, ascending, and the first call of each."""
    legs = []
    for call, (sample, end) in enumerate(zip(samples, ends, strict=True)):
        fresh: list[Node] = []
        node: Node | None = end
        while node is not None and node.size and node not in held:
            fresh.append(node)
            node = node.parent
        parent, start = NO_CALL, 0
        if node is not None and node in held:
            depths, calls = held[node]
            reach = node.end if fresh else sample.num_tokens
            start = min(depths[-1], reach)
            parent = calls[bisect.bisect_left(depths, start)]
            if reach > depths[-1]:
                depths.append(reach)
                calls.append(call)
        for node in fresh:
            held[node] = ([min(node.end, sample.num_tokens)], [call])
        legs.append(Leg(parent, start, sample.num_prompt, sample.num_tokens))
    return legs


def _find_chains(legs: list[Leg]) -> list[int]:
    """For each call the first call of its chain."""
    chains: list[int] = []
    continued: set[int] = set()
    for call, leg in enumerate(legs):
        goes_on = leg.parent != NO_CALL and leg.start == legs[leg.parent].num_tokens and leg.parent not in continued
        chains.append(chains[leg.parent] if goes_on else call)
        if goes_on:
            continued.add(leg.parent)
    return chains


def _find_lanes(chains: list[int]) -> list[int]:
    """For each call the lane of its chain: the first that is free from the chain's first call to its last."""
    last = {chain: call for call, chain in enumerate(chains)}
    free: list[int] = []
    busy: list[tuple[int, int]] = []
    lane_of: dict[int, int] = {}
    for call, chain in enumerate(chains):
        if chain != call:
            continue
        while busy and busy[0][0] < call:
            heapq.heappush(free, heapq.heappop(busy)[1])
        lane_of[chain] = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (last[chain], lane_of[chain]))
    return [lane_of[chain] for chain in chains]
