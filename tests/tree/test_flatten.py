"""A flat tree is depth-first: intervals are ancestry, positions are depths, edges are those of the calls."""

from collections import Counter
from dataclasses import fields

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from m2forge.records import Call
from m2forge.tree.flat import FlatTree, flatten, join
from m2forge.tree.token_tree import TokenTree
from tests.tree.draw import VOCAB, build, call_sets, flat_edges, naive_edges, naive_multiplicity, path_of, prefixes


def check_layout(flat: FlatTree) -> None:
    prefix = prefixes(flat)
    assert flat.position_N.tolist() == [len(path) - 1 for path in prefix]
    token = np.arange(flat.num_tokens)
    interval = (token[:, None] <= token) & (token < flat.exit_N[:, None])
    assert interval.tolist() == [[below[: len(above)] == above for below in prefix] for above in prefix]


def check_nodes(flat: FlatTree) -> None:
    """Nodes follow one another, begin below their parents' last tokens, and end exactly where there is a branch."""
    assert flat.node_start_V.tolist() == [0, *flat.node_end_V.tolist()[:-1]]
    assert flat.node_end_V.tolist()[-1] == flat.num_tokens
    for start, end, parent, depth in zip(
        *(c.tolist() for c in (flat.node_start_V, flat.node_end_V, flat.node_parent_V, flat.node_depth_V)), strict=True
    ):
        assert flat.parent_N[start] == (flat.node_end_V[parent] - 1 if parent >= 0 else -1)
        assert flat.position_N[start:end].tolist() == list(range(depth, depth + end - start))
        assert flat.parent_N[start + 1 : end].tolist() == list(range(start, end - 1))
        assert (flat.parent_N == end - 1).sum() != 1


def check_samples(flat: FlatTree, trees: list[TokenTree]) -> None:
    for index, (tree, sample) in enumerate(zip(flat.tree_S, flat.sample_S, strict=True)):
        path, record = flat.path(index), trees[tree].samples[sample]
        assert flat.tokens_N[path].tolist() == trees[tree].path(int(sample)).tolist()
        assert path[-1] == flat.last_S[index]
        assert flat.advantage_S[index] == record.advantage
        assert flat.weight_S[index] == record.weight
        assert flat.temperature_S[index] == record.sampling.temperature
        assert flat.is_truncated_S[index] == record.sampling.is_truncated
        edges = flat.edges_of(index)
        assert flat.edge_child_M[edges].tolist() == path[record.num_prompt :].tolist()
        assert flat.edge_sample_M[edges].tolist() == [index] * record.num_response
        assert np.array_equal(flat.edge_logprob_M[edges], record.logprobs)


@given(call_sets())
def test_a_flat_tree_equals_the_plain_twin(calls: list[Call]) -> None:
    tree = build(calls)
    flat = flatten(tree)
    multiplicity = naive_multiplicity(calls)
    found = prefixes(flat)
    assert len(found) == len(multiplicity)
    assert dict(zip(found, flat.multiplicity_N.tolist(), strict=True)) == multiplicity
    assert flat.num_input_tokens == tree.num_input_tokens
    assert flat_edges(flat, [tree]) == naive_edges(calls)
    check_layout(flat)
    check_nodes(flat)
    check_samples(flat, [tree])


@given(call_sets(), st.data())
def test_a_part_holds_what_its_samples_need_and_nothing_else(calls: list[Call], data: st.DataObject) -> None:
    chosen = sorted(data.draw(st.sets(st.integers(0, len(calls) - 1), min_size=1)))
    tree = build(calls)
    flat = flatten(tree, chosen, tree_index=0)
    assert flat.sample_S.tolist() == chosen
    kept = [calls[index] for index in chosen]
    assert dict(zip(prefixes(flat), flat.multiplicity_N.tolist(), strict=True)) == naive_multiplicity(kept)
    assert flat_edges(flat, [tree]) == naive_edges(kept, [f"s{index}" for index in chosen])
    check_layout(flat)
    check_nodes(flat)
    check_samples(flat, [tree])


@given(st.lists(call_sets(max_calls=5), min_size=1, max_size=4))
def test_trees_side_by_side_stay_what_they_are(sets: list[list[Call]]) -> None:
    trees = [build(calls) for calls in sets]
    flats = [flatten(tree, tree_index=index) for index, tree in enumerate(trees)]
    forest = join(flats)
    assert forest.tokens_N.tolist() == [token for flat in flats for token in flat.tokens_N.tolist()]
    assert prefixes(forest) == [prefix for flat in flats for prefix in prefixes(flat)]
    assert flat_edges(forest, trees) == sum((flat_edges(flat, trees) for flat in flats), start=Counter())
    assert forest.multiplicity_N.tolist() == [count for flat in flats for count in flat.multiplicity_N.tolist()]
    check_samples(forest, trees)
    check_nodes(forest)
    starts = np.cumsum([0] + [flat.num_tokens for flat in flats])
    expected = np.concatenate([flat.exit_N + start for flat, start in zip(flats, starts[:-1], strict=True)])
    assert forest.exit_N.tolist() == expected.tolist()


@given(call_sets(max_calls=4))
def test_arrays_are_read_only_and_of_the_types_a_trainer_takes(calls: list[Call]) -> None:
    flat = flatten(build(calls))
    expected = {"edge_logprob_M": np.float32, "is_truncated_S": np.bool_}
    expected |= dict.fromkeys(("advantage_S", "weight_S", "temperature_S"), np.float64)
    for item in fields(flat):
        array = getattr(flat, item.name)
        if array is not None:
            assert array.dtype == expected.get(item.name, np.int32), item.name
            assert not array.flags.writeable


def test_a_tree_of_nothing_is_flat_too() -> None:
    flat = flatten(TokenTree(VOCAB))
    assert flat.num_tokens == flat.num_edges == flat.num_input_tokens == flat.node_start_V.size == 0


@given(call_sets(max_calls=4))
def test_a_path_is_the_call(calls: list[Call]) -> None:
    tree = build(calls)
    assert [tuple(tree.path(index).tolist()) for index in range(len(calls))] == [path_of(call) for call in calls]
