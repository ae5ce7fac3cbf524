"""Packs keep the budget; over all of them every loss edge and every token's count stand once."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2forge.errors import RecordError
from m2forge.records import Call
from m2forge.tree.pack import pack_trees
from m2forge.tree.token_tree import TokenTree
from tests.tree.draw import (
    Edge,
    Prefix,
    build,
    call_sets,
    flat_edges,
    make_call,
    naive_edges,
    naive_multiplicity,
    path_of,
    prefixes,
)


@given(st.lists(call_sets(max_calls=8), min_size=1, max_size=5), st.integers(0, 20))
def test_packs_hold_every_edge_and_every_count_once(sets: list[list[Call]], room: int) -> None:
    named = [[f"t{tree}.s{sample}" for sample in range(len(calls))] for tree, calls in enumerate(sets)]
    trees = [build(calls, names) for calls, names in zip(sets, named, strict=True)]
    budget = room + max(len(path_of(call)) for calls in sets for call in calls)
    edges: Counter[Edge] = Counter()
    counts: Counter[Prefix] = Counter()
    for flat in pack_trees(trees, budget):
        assert 0 < flat.num_tokens <= budget
        edges += flat_edges(flat, trees)
        for prefix, multiplicity in zip(prefixes(flat), flat.multiplicity_N.tolist(), strict=True):
            assert multiplicity > 0
            counts[prefix] += multiplicity
    assert edges == sum((naive_edges(*pair) for pair in zip(sets, named, strict=True)), start=Counter())
    assert counts == sum((naive_multiplicity(calls) for calls in sets), start=Counter())


def test_small_trees_share_a_pack_that_names_their_samples() -> None:
    trees = [build([make_call([1, 2], [3])]), build([make_call([1, 2], [3]), make_call([1, 2], [4])])]
    (flat,) = pack_trees(trees, 7)
    assert sorted(zip(flat.tree_S.tolist(), flat.sample_S.tolist(), strict=True)) == [(0, 0), (1, 0), (1, 1)]
    assert flat.num_tokens == 7
    assert len(pack_trees(trees, 6)) == 2


def test_routing_travels_into_packs_and_is_unknown_where_absent() -> None:
    routed, plain = TokenTree(5), build([make_call([2], [3])])
    routed.add(make_call([1], [4]), "s0", experts=np.full((1, 2, 3), 7))
    (flat,) = pack_trees([routed, plain], 10)
    assert flat.experts_NLK is not None
    assert flat.experts_NLK[:, 0, 0].tolist() == [7, -1, -1, -1]
    other = TokenTree(5)
    other.add(make_call([1], [4]), "s0", experts=np.full((1, 1, 3), 7))
    with pytest.raises(RecordError, match="routing of one shape"):
        pack_trees([routed, other], 10)


def test_a_path_above_the_budget_is_refused_by_name() -> None:
    with pytest.raises(RecordError, match="Sample s0: its path of 3 tokens is above the budget of 2"):
        pack_trees([build([make_call([1, 2], [3])])], 2)


def test_no_trees_make_no_packs() -> None:
    assert pack_trees([], 4) == pack_trees([TokenTree(5)], 4) == []
