"""Tree attention on CUDA equals the plain form; run where there is a GPU."""

import numpy as np
import pytest
import torch

from m2forge.kernels.tree_attention import TreeLayout, documents_layout, tree_attention_plain
from m2forge.kernels.tree_schedule import make_schedule
from tests.kernels.draw import layout_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Relative to the norm: weights and values are rounded once on their way into each product."""


def random_layout(seed: int, num_nodes: int, max_length: int) -> TreeLayout:
    rng = np.random.default_rng(seed)
    path: list[int] = []
    parents, bounds = [], [0]
    for node in range(num_nodes):
        del path[int(rng.integers(0, len(path) + 1)) :]
        parents.append(path[-1] if path else -1)
        path.append(node)
        bounds.append(bounds[-1] + int(rng.integers(1, max_length + 1)))
    return layout_of(parents, bounds)


LAYOUTS = {
    "one token": documents_layout([1]),
    "one tile": documents_layout([64]),
    "documents": documents_layout([300, 5, 1000, 64, 128, 127, 1]),
    "nodes of one token": random_layout(0, 200, 1),
    "short nodes": random_layout(1, 60, 40),
    "long nodes": random_layout(2, 12, 900),
    "more queries than one program takes": layout_of([-1, *[0] * 40], [0, *range(100, 100 + 41 * 300, 300)]),
}


@pytest.mark.parametrize(
    ("heads", "dtype"),
    [
        ((8, 2, 64), torch.bfloat16),
        ((8, 2, 64), torch.float16),
        ((4, 4, 128), torch.bfloat16),
        ((6, 2, 16), torch.bfloat16),
        ((4, 1, 32), torch.bfloat16),
    ],
)
@pytest.mark.parametrize("name", list(LAYOUTS))
def test_equals_the_plain_form(name: str, heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    from m2forge.kernels.tree_attention_triton import tree_attention_cuda

    torch.manual_seed(0)
    layout, (num_heads, num_kv_heads, head_dim) = LAYOUTS[name], heads
    # Slices of one projection, as the network gives them.
    joint = torch.randn(layout.num_tokens, num_heads + 2 * num_kv_heads, head_dim, device="cuda", dtype=dtype)
    parts = joint.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    ours, twin = ([x.detach().to(kind).requires_grad_() for x in parts] for kind in (dtype, torch.float64))
    out = tree_attention_cuda(ours[0], ours[1], ours[2], make_schedule(layout, torch.device("cuda")))
    expected = tree_attention_plain(twin[0], twin[1], twin[2], layout)
    grad = torch.randn_like(out)
    pairs = [(out.detach(), expected.detach())]
    pairs += zip(torch.autograd.grad(out, ours, grad), torch.autograd.grad(expected, twin, grad.double()), strict=True)
    for actual, wanted in pairs:
        # A token alone in its tree sees itself whatever it asks: its true gradient of q and k is 0.
        scale = max(float(wanted.norm()), 1e-2 * float(grad.double().norm()))
        assert float((actual.double() - wanted).norm()) / scale < TOLERANCE[dtype]
