"""The CUDA paths equal their plain twins; run where there is a GPU."""

import pytest
import torch

from m2forge.kernels.attention import document_attention_plain
from m2forge.kernels.expert import dispatch, dispatch_some, expert_ffn, expert_ffn_plain
from m2forge.kernels.head_loss import linear_cross_entropy, linear_cross_entropy_plain
from m2forge.kernels.linear import linear_float32
from m2forge.model.build import build
from m2forge.model.config import WindowConfig
from m2forge.model.plan import Documents, visible
from m2forge.model.preset import preset

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 2e-2}
"""Relative to the norm: a few roundings of each type, and sums over a few thousand terms."""


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    actual, expected = actual.detach().double(), expected.detach().double()
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("shape", [(1000, 256, 128, 16, 4), (300, 3072, 1536, 32, 8), (64, 64, 40, 64, 2)])
@pytest.mark.parametrize("share_here", [1, 0.25, 0])
def test_experts(dtype: torch.dtype, shape: tuple[int, ...], share_here: float) -> None:
    torch.manual_seed(0)
    num_tokens, dim, width, num_experts, top_k = shape
    x, grad = torch.randn(2, num_tokens, dim, device="cuda")
    w13 = torch.randn(num_experts, 2 * width, dim, device="cuda") / dim**0.5
    w2 = torch.randn(num_experts, dim, width, device="cuda") / width**0.5
    expert_NK = torch.rand(num_tokens, num_experts, device="cuda").topk(top_k).indices
    expert_NK = torch.where(expert_NK < share_here * num_experts, expert_NK, -1)
    sort = dispatch if share_here == 1 else dispatch_some
    weight_NK = torch.rand(num_tokens, top_k, device="cuda")

    def run(plain: bool, kind: torch.dtype) -> list[torch.Tensor]:
        leaves = [leaf.to(kind).clone().requires_grad_() for leaf in (x, w13, w2)]
        weight = weight_NK.to(torch.promote_types(kind, torch.float32)).clone().requires_grad_()
        if plain:
            out = expert_ffn_plain(leaves[0], leaves[1], leaves[2], weight, expert_NK)
        else:
            out = expert_ffn(leaves[0], leaves[1], leaves[2], weight, sort(expert_NK, num_experts))
        return [out, *torch.autograd.grad(out, (*leaves, weight), grad.to(kind))]

    for ours, twin in zip(run(False, dtype), run(True, torch.float64), strict=True):
        assert torch.equal(ours.double(), twin) if share_here == 0 else error(ours, twin) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_cross_entropy(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    hidden, head = torch.randn(500, 256, device="cuda"), torch.randn(33_333, 256, device="cuda") / 16
    target = torch.randint(0, 33_333, (500,), device="cuda")
    ours, twin = ([x.to(kind).clone().requires_grad_() for x in (hidden, head)] for kind in (dtype, torch.float64))
    loss, _ = linear_cross_entropy(ours[0], ours[1], target, chunk_bytes=1 << 22)
    expected = linear_cross_entropy_plain(twin[0], twin[1], target)
    pairs = zip(torch.autograd.grad(0.3 * loss, ours), torch.autograd.grad(0.3 * expected, twin), strict=True)
    assert error(loss.detach(), expected.detach()) < TOLERANCE[dtype]
    assert all(error(mine, theirs) < TOLERANCE[dtype] for mine, theirs in pairs)


@pytest.mark.parametrize(
    "window", [None, WindowConfig(size=100, layers=()), WindowConfig(size=200, layers=(), num_sinks=4)]
)
@pytest.mark.parametrize("lengths", [[300, 5, 1000, 128, 127], [2048], [130]])
def test_flex_attention(window: WindowConfig | None, lengths: list[int]) -> None:
    from m2forge.kernels.flex import document_mask, flex

    torch.manual_seed(0)
    q, k, v = (torch.randn(sum(lengths), heads, 64, device="cuda", requires_grad=True) for heads in (8, 2, 2))
    grad = torch.randn_like(q)
    size, num_sinks = (window.size, window.num_sinks) if window else (None, 0)
    mask = document_mask(Documents(lengths, "cuda").start_N, size, num_sinks)
    heads_first = [x.transpose(0, 1)[None] for x in (q, k, v)]
    out = flex(heads_first[0], heads_first[1], heads_first[2], mask)[0].transpose(0, 1)
    masks = [None if seen is None else seen.cuda() for seen in (visible(length, window) for length in lengths)]
    expected = document_attention_plain(q.double(), k.double(), v.double(), lengths, masks)
    assert error(out, expected) < TOLERANCE[torch.float32]
    pairs = zip(*(torch.autograd.grad(x, (q, k, v), grad.to(x.dtype)) for x in (out, expected)), strict=True)
    assert all(error(mine, theirs) < TOLERANCE[torch.float32] for mine, theirs in pairs)


@pytest.mark.parametrize("window", [None, WindowConfig(size=200, layers=(), num_sinks=4)])
@pytest.mark.parametrize("lengths", [[300, 5, 1000, 128, 127], [2048]])
def test_attention_of_some_queries(window: WindowConfig | None, lengths: list[int]) -> None:
    torch.manual_seed(0)
    query_Q = torch.rand(sum(lengths)).sort().indices[: sum(lengths) // 2].sort().values
    k, v = (torch.randn(sum(lengths), 2, 64, device="cuda", requires_grad=True) for _ in range(2))
    q = torch.randn(query_Q.shape[0], 8, 64, device="cuda", requires_grad=True)
    grad = torch.randn_like(q)
    out = Documents(lengths, "cuda").bind_queries(window, query_Q.cuda())(q, k, v)
    expected = Documents(lengths).bind_queries(window, query_Q)(*(x.cpu().double() for x in (q, k, v))).cuda()
    assert error(out, expected) < TOLERANCE[torch.float32]
    pairs = zip(*(torch.autograd.grad(x, (q, k, v), grad.to(x.dtype)) for x in (out, expected)), strict=True)
    assert all(error(mine, theirs) < TOLERANCE[torch.float32] for mine, theirs in pairs)


def test_linear_with_float32_output() -> None:
    torch.manual_seed(0)
    x, weight = (torch.randn(shape, device="cuda").bfloat16().requires_grad_() for shape in ((300, 512), (64, 512)))
    out = linear_float32(x, weight)
    expected = x.double() @ weight.double().t()
    assert out.dtype == torch.float32
    assert error(out, expected) < TOLERANCE[torch.float32]
    grad = torch.randn_like(out)
    pairs = zip(*(torch.autograd.grad(y, (x, weight), grad.to(y.dtype)) for y in (out, expected)), strict=True)
    assert all(error(mine, theirs) < TOLERANCE[torch.bfloat16] for mine, theirs in pairs)


@pytest.mark.filterwarnings("default")  # torch's compiler warns of what it does itself
@pytest.mark.parametrize("compiled", [False, True])
def test_whole_network_equals_the_cpu(compiled: bool) -> None:
    config, lengths = preset("m2-tiny"), [300, 5, 130, 265]
    tokens = torch.randint(0, config.vocab_size, (700,), generator=torch.Generator().manual_seed(0))
    exact = build(config, dtype=torch.float64)
    model = build(config, "cuda", torch.float32)
    model.load_state_dict(exact.state_dict())
    if compiled:
        model.compile_blocks()
    outputs = model(tokens.cuda(), Documents(lengths, "cuda")), exact(tokens, Documents(lengths))
    direction = torch.randn(700, config.hidden_size, generator=torch.Generator().manual_seed(1))
    gradients = []
    for network, output in zip((model, exact), outputs, strict=True):
        ((output.hidden_ND + output.mtp_hidden_ND[0]) * direction.to(output.hidden_ND)).sum().backward()
        gradients.append({name: p.grad.cpu() for name, p in network.named_parameters() if p.grad is not None})
    assert error(outputs[0].hidden_ND.cpu(), outputs[1].hidden_ND) < TOLERANCE[torch.float32]
    assert gradients[0].keys() == gradients[1].keys()
    assert all(error(gradients[0][name], gradients[1][name]) < 1e-4 for name in gradients[0])
