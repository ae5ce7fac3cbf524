"""Expert selection after the router's product, in one CUDA kernel launch, without gradients.

    s = sigmoid(logits) or softmax(logits)
    chosen = top-k of s + b, descending; the lower index of equals
    weight = s[chosen] / Σ s[chosen] (when normalised)

Padding rows choose no expert, so that no expert's weights are read for them.

The reference is the body of `model.router.Router.forward`.

Shapes: N tokens, E experts, K chosen per token.
"""

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _select_kernel(
    logits, bias, position, expert, weight,
    E: tl.constexpr, K: tl.constexpr, LANES: tl.constexpr, CHOICES: tl.constexpr, SIGMOID: tl.constexpr,
    BIASED: tl.constexpr, NORMALIZE: tl.constexpr, PLACED: tl.constexpr,
):  # fmt: skip
    token, lane, choice = tl.program_id(0).to(tl.int64), tl.arange(0, LANES), tl.arange(0, CHOICES)
    inside = lane < E
    z = tl.load(logits + token * E + lane, mask=inside, other=-float("inf")).to(tl.float32)
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-z))
    else:
        share = tl.exp(z - tl.max(z, 0))
        score = share / tl.sum(share, 0)
    standing = score
    if BIASED:
        standing += tl.load(bias + lane, mask=inside, other=0.0).to(tl.float32)
    standing = tl.where(inside, standing, -float("inf"))
    chosen, value = tl.zeros((CHOICES,), tl.int64), tl.zeros((CHOICES,), tl.float32)
    for k in tl.static_range(K):
        # NaN compares false with everything; the resulting index is wrong but in range.
        best = tl.minimum(tl.argmax(standing, 0, tie_break_left=True), E - 1)
        chosen = tl.where(choice == k, best.to(tl.int64), chosen)
        value = tl.where(choice == k, tl.sum(tl.where(lane == best, score, 0.0), 0), value)
        standing = tl.where(lane == best, -float("inf"), standing)
    if NORMALIZE:
        value = value / tl.sum(value, 0)
    if PLACED:
        chosen = tl.where(tl.load(position + token) < 0, E, chosen)
    tl.store(expert + token * K + choice, chosen, mask=choice < K)
    tl.store(weight + token * K + choice, value, mask=choice < K)


def select_experts(
    logits_NE: Tensor,
    bias_E: Tensor | None,
    top_k: int,
    scoring: Literal["sigmoid", "softmax"],
    normalize: bool,
    position_N: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(experts in int64, weights in float32), each (N, K). Rows with `position_N` below 0 are padding; their experts
    are E, one past the last."""
    num_tokens, num_experts = logits_NE.shape
    expert_NK = torch.empty(num_tokens, top_k, dtype=torch.int64, device=logits_NE.device)
    weight_NK = torch.empty(num_tokens, top_k, dtype=torch.float32, device=logits_NE.device)
    if num_tokens:
        _select_kernel[(num_tokens,)](
            *(logits_NE.contiguous(), logits_NE if bias_E is None else bias_E),
            *(expert_NK if position_N is None else position_N, expert_NK, weight_NK),
            *(num_experts, top_k, triton.next_power_of_2(num_experts), triton.next_power_of_2(top_k)),
            *(scoring == "sigmoid", bias_E is not None, normalize, position_N is not None),
            num_warps=1,
        )
    return expert_NK, weight_NK
