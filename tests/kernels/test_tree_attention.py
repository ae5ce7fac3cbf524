"""Tree attention: the plain form equals a dense mask, the native one equals the plain form, values and gradients."""

import math
import shutil
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from m2forge.kernels.tree_attention import (
    TreeLayout,
    documents_layout,
    tree_attention,
    tree_attention_native,
    tree_attention_plain,
)
from tests.kernels.draw import exit_of, layout_of, layouts, position_of, seen

needs_native = pytest.mark.skipif(
    shutil.which("cc") is None, reason="no C compiler here: the plain form is all there is"
)

Attention = Callable[[Tensor, Tensor, Tensor, TreeLayout], Tensor]


def gradients(
    attention: Attention, layout: TreeLayout, joint: Tensor, heads: tuple[int, int], dim: int
) -> list[Tensor]:
    """Output, and gradient of the joint projection q, k and v come from: so k and v arrive strided."""
    leaf = joint.detach().clone().requires_grad_(True)
    widths = [dim * number for number in (heads[0], heads[1], heads[1])]
    q_NHK, k_NGK, v_NGK = (x.unflatten(-1, (-1, dim)) for x in leaf.split(widths, dim=-1))
    out = attention(q_NHK, k_NGK, v_NGK, layout)
    weights = torch.sin(torch.arange(out.numel(), dtype=joint.dtype)).view_as(out)
    out.backward(weights)
    assert leaf.grad is not None
    return [out.detach(), leaf.grad]


def normal(layout: TreeLayout, heads: tuple[int, int], dim: int, seed: int, scale: float = 2.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    width = (heads[0] + 2 * heads[1]) * dim
    return torch.randn(layout.num_tokens, width, generator=generator, dtype=torch.float64) * scale


def dense(q_NHK: Tensor, k_NGK: Tensor, v_NGK: Tensor, layout: TreeLayout) -> Tensor:
    repeat = q_NHK.shape[1] // k_NGK.shape[1]
    k_NHK, v_NHK = (x.repeat_interleave(repeat, dim=1) for x in (k_NGK, v_NGK))
    score_HNN = torch.einsum("nhk,mhk->hnm", q_NHK, k_NHK) / math.sqrt(q_NHK.shape[2])
    return torch.einsum("hnm,mhk->nhk", score_HNN.masked_fill(~seen(layout), -math.inf).softmax(-1), v_NHK)


@given(layout=layouts())
def test_a_token_is_seen_up_to_its_exit(layout: TreeLayout) -> None:
    token = torch.arange(layout.num_tokens)
    q, k = token[:, None], token[None, :]
    assert torch.equal(seen(layout), (k <= q) & (q < exit_of(layout)[k]))
    assert torch.equal(position_of(layout), seen(layout).sum(-1) - 1)


@given(layout=layouts(st.integers(1, 8)), groups=st.integers(1, 3), seed=st.integers(0, 2**20))
def test_the_plain_form_equals_a_dense_mask(layout: TreeLayout, groups: int, seed: int) -> None:
    heads = (2 * groups, 2)
    joint = normal(layout, heads, 5, seed)
    ours, expected = (gradients(attention, layout, joint, heads, 5) for attention in (tree_attention_plain, dense))
    for one, other in zip(ours, expected, strict=True):
        # Float64 sums of another order.
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12)


@needs_native
@given(
    layout=layouts(),
    kv_heads=st.integers(1, 3),
    groups=st.sampled_from((1, 2, 3, 6, 40, 130)),
    dim=st.sampled_from((2, 7, 16)),
    seed=st.integers(0, 2**20),
)
def test_the_native_form_equals_its_plain_twin(
    layout: TreeLayout, kv_heads: int, groups: int, dim: int, seed: int
) -> None:
    heads = (kv_heads * groups, kv_heads)
    joint = normal(layout, heads, dim, seed)
    exact_out, exact_grad = gradients(tree_attention_plain, layout, joint, heads, dim)
    out, grad = gradients(tree_attention, layout, joint.float(), heads, dim)
    # float32 sums over at most some hundred keys. The gradient of a key adds up over the heads of its group, and what
    # they contribute may cancel: with one token it is zero.
    torch.testing.assert_close(out.double(), exact_out, atol=1e-5, rtol=1e-5)
    assert (grad.double() - exact_grad).abs().max() <= 1e-5 * exact_grad.abs().max() + 1e-6 * groups


