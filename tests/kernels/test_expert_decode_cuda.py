"""The kernels of decoding equal their plain twins; run where there is a GPU."""

from typing import Literal

import pytest
import torch
from torch import Tensor

from m2forge.kernels.expert import expert_ffn_plain, expert_ffn_unsorted
from m2forge.kernels.pointwise import rms_norm_plain, rotate_plain
from m2forge.kernels.residual import Ending, Pairs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Relative to the norm: the activation and the parts of a token's sum are rounded once each."""


Operands = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def drawn(num_tokens: int, dim: int, width: int, num_experts: int, top_k: int, dtype: torch.dtype) -> Operands:
    torch.manual_seed(0)
    x = torch.randn(num_tokens, dim, device="cuda").to(dtype)
    w13 = (torch.randn(num_experts, 2 * width, dim, device="cuda") / dim**0.5).to(dtype)
    w2 = (torch.randn(num_experts, dim, width, device="cuda") / width**0.5).to(dtype)
    weight = torch.rand(num_tokens, top_k, device="cuda")
    return x, w13, w2, weight, torch.rand(num_tokens, num_experts, device="cuda").topk(top_k).indices


def plain(x: Tensor, w13: Tensor, w2: Tensor, weight: Tensor, expert: Tensor) -> Tensor:
    return expert_ffn_plain(x.double(), w13.double(), w2.double(), weight.double(), expert)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("shape", [(1024, 512, 64, 8), (192, 320, 16, 4), (128, 128, 8, 2)])
@pytest.mark.parametrize("num_tokens", [1, 2, 5, 32, 100])
def test_experts(num_tokens: int, shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    operands = drawn(num_tokens, *shape, dtype)
    out = expert_ffn_unsorted(*operands)
    assert error(out, plain(*operands)) < TOLERANCE[dtype]
    assert torch.equal(out, expert_ffn_unsorted(*operands))


def test_experts_that_all_tokens_choose() -> None:
    operands = drawn(200, 256, 128, 16, 4, torch.bfloat16)
    operands[-1].copy_(operands[-1][:1].clone())
    assert error(expert_ffn_unsorted(*operands), plain(*operands)) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("num_tokens", [2, 16, 17, 32, 40])
@pytest.mark.parametrize("num_experts", [4, 64])
def test_rows_that_are_none_add_nothing_and_stay_alone(num_experts: int, num_tokens: int) -> None:
    """Where all tokens choose all experts, and where hardly two meet; sums, their norms, and where these go."""
    from m2forge.kernels.expert_triton import expert_pairs
    from m2forge.kernels.norm_triton import add_rms_norm, end_rms_norm

    x, w13, w2, weight, expert = drawn(num_tokens, 128, 64, num_experts, 4, torch.float32)
    expected = x + plain(x, w13, w2, weight, expert)
    is_none = torch.arange(num_tokens, device="cuda") % 3 == 1
    expected[is_none] = x[is_none].double()
    expert[is_none] = num_experts
    pairs = Pairs(expert_pairs(x, w13, w2, weight, expert), expert, num_experts)
    norm_weight = torch.rand(128, device="cuda")
    total, normed = add_rms_norm(x, pairs, norm_weight, 1e-6)
    assert error(total, expected) < TOLERANCE[torch.float32]
    assert error(normed, rms_norm_plain(expected, norm_weight.double(), 1e-6)) < TOLERANCE[torch.float32]
    slot, keep = torch.randperm(50, device="cuda")[:num_tokens], torch.zeros(50, 128, device="cuda")
    target = torch.full((num_tokens,), -1, device="cuda")
    target[0], target[num_tokens - 1] = 1, 0
    ends = end_rms_norm(x, pairs, norm_weight, 1e-6, Ending(keep, slot, target, 2))
    assert torch.equal(ends, normed[[num_tokens - 1, 0]])
    assert torch.equal(keep[slot], total)


@pytest.mark.parametrize("num_tokens", [1, 8, 64])
def test_a_captured_graph_follows_the_choice(num_tokens: int) -> None:
    operands = drawn(num_tokens, 256, 128, 32, 8, torch.bfloat16)
    expert_ffn_unsorted(*operands)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = expert_ffn_unsorted(*operands)
    for _ in range(3):
        operands[-1].copy_(torch.rand(num_tokens, 32, device="cuda").topk(8).indices)
        graph.replay()
        assert error(out, plain(*operands)) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize(("num_pairs", "num_experts"), [(1, 1), (21, 256), (256, 16), (2001, 64)])
def test_grouping_is_a_stable_sort(num_pairs: int, num_experts: int) -> None:
    from m2forge.kernels.expert_triton import group

    torch.manual_seed(0)
    expert = torch.randint(0, num_experts, (num_pairs, 1), device="cuda")
    order, ends = group(expert, num_experts)
    assert torch.equal(order.long(), torch.sort(expert.flatten(), stable=True).indices)
    assert torch.equal(ends.long(), torch.bincount(expert.flatten(), minlength=num_experts).cumsum(0))


@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
@pytest.mark.parametrize("is_biased", [True, False])
@pytest.mark.parametrize(("num_experts", "top_k"), [(256, 8), (60, 3), (8, 1)])
def test_choice(scoring: Literal["sigmoid", "softmax"], is_biased: bool, num_experts: int, top_k: int) -> None:
    from m2forge.kernels.router_triton import select_experts

    torch.manual_seed(0)
    logits = torch.randn(50, num_experts, device="cuda")
    bias = 0.1 * torch.randn(num_experts, device="cuda") if is_biased else None
    scores = logits.sigmoid() if scoring == "sigmoid" else logits.softmax(-1)
    expected = (scores if bias is None else scores + bias).topk(top_k).indices
    expert, weight = select_experts(logits, bias, top_k, scoring, normalize=True)
    assert torch.equal(expert, expected)
    shares = scores.gather(1, expected)
    torch.testing.assert_close(weight, shares / shares.sum(-1, keepdim=True), rtol=1e-5, atol=1e-7)


def test_a_row_that_is_none_chooses_no_expert() -> None:
    from m2forge.kernels.router_triton import select_experts

    position = torch.tensor([3, -1, 0], device="cuda")
    logits = torch.randn(3, 60, device="cuda")
    expert, _ = select_experts(logits, None, 4, "sigmoid", normalize=True, position_N=position)
    assert torch.equal(expert[::2], logits.topk(4).indices[::2])
    assert (expert[1] == 60).all()


def test_of_equals_the_lower_index_is_chosen() -> None:
    from m2forge.kernels.router_triton import select_experts

    expert, _ = select_experts(torch.zeros(3, 60, device="cuda"), None, 4, "sigmoid", normalize=True)
    assert torch.equal(expert, torch.arange(4, device="cuda").expand(3, 4))


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("dim", [96, 1024, 3072])
def test_norm_of_a_sum(dim: int, dtype: torch.dtype) -> None:
    from m2forge.kernels.norm_triton import add_rms_norm, rms_norm_cuda

    torch.manual_seed(0)
    x, y = (torch.randn(5, dim + 32, device="cuda").to(dtype)[:, :dim] for _ in range(2))
    weight = torch.randn(dim, device="cuda").to(dtype)
    total, normed = add_rms_norm(x, y, weight, 1e-6)
    assert torch.equal(total, x + y)
    assert error(normed, rms_norm_plain(x + y, weight, 1e-6)) < TOLERANCE[dtype]
    assert error(rms_norm_cuda(x, weight, 1e-6), rms_norm_plain(x, weight, 1e-6)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("qk_norm", ["none", "head", "flat"])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(16, 4, 64), (48, 8, 128), (6, 2, 32)])
