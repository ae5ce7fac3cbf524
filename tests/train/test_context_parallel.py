"""Queries dealt to ranks: as many for each, with about equally many visible keys."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2forge.model.config import WindowConfig
from m2forge.model.plan import visible
from m2forge.train.context_parallel import CHUNK, MIN_CHUNKS, deal_queries, num_visible


@given(
    lengths=st.lists(st.integers(1, 300) | st.integers(1000, 3000), min_size=1, max_size=8),
    num_sharing=st.integers(2, 9),
    num_parts=st.integers(1, 3),
)
def test_ranks_have_as_many_queries_and_see_as_many_keys(lengths: list[int], num_sharing: int, num_parts: int) -> None:
    work_N = np.concatenate([num_visible(np.arange(length), None) for length in lengths])
    num_ranks = num_sharing * num_parts
    if work_N.size < num_ranks:
        work_N = np.arange(num_ranks) + 1
    parts = deal_queries(work_N, num_sharing, num_ranks)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(work_N.size))
    assert all((np.diff(part) > 0).all() and part.size >= num_parts for part in parts)
    # Chunks differ by a token in length, and ranks have as many of them; each round adds at most a chunk's difference.
    chunk = max(1, min(CHUNK, work_N.size // (MIN_CHUNKS * num_ranks)))
    num_rounds = work_N.size // (chunk * num_sharing)
    sizes = [part.size for part in parts]
    assert max(sizes) - min(sizes) <= num_rounds
    sums = [int(work_N[part].sum()) for part in parts]
    assert max(sums) - min(sums) <= work_N.max() * (work_N.size // (num_rounds * num_sharing) + 1)


@pytest.mark.parametrize("num_sharing", [2, 4, 8])
def test_one_long_document_is_dealt_evenly(num_sharing: int) -> None:
    work_N = num_visible(np.arange(128 * 1024), None)
    parts = deal_queries(work_N, num_sharing, num_sharing)
    assert {part.size for part in parts} == {work_N.size // num_sharing}
    assert len({int(work_N[part].sum()) for part in parts}) == 1
    # Chunks are whole blocks of FlexAttention's masks.
    assert all((part.reshape(-1, CHUNK) == part[::CHUNK, None] + np.arange(CHUNK)).all() for part in parts)


@given(length=st.integers(1, 24), size=st.integers(1, 12), num_sinks=st.integers(0, 4))
def test_visible_keys_are_those_of_the_mask(length: int, size: int, num_sinks: int) -> None:
    window = WindowConfig(size=size, layers=(0,), num_sinks=num_sinks)
    for each in (None, window):
        mask = visible(length, each)
        expected = np.arange(length) + 1 if mask is None else mask.sum(1).numpy()
        assert num_visible(np.arange(length), each).tolist() == expected.tolist()
