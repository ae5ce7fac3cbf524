"""The plan of token trees: where tokens stand, whom they see, how often they count."""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from m2forge.kernels.path_attention import path_mask
from m2forge.kernels.tree_attention import TreeLayout
from m2forge.kernels.tree_schedule import make_schedule
from m2forge.model.config import WindowConfig
from m2forge.model.plan import ScheduledTreeAttend, Trees
from m2forge.observe import log
from m2forge.records import Call
from m2forge.tree.flat import flatten
from m2forge.tree.pack import pack_trees
from tests.kernels.draw import exit_of, layout_of, layouts, position_of, seen
from tests.model.draw_tree import forests, windows
from tests.model.test_plan import BLOCK, NEAR_BLOCK, dense_attention, listed_blocks, some_tokens
from tests.tree.draw import build, make_call, prefixes


def sees(layout: TreeLayout, window: WindowConfig | None) -> Tensor:
    """(N, N): an ancestor or the token itself, and near enough in depth or a sink."""
    depth_N = position_of(layout)
    if window is None:
        return seen(layout)
    near = depth_N[:, None] - depth_N[None, :] < window.size
    return seen(layout) & (near | (depth_N < window.num_sinks)[None, :])


def two_branches() -> list[Call]:
    """0 1, then 2 3 and 4, and 0 1 2 once more."""
    return [make_call([0, 1], [2, 3]), make_call([0, 1], [4]), make_call([0], [1, 2])]


def test_a_plan_by_hand() -> None:
    flat = flatten(build(two_branches()))
    assert flat.tokens_N.tolist() == [0, 1, 2, 3, 4]
    plan = Trees(flat, length=8)
    assert plan.position_N.tolist() == [0, 1, 2, 3, 2, 0, 1, 2]
    assert plan.count_N.tolist() == [3, 3, 2, 1, 1, 0, 0, 0]
    assert plan.parent_N.tolist() == [-1, 0, 1, 2, 1, -1, 5, 6]
    assert plan.exit_N.tolist() == [5, 5, 4, 4, 5, 8, 8, 8]
    assert all(x.dtype == torch.int64 for x in (plan.position_N, plan.count_N, plan.parent_N))
    assert plan.layout.start_V.tolist() == [0, 2, 4, 5]
    assert plan.layout.end_V.tolist() == [2, 4, 5, 8]
    assert plan.layout.parent_V.tolist() == [-1, 0, 0, -1]
    assert plan.layout.exit_V.tolist() == [5, 4, 5, 8]


@given(forest=forests(), num_padding=st.integers(0, 9))
def test_every_token_stands_below_its_prefix(forest: list[list[Call]], num_padding: int) -> None:
    (flat,) = pack_trees([build(calls) for calls in forest], 10**6)
    plan = Trees(flat, length=flat.num_tokens + num_padding)
    assert plan.layout.num_tokens == len(plan.position_N) == flat.num_tokens + num_padding
    depth = [len(prefix) - 1 for prefix in prefixes(flat)]
    assert plan.position_N.tolist() == depth + list(range(num_padding)) == position_of(plan.layout).tolist()
    assert torch.equal(exit_of(plan.layout), plan.exit_N)
    parents = plan.parent_N.tolist()
    x_ND = torch.arange(1.0, len(parents) + 1)[:, None].expand(-1, 3)
    assert plan.to_parent(x_ND).tolist() == [[parent + 1.0] * 3 for parent in parents]


def test_a_parent_learns_from_all_its_children() -> None:
    plan = Trees(flatten(build(two_branches())))
    x_ND = torch.ones(5, 2, dtype=torch.float64, requires_grad=True)
    torch.use_deterministic_algorithms(True)
    try:
        (plan.to_parent(x_ND) * torch.tensor([1.0, 10.0, 100.0, 1000.0, 10000.0])[:, None]).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert x_ND.grad is not None
    assert x_ND.grad[:, 0].tolist() == [10.0, 10100.0, 1000.0, 0.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_parents_keep_precision_and_pass_no_infinity_down(dtype: torch.dtype) -> None:
    plan = Trees(flatten(build(two_branches())), length=7)
    out_ND = plan.to_parent(torch.full((7, 2), torch.inf, dtype=dtype))
    assert out_ND.dtype == dtype
    assert out_ND[[0, 5]].tolist() == [[0.0, 0.0]] * 2


@given(forest=forests(max_calls=5), window=windows(), num_padding=st.integers(0, 9), seed=st.integers(0, 2**20))
def test_bound_attention_equals_a_dense_masked_one(
    forest: list[list[Call]], window: WindowConfig | None, num_padding: int, seed: int
) -> None:
    (flat,) = pack_trees([build(calls) for calls in forest], 10**6)
    plan = Trees(flat, length=flat.num_tokens + num_padding)
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(plan.layout.num_tokens, heads, 4, generator=generator, dtype=torch.float64) for heads in (4, 2, 2)
    )
    expected = dense_attention(q, k, v, sees(plan.layout, window))
    # Float64 sums of another order.
    torch.testing.assert_close(plan.bind(window)(q, k, v), expected, atol=1e-12, rtol=1e-12)
    query_Q = some_tokens(plan.layout.num_tokens, generator)
    found = plan.bind_queries(window, query_Q)(q[query_Q], k, v)
    torch.testing.assert_close(found, expected[query_Q], atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("length", [0, 4, -1])
def test_a_plan_shorter_than_its_tree_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match=re.escape(f"a tree of 5 tokens does not make a plan of {length}")):
        Trees(flatten(build(two_branches())), length=length)


# -- block masks ------------------------------------------------------------------------------------------------------