@needs_native
def test_a_chain_of_small_nodes_is_the_document_it_spells() -> None:
    num_tokens, heads = 150, (4, 2)
    ones = layout_of([token - 1 for token in range(num_tokens)], list(range(num_tokens + 1)))
    joint = normal(ones, heads, 16, seed=3).float()
    of_chain = gradients(tree_attention, ones, joint, heads, 16)
    of_document = gradients(tree_attention, documents_layout([num_tokens]), joint, heads, 16)
    # To the last bit: queries are taken together across nodes, so the same sums are made.
    assert all(torch.equal(one, other) for one, other in zip(of_chain, of_document, strict=True))


@needs_native
def test_large_scores_of_hidden_keys_do_not_reach_the_others() -> None:
    """A branch whose keys win every comparison, beside one-token siblings that share its tile."""
    layout = layout_of([-1, 0, 0, 0], [0, 5, 6, 7, 8])
    joint = normal(layout, (1, 1), 8, seed=0)
    joint[5, 8:16] = 1000 * joint[6, :8]  # the first sibling's key along the second one's query
    for one, other in zip(
        gradients(tree_attention, layout, joint.float(), (1, 1), 8),
        gradients(tree_attention_plain, layout, joint, (1, 1), 8),
        strict=True,
    ):
        assert one.isfinite().all()
        # The first sibling's own score is in the thousands, which costs its exponent four digits.
        keep = [token for token in range(8) if token != 5]
        torch.testing.assert_close(one[keep].double(), other[keep], atol=1e-4, rtol=1e-4)


@needs_native
def test_the_result_does_not_depend_on_the_number_of_threads() -> None:
    layout = layout_of([-1, 0, 0, 2, -1, 4], [0, 100, 160, 161, 240, 300, 310])
    joint = normal(layout, (4, 2), 16, seed=1).float()
    threads = torch.get_num_threads()
    results = []
    for count in (1, 2, 2):
        torch.set_num_threads(count)
        results.append(gradients(tree_attention, layout, joint, (4, 2), 16))
    torch.set_num_threads(threads)
    for again in results[1:]:
        assert all(torch.equal(one, other) for one, other in zip(results[0], again, strict=True))


@pytest.mark.parametrize(
    ("start", "end", "parent", "message"),
    [
        ([0, 3], [2, 5], [-1, 0], "nodes must follow one another from 0 and not be empty"),
        ([1, 3], [3, 5], [-1, 0], "nodes must follow one another from 0 and not be empty"),
        ([0, 3], [3, 3], [-1, 0], "nodes must follow one another from 0 and not be empty"),
        ([0, 3], [3, 5], [-1, 1], "a node's index must exceed its parent's, got parents"),
        ([0, 3], [3, 5], [-2, 0], "a node's index must exceed its parent's, got parents"),
        ([0, 3], [3, 5], [-1], "columns of one length"),
        ([0.0, 3.0], [3, 5], [-1, 0], "int64 on the CPU"),
    ],
)
def test_impossible_layouts_are_refused(start: list[int], end: list[int], parent: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TreeLayout(*(torch.tensor(column) for column in (start, end, parent, end)))


def test_a_layout_of_other_tokens_is_refused() -> None:
    q, k, v = (torch.randn(10, 2, 4) for _ in range(3))
    with pytest.raises(ValueError, match="trees of 48 tokens cannot explain 10 queries"):
        tree_attention(q, k, v, documents_layout([4, 44]))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (([], [], [], []), "at least one node"),
        (([0, 2], [2, 4], [-1, 0], [2, 4]), "exits"),
        (([0, 2], [2, 4], [-1, -1], [4, 4]), "exits"),
        (([0, 2, 4, 6], [2, 4, 6, 8], [-1, 0, 0, 1], [8, 4, 6, 8]), "depth-first"),
        (([0, 2], [2, 4], [-1, 0], [1 << 62, 4]), "exits"),
    ],
)
def test_a_table_that_is_no_forest_is_refused(columns: tuple[list[int], ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TreeLayout(*(torch.tensor(column, dtype=torch.int64) for column in columns))


@pytest.mark.parametrize(
    "shapes",
    [
        ((4, 2, 8), (1, 2, 8), (1, 2, 8)),
        ((4, 2, 8), (4, 2, 8), (4, 2, 4)),
        ((4, 3, 8), (4, 2, 8), (4, 2, 8)),
        ((4, 1, 8), (4, 2, 8), (4, 2, 8)),
    ],
)
def test_shapes_that_do_not_go_together_are_refused(shapes: tuple[tuple[int, int, int], ...]) -> None:
    q, k, v = (torch.zeros(shape) for shape in shapes)
    with pytest.raises(ValueError, match="do not go together"):
        tree_attention_native(q, k, v, documents_layout([4]))
