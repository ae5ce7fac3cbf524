"""Cutting keeps the budget and every loss edge once, and repeats hardly more ancestors than the best cut there is."""

from functools import cache

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from m2forge.errors import RecordError
from m2forge.records import Call
from m2forge.tree.flat import flatten
from m2forge.tree.pack import MAX_EXACT_LEAVES, Leaves, cut_tree, partition_by_merging
from m2forge.tree.token_tree import TokenTree
from tests.tree.draw import Prefix, build, call_sets, make_call, naive_multiplicity, path_of


def fewest_tokens(calls: list[Call], budget: int) -> int:
    """Over all partitions of the longest paths into sets whose union is within the budget, the fewest tokens."""
    paths = {path_of(call) for call in calls}
    leaves = sorted(path for path in paths if not any(other[: len(path)] == path != other for other in paths))
    cells = [frozenset(path[:end] for end in range(1, len(path) + 1)) for path in leaves]

    @cache
    def size(members: int) -> int:
        union: frozenset[Prefix] = frozenset().union(*(cell for n, cell in enumerate(cells) if members >> n & 1))
        return len(union)

    @cache
    def best(members: int) -> int:
        if not members:
            return 0
        first = members & -members
        rest = members ^ first
        totals = []
        subset = rest
        while True:
            if size(subset | first) <= budget:
                totals.append(size(subset | first) + best(rest ^ subset))
            if not subset:
                return min(totals)
            subset = (subset - 1) & rest

    assume(len(leaves) <= MAX_EXACT_LEAVES)
    return best((1 << len(leaves)) - 1)


def draw_budget(data: st.DataObject, calls: list[Call]) -> int:
    longest = max(len(path_of(call)) for call in calls)
    return data.draw(st.integers(longest, max(longest, len(naive_multiplicity(calls)) + 1)))


@given(call_sets(), st.data())
def test_every_sample_is_in_one_subtree_within_the_budget(calls: list[Call], data: st.DataObject) -> None:
    tree, budget = build(calls), draw_budget(data, calls)
    subtrees = cut_tree(tree, budget)
    assert sorted(sample for subtree in subtrees for sample in subtree.samples) == list(range(len(calls)))
    for subtree in subtrees:
        assert len(naive_multiplicity([calls[sample] for sample in subtree.samples])) == subtree.num_tokens <= budget


@given(call_sets(max_calls=10), st.data())
def test_repeated_ancestors_are_within_a_tenth_of_brute_force(calls: list[Call], data: st.DataObject) -> None:
    tree, budget = build(calls), draw_budget(data, calls)
    num_repeated = sum(subtree.num_tokens for subtree in cut_tree(tree, budget)) - tree.num_tokens
    assert num_repeated <= 1.1 * (fewest_tokens(calls, budget) - tree.num_tokens)


@given(call_sets(), st.data())
def test_merging_keeps_the_budget_and_cuts_at_most_one_path_each(calls: list[Call], data: st.DataObject) -> None:
    """The way for trees of many leaves, here on small ones."""
    tree, budget = build(calls), draw_budget(data, calls)
    leaves = Leaves.of(flatten(tree))
    groups = partition_by_merging(leaves, budget)
    assert sorted(leaf for group in groups for leaf in group) == list(range(leaves.depth_L.size))
    assert all(leaves.size(group) <= budget for group in groups)
    assert sum(leaves.size(group) for group in groups) <= leaves.depth_L.sum()


def star(prompt: int, answers: list[int]) -> TokenTree:
    tree = TokenTree(10_000)
    for index, size in enumerate(answers):
        tree.add(make_call(range(prompt), [1000 + index] * size), f"s{index}")
    return tree


def test_answers_to_one_prompt_fill_subtrees_in_any_order() -> None:
    # One answer of each length fills a budget exactly; in the order given none would be full.
    subtrees = cut_tree(star(50, [40, 40, 25, 25, 35, 35]), 150)
    assert [subtree.num_tokens for subtree in subtrees] == [150, 150]


def test_many_answers_to_one_prompt_take_few_extra_subtrees() -> None:
    answers = np.random.default_rng(0).integers(10, 60, 120)
    subtrees = cut_tree(star(50, answers.tolist()), 200)
    # Best fit, largest first, never takes more than 11/9 of the fewest bins and one.
    assert len(subtrees) <= 11 / 9 * np.ceil(answers.sum() / 150) + 1


def test_samples_go_along_with_a_leaf_below_them() -> None:
    tree = star(50, [40, 40, 40])
    tree.add(make_call(range(20), []), "prefix")
    tree.add(make_call(range(50), [1001, 1001]), "inside")
    subtrees = cut_tree(tree, 130)
    assert sorted(subtree.num_tokens for subtree in subtrees) == [90, 130]
    (home,) = (subtree for subtree in subtrees if 4 in subtree.samples)
    assert 1 in home.samples


def test_a_large_random_tree_is_cut_near_the_least_there_can_be() -> None:
    generator = np.random.default_rng(0)
    tree = TokenTree(100_000)
    paths = [generator.integers(0, 100_000, 500)]
    for index in range(200):
        source = paths[generator.integers(len(paths))]
        path = np.append(source[: generator.integers(500, source.size + 1)], generator.integers(0, 100_000, 200))
        tree.add(make_call(path[:500], path[500:]), f"s{index}")
        paths.append(path)
    budget = 4 * max(path.size for path in paths)
    subtrees = cut_tree(tree, budget)
    # Every subtree repeats at least the prompt, and there are at least so many.
    fewest = -(-(tree.num_tokens - 500) // (budget - 500))
    total = sum(subtree.num_tokens for subtree in subtrees)
    assert total >= tree.num_tokens + 500 * (fewest - 1)
    assert len(subtrees) <= fewest + 2


def test_a_tree_within_the_budget_stays_whole() -> None:
    tree = star(5, [2, 2])
    (whole,) = cut_tree(tree, 9)
    assert whole.samples == (0, 1)
    assert cut_tree(TokenTree(5), 1) == []


def test_a_path_above_the_budget_is_refused_by_name() -> None:
    with pytest.raises(RecordError, match="Sample s1: its path of 12 tokens is above the budget of 11; raise"):
        cut_tree(star(5, [2, 7]), 11)
