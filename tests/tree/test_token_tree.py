"""A token tree holds every prefix of its calls once, whatever the order they come in, and gives the calls back."""

import math
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2forge.errors import RecordError
from m2forge.records import Call, FinishReason
from m2forge.tree.flat import flatten
from m2forge.tree.token_tree import UNKNOWN_EXPERT, TokenTree
from tests.tree.draw import (
    EXPERTS_SHAPE,
    VOCAB,
    build,
    call_sets,
    flat_edges,
    make_call,
    naive_edges,
    naive_multiplicity,
    path_of,
    prefixes,
)


@given(call_sets())
def test_a_tree_holds_each_prefix_once_and_every_call(calls: list[Call]) -> None:
    tree = build(calls)
    assert tree.num_tokens == len(naive_multiplicity(calls))
    assert tree.num_input_tokens == sum(len(path_of(call)) for call in calls)
    assert [tree.call(index) for index in range(len(calls))] == calls
    assert tree.calls() == calls


@given(call_sets(), st.randoms(use_true_random=False))
def test_the_order_of_calls_changes_only_the_order_of_samples(calls: list[Call], random: Random) -> None:
    order = list(range(len(calls)))
    random.shuffle(order)
    names = [f"s{index}" for index in order]
    tree, shuffled = build(calls), build([calls[index] for index in order], names)
    flat, flat_shuffled = flatten(tree), flatten(shuffled)
    for name in ("tokens_N", "parent_N", "position_N", "exit_N", "multiplicity_N", "node_start_V", "node_parent_V"):
        assert np.array_equal(getattr(flat, name), getattr(flat_shuffled, name)), name
    assert flat_edges(flat, [tree]) == flat_edges(flat_shuffled, [shuffled]) == naive_edges(calls)


@given(call_sets())
def test_a_tree_may_be_read_between_calls(calls: list[Call]) -> None:
    tree = TokenTree(VOCAB)
    for index, call in enumerate(calls):
        tree.add(call, f"s{index}")
        flat = flatten(tree)
        assert dict(zip(prefixes(flat), flat.multiplicity_N.tolist(), strict=True)) == naive_multiplicity(
            calls[: index + 1]
        )


def test_a_chain_of_calls_is_one_node_shared_by_identical_calls() -> None:
    tree = build([make_call([1, 2], [3]), make_call([1, 2, 3, 0], [4]), make_call([1, 2, 3, 0], [4], seed=9)])
    flat = flatten(tree)
    assert flat.node_start_V.tolist() == [0]
    assert flat.tokens_N.tolist() == [1, 2, 3, 0, 4]
    assert flat.multiplicity_N.tolist() == [3, 3, 3, 2, 2]
    assert flat.edge_position_M.tolist() == [1, 3, 3]
    assert flat.edge_sample_M.tolist() == [0, 1, 2]


def test_calls_may_differ_from_their_first_token_on() -> None:
    flat = flatten(build([make_call([2], [3]), make_call([1], [3])]))
    assert flat.tokens_N.tolist() == [1, 3, 2, 3]
    assert flat.parent_N.tolist() == [-1, 0, -1, 2]
    assert flat.node_parent_V.tolist() == [-1, -1]


def test_long_segments_are_split_where_paths_part() -> None:
    generator = np.random.default_rng(0)
    trunk = generator.integers(0, 1000, 5000)
    tree = TokenTree(1000)
    for cut in (4999, 1, 2500, 2501, 5000):
        path = np.append(trunk[:cut], (trunk[cut] + 1) % 1000 if cut < 5000 else 7)
        tree.add(make_call(path[:1], path[1:]), f"s{cut}")
    assert tree.num_tokens == 5000 + 5
    assert flatten(tree).node_depth_V.tolist().count(2500) == 2
    assert np.array_equal(tree.path(4)[:-1], trunk)