@given(
    layout=layouts(NEAR_BLOCK | st.integers(1, 90), max_nodes=7),
    size=st.none() | NEAR_BLOCK | st.integers(1, 500),
    num_sinks=st.integers(0, 4) | NEAR_BLOCK,
)
def test_block_masks_hold_exactly_the_visible_pairs(layout: TreeLayout, size: int | None, num_sinks: int) -> None:
    from m2forge.kernels.flex import tree_mask

    mask = tree_mask(exit_of(layout), position_of(layout), size, num_sinks)
    partial = listed_blocks(mask.kv_num_blocks, mask.kv_indices)
    full = listed_blocks(mask.full_kv_num_blocks, mask.full_kv_indices)
    assert not partial & full
    window = None if size is None else WindowConfig(size=size, layers=(0,), num_sinks=num_sinks)
    visible_NN = sees(layout, window)
    token = torch.arange(layout.num_tokens)
    tested_NN = mask.mask_mod(token.new_tensor(0), token.new_tensor(0), token[:, None], token[None, :])
    assert torch.equal(seen_by_kernel(partial, full, tested_NN), visible_NN)


def seen_by_kernel(partial: set[tuple[int, int]], full: set[tuple[int, int]], tested_QK: Tensor) -> Tensor:
    """Everything in a full block, in a partial one what the token test lets through."""
    seen_QK = torch.zeros_like(tested_QK)
    for pairs, content_QK in ((partial, tested_QK), (full, torch.ones_like(tested_QK))):
        for q_block, k_block in pairs:
            area = slice(q_block * BLOCK, (q_block + 1) * BLOCK), slice(k_block * BLOCK, (k_block + 1) * BLOCK)
            seen_QK[area] = content_QK[area]
    return seen_QK


@given(
    layout=layouts(NEAR_BLOCK | st.integers(1, 90), max_nodes=5),
    num_above=st.integers(0, 3) | NEAR_BLOCK | st.integers(1, 500),
    size=st.none() | NEAR_BLOCK | st.integers(1, 500),
    num_sinks=st.integers(0, 4) | NEAR_BLOCK,
    seed=st.none() | st.integers(0, 2**20),
)
def test_block_masks_of_a_segment_hold_its_visible_pairs(
    layout: TreeLayout, num_above: int, size: int | None, num_sinks: int, seed: int | None
) -> None:
    """`seed`: of the tokens that have a query; None: all."""
    from m2forge.kernels.flex import path_mask as block_mask

    geometry = exit_of(layout), position_of(layout) + num_above, num_above, size, num_sinks
    query_Q = torch.arange(layout.num_tokens)
    if seed is not None:
        query_Q = some_tokens(layout.num_tokens, torch.Generator().manual_seed(seed))
    mask, num_keys = block_mask(*geometry, None if seed is None else query_Q), num_above + layout.num_tokens
    num_blocks = [-(-num // BLOCK) for num in (query_Q.shape[0], num_keys)]
    assert mask.seq_lengths == tuple(num * BLOCK for num in num_blocks)
    partial = listed_blocks(mask.kv_num_blocks, mask.kv_indices)
    full = listed_blocks(mask.full_kv_num_blocks, mask.full_kv_indices)
    assert not partial & full
    # A full block is not tested key by key, so it must not reach past the last key.
    assert all((k_block + 1) * BLOCK <= num_keys for _, k_block in full)
    q_N, k_K = (torch.arange(length) for length in mask.seq_lengths)
    tested_QK = mask.mask_mod(q_N.new_tensor(0), q_N.new_tensor(0), q_N[:, None], k_K[None, :])
    seen_QK = seen_by_kernel(partial, full, tested_QK)[: query_Q.shape[0]]
    assert torch.equal(seen_QK[:, :num_keys], path_mask(*geometry)[query_Q])
    assert not seen_QK[:, num_keys:].any()


def test_block_masks_skip_what_nobody_sees() -> None:
    """A trunk of two blocks and two branches of two: each branch meets the trunk and itself, not the other."""
    from m2forge.kernels.flex import tree_mask

    layout = layout_of([-1, 0, 0], [0, 2 * BLOCK, 4 * BLOCK, 6 * BLOCK])
    mask = tree_mask(exit_of(layout), position_of(layout), None, 0)
    partial = listed_blocks(mask.kv_num_blocks, mask.kv_indices)
    assert partial == {(block, block) for block in range(6)}
    full = listed_blocks(mask.full_kv_num_blocks, mask.full_kv_indices)
    assert full == {(1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (3, 2), (4, 0), (4, 1), (5, 0), (5, 1), (5, 4)}
    # With a window of one block, the trunk's last block is all that the branches see of it.
    near = tree_mask(exit_of(layout), position_of(layout), BLOCK, 0)
    met = listed_blocks(near.kv_num_blocks, near.kv_indices) | listed_blocks(
        near.full_kv_num_blocks, near.full_kv_indices
    )
    assert met == partial | {(1, 0), (2, 1), (3, 2), (4, 1), (5, 4)}


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.float32, "head_dim 16, 32, 64 or 128, the network has 8"), (torch.float64, None)],
)
def test_trees_the_cuda_kernel_refuses_are_exact_and_warn_once(
    dtype: torch.dtype,
    expected: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    log.warn_once.cache_clear()
    plan = Trees(flatten(build(two_branches())))
    attend = ScheduledTreeAttend(make_schedule(plan.layout, torch.device("cpu")), plan.layout)
    q, k, v = (torch.randn(5, heads, 8, dtype=dtype) for heads in (2, 1, 1))
    for _ in range(2):
        torch.testing.assert_close(attend(q, k, v), plan.bind(None)(q, k, v))
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == (expected is not None)
    assert all("runs node by node, which is slow" in text and str(expected) in text for text in texts)
