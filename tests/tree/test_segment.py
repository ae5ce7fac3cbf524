"""Trees cut into segments: every token once, below its ancestors, in few segments."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from m2forge.records import Call
from m2forge.tree.flat import FlatTree, flatten, join
from m2forge.tree.segment import Segment, cut_documents, cut_segments, edges_by_segment, slice_tree
from tests.tree.draw import build, call_sets, make_call


def ancestors(flat: FlatTree, token: int) -> list[int]:
    found = []
    while token >= 0:
        found.append(token)
        token = int(flat.parent_N[token])
    return found[::-1]


def path_above(segments: list[Segment], index: int) -> list[int]:
    """Tokens of the segments above one, from the root down."""
    found: list[int] = []
    while (index := segments[index].parent) >= 0:
        found = [*range(segments[index].start, segments[index].end), *found]
    return found


@given(
    sets=st.lists(call_sets(6), min_size=1, max_size=3),
    max_tokens=st.integers(1, 12),
)
def test_segments_hold_each_token_below_its_whole_path(sets: list[list[Call]], max_tokens: int) -> None:
    flat = join([flatten(build(calls), tree_index=index) for index, calls in enumerate(sets)])
    segments = cut_segments(flat, max_tokens)
    assert [token for segment in segments for token in range(segment.start, segment.end)] == list(
        range(flat.num_tokens)
    )
    inner = {segment.parent for segment in segments}
    for index, segment in enumerate(segments):
        above = path_above(segments, index)
        assert segment.num_tokens <= max_tokens
        assert segment.is_leaf == (index not in inner)
        assert segment.depth == len(above)
        for token in range(segment.start, segment.end):
            path = ancestors(flat, token)
            assert path[: segment.depth] == above
            assert all(segment.start <= other < segment.end for other in path[segment.depth :])


@given(calls=call_sets(8), max_tokens=st.integers(1, 12))
def test_a_sliced_tree_keeps_positions_parents_and_edges(calls: list[Call], max_tokens: int) -> None:
    flat = flatten(build(calls))
    segments = cut_segments(flat, max_tokens)
    edges = edges_by_segment(flat, segments)
    assert sorted(edge for found in edges for edge in found) == list(range(flat.num_edges))
    for segment, edge_M in zip(segments, edges, strict=True):
        part, start = slice_tree(flat, segment, edge_M), segment.start
        for token in range(segment.start, segment.end):
            assert part.tokens_N[token - start] == flat.tokens_N[token]
            assert part.position_N[token - start] == flat.position_N[token]
            assert part.parent_N[token - start] == max(flat.parent_N[token] - start, -1)
            assert part.exit_N[token - start] == min(flat.exit_N[token], segment.end) - start
        assert (part.edge_position_M + start == flat.edge_position_M[edge_M]).all()
        assert (part.edge_target_M == flat.edge_target_M[edge_M]).all()
        assert [part.edges_of(sample).stop - part.edges_of(sample).start for sample in range(part.sample_S.size)] == [
            int((flat.edge_sample_M[edge_M] == sample).sum()) for sample in range(part.sample_S.size)
        ]


def test_small_subtrees_side_by_side_share_a_segment() -> None:
    prompt = [0, 1, 2, 3, 4, 0, 1, 2]
    calls = [make_call(prompt, [first, second]) for first in range(5) for second in range(5)]
    segments = cut_segments(flatten(build(calls)), 8)
    assert [(segment.num_tokens, segment.parent, segment.is_leaf) for segment in segments] == [
        (8, -1, False),
        *[(6, 0, True)] * 5,
    ]


def test_documents_that_fit_are_not_cut() -> None:
    segments = cut_documents([3, 2, 9, 4], 5)
    assert [(segment.start, segment.end, segment.parent, segment.depth) for segment in segments] == [
        (0, 5, -1, 0),
        (5, 10, -1, 0),
        (10, 14, 1, 5),
        (14, 18, -1, 0),
    ]
    assert [segment.is_whole for segment in segments] == [True, False, False, True]
    assert np.sum([segment.num_tokens for segment in segments]) == 18