@pytest.mark.parametrize(
    ("call", "options", "message"),
    [
        (
            make_call([1, VOCAB], []),
            {},
            r"Sample b: prompt_ids\[1\]: expected an id below the vocabulary's 5, received 5",
        ),
        (make_call([1, 2], [3, 9]), {}, r"Sample b: response_ids\[1\]: .* received 9"),
        (make_call([1], [2]), {"name": "a"}, "Sample a: name: expected one that is not in the tree yet"),
        (make_call([1], [2]), {"name": ""}, "Sample: name: expected text"),
        (make_call([1], [2]), {"advantage": math.nan}, "Sample b: advantage: expected a finite number, received nan"),
        (
            make_call([1], [2]),
            {"weight": math.nan},
            "Sample b: weight: expected a finite number, at least 0, received nan",
        ),
        (make_call([1], [2]), {"experts": np.zeros((3, 2, 3), int)}, "Sample b: experts: .* at most 2 tokens"),
        (make_call([1], [2]), {"experts": np.zeros((2, 2), int)}, "Sample b: experts: expected integers"),
        (make_call([1], [2]), {"experts": np.zeros((2, 2, 3))}, "Sample b: experts: expected integers"),
        (make_call([1], [2]), {"experts": np.zeros((2, 2, 4), int)}, r"experts: expected \(2, 3\) per token as before"),
        (make_call([1], [2]), {"experts": np.full((2, 2, 3), -2)}, "experts: expected -1 to 32767, received -2 to -2"),
    ],
)
def test_a_refused_call_leaves_the_tree_as_it_was(call: Call, options: dict[str, Any], message: str) -> None:
    def first() -> TokenTree:
        tree = TokenTree(VOCAB)
        tree.add(make_call([1, 2], [3]), "a", experts=np.zeros((2, *EXPERTS_SHAPE), np.int64))
        return tree

    tree = first()
    with pytest.raises(RecordError, match=message):
        tree.add(call, **({"name": "b"} | options))
    assert tree == first()
    assert tree.num_tokens == 3


def test_a_tree_needs_a_vocabulary() -> None:
    with pytest.raises(RecordError, match="vocab_size: expected 1 to"):
        TokenTree(0)


@given(call_sets(), st.data())
def test_the_first_routing_recorded_for_a_token_stays(calls: list[Call], data: st.DataObject) -> None:
    tree = TokenTree(VOCAB)
    recorded: dict[tuple[int, ...], list[list[int]]] = {}
    for index, call in enumerate(calls):
        path = path_of(call)
        num_known = data.draw(st.integers(0, len(path)) | st.none())
        if num_known is None:
            tree.add(call, f"s{index}")
            continue
        experts = np.random.default_rng(index).integers(0, 300, (num_known, *EXPERTS_SHAPE))
        tree.add(call, f"s{index}", experts=experts)
        for end in range(1, num_known + 1):
            recorded.setdefault(path[:end], experts[end - 1].tolist())
    flat = flatten(tree)
    if flat.experts_NLK is None:
        assert not recorded
        return
    unknown = np.full(EXPERTS_SHAPE, UNKNOWN_EXPERT).tolist()
    assert flat.experts_NLK.tolist() == [recorded.get(prefix, unknown) for prefix in prefixes(flat)]


@given(call_sets(), call_sets())
def test_trees_are_equal_exactly_if_their_calls_are(calls: list[Call], others: list[Call]) -> None:
    assert build(calls) == build(calls)
    assert (build(calls) == build(others)) == (calls == others)
    assert build(calls) != build(calls[:-1])


def test_calls_of_one_conversation_share_its_memory() -> None:
    tree, path = TokenTree(1000), np.arange(5, dtype=np.int32)
    for index in range(200):
        response = np.full(3, index, np.int32)
        tree.add(
            Call(path, response, np.full(3, -1.0), np.zeros(3, np.int32), FinishReason.STOP, 0.0, 1.0), f"s{index}"
        )
        path = np.concatenate((path, response, np.full(2, 999, np.int32)))
    bases = {id(call.prompt_ids.base) for call in tree.calls()}
    assert len(bases) == 1
