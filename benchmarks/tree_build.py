"""How fast token trees are built and how well they are cut, for benchmarks/tree.py. Runs on one core of any CPU."""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TypeVar

import numpy as np
from report import Bar, print_table
from tree_peer import find_trie, trie_builder
from tree_workload import Draw, Workload, build_tree

from m2forge.tree.flat import FlatTree, flatten
from m2forge.tree.pack import MAX_EXACT_LEAVES, Leaves, cut_tree, partition_by_merging
from m2forge.tree.token_tree import TokenTree

VOCAB_SIZE = 200_064

Made = TypeVar("Made")


def building(workloads: Sequence[Workload], *, with_peer: bool) -> list[Bar]:
    """Call by call from int32 arrays, the checks of the records included."""
    trie = find_trie() if with_peer else None
    if with_peer and trie is None:
        print("AReaL's trie is not installed here and is left out; tree_peer.py says how to install it")
    bars, rows = [], []
    for workload in workloads:
        calls = workload.calls(VOCAB_SIZE)
        num_input = sum(call.num_tokens for call in calls)
        seconds, tree = timed(partial(build_tree, calls, VOCAB_SIZE), 7)
        flatten_s, _ = timed(partial(flatten, tree), 5)
        rate = num_input / seconds / 1e6
        bars.append(Bar.at_least(f"{workload.name}: building, million input tokens/s", rate, 60.0))
        row = [workload.name, f"{len(calls):,}", f"{num_input:,}", f"{tree.num_tokens:,}", f"{rate:.0f}"]
        row.append(f"{flatten_s * 1e3:.1f}")
        if trie is not None:
            peer_s, num_tokens = timed(trie_builder(trie, calls), 1)
            assert num_tokens == tree.num_tokens
            bars.append(Bar.at_least(f"{workload.name}: building over AReaL's trie", peer_s / seconds, 20.0))
            row += [f"{num_input / peer_s / 1e6:.2f}", f"{peer_s / seconds:.0f}x"]
        rows.append(row)
    columns = ["", "calls", "input tokens", "tree tokens", "M tokens/s", "flatten, ms"]
    print_table(
        "Building, by the time of one core", columns + ["AReaL, M tokens/s", "ours is"] * (trie is not None), rows
    )
    return bars


def timed(step: Callable[[], Made], repeats: int) -> tuple[float, Made]:
    """(median seconds of a step on its core, what it made): what others do on the machine meanwhile does not count."""
    times = []
    for _ in range(repeats):
        started_s = time.process_time()
        made = step()
        times.append(time.process_time() - started_s)
    return statistics.median(times), made


def cutting(num_trees: int) -> list[Bar]:
    """Tokens that sub-trees repeat, over the fewest that any cut repeats, on random trees of up to 10 leaves."""
    generator = np.random.default_rng(0)
    ratios, merged_ratios = [], []
    for seed in range(num_trees):
        tree = _random_tree(seed)
        flat = flatten(tree)
        leaves = Leaves.of(flat)
        longest = max(sample.num_tokens for sample in tree.samples)
        budget = int(generator.integers(longest, max(longest + 1, tree.num_tokens)))
        best = fewest_tokens(flat, leaves, budget) - tree.num_tokens
        ours = sum(subtree.num_tokens for subtree in cut_tree(tree, budget)) - tree.num_tokens
        merged = sum(leaves.size(members) for members in partition_by_merging(leaves, budget)) - tree.num_tokens
        if best == 0:
            assert ours == 0
            continue
        ratios.append(ours / best)
        merged_ratios.append(merged / best)
    print_table(
        f"Repeated ancestors over brute force, {len(ratios)} random trees of up to {MAX_EXACT_LEAVES} leaves",
        ("", "mean", "worst"),
        [
            (name, f"{statistics.mean(values):.3f}", f"{max(values):.3f}")
            for name, values in (("cut_tree", ratios), ("by merging, the way for more leaves", merged_ratios))
        ],
    )
    return [Bar.at_most("cutting: repeated ancestors over brute force, worst", max(ratios), 1.1)]


def _random_tree(seed: int) -> TokenTree:
    """Calls that leave one another's paths at random places, a leaf each."""
    draw = Draw(VOCAB_SIZE, seed)
    paths = [draw.ids(draw.size(50, 200))]
    for _ in range(draw.size(4, MAX_EXACT_LEAVES)):
        source = paths[draw.size(0, len(paths) - 1)]
        paths.append(draw.answer(source[: draw.size(1, source.size)], draw.size(10, 200)))
    return build_tree(draw.calls, VOCAB_SIZE)


def fewest_tokens(flat: FlatTree, leaves: Leaves, budget: int) -> int:
    """Over all ways to share the leaves out into sets within the budget; a set's tokens are counted one by one."""
    last = flat.last_S.tolist()
    paths = [frozenset(flat.path(last.index(leaf)).tolist()) for leaf in leaves.last_L.tolist()]

    @cache
    def size(members: int) -> int:
        union: frozenset[int] = frozenset().union(*(path for n, path in enumerate(paths) if members >> n & 1))
        return len(union)

    @cache
    def best(members: int) -> int:
        if not members:
            return 0
        first = members & -members
        rest = subset = members ^ first
        totals = []
        while True:
            if size(subset | first) <= budget:
                totals.append(size(subset | first) + best(rest ^ subset))
            if not subset:
                return min(totals)
            subset = (subset - 1) & rest

    return best((1 << len(paths)) - 1)