def test_rotated_into_the_cache(
    num_heads: int, num_kv_heads: int, head_dim: int, qk_norm: Literal["none", "head", "flat"], dtype: torch.dtype
) -> None:
    from m2forge.kernels.rotary_triton import rotate_into_cache

    torch.manual_seed(0)
    num_tokens, eps = 9, 1e-6
    widths = [heads * head_dim for heads in (num_heads, num_kv_heads, num_kv_heads)]
    qkv = torch.randn(num_tokens, sum(widths), device="cuda").to(dtype)
    q_weight, k_weight = (
        torch.randn(width if qk_norm == "flat" else head_dim, device="cuda").to(dtype) for width in widths[:2]
    )
    angle = torch.randn(num_tokens, head_dim // 4, device="cuda")
    caches = torch.zeros(2, 7, 4, num_kv_heads, head_dim, device="cuda", dtype=dtype)
    slot = torch.randperm(28, device="cuda")[:num_tokens]
    slot[4] = -1
    written = caches.clone()
    k_cache, v_cache = written
    rotation = angle.cos(), angle.sin()
    out = rotate_into_cache(qkv, k_cache, v_cache, slot, *rotation, qk_norm, q_weight, k_weight, eps)

    q, k, v = qkv.split(widths, dim=-1)
    if qk_norm == "flat":
        q, k = rms_norm_plain(q, q_weight, eps), rms_norm_plain(k, k_weight, eps)
    q, k, v = (x.unflatten(-1, (-1, head_dim)) for x in (q, k, v))
    if qk_norm == "head":
        q, k = rms_norm_plain(q, q_weight, eps), rms_norm_plain(k, k_weight, eps)
    q, k = (rotate_plain(x, *rotation) for x in (q, k))
    live = slot >= 0
    for cache, x in zip(caches, (k, v), strict=True):
        cache.view(28, num_kv_heads, head_dim)[slot[live]] = x[live]
    assert error(out, q) < TOLERANCE[dtype]
    assert error(written, caches) < TOLERANCE[dtype]
