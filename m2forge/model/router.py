"""The router chooses each token's experts and their weights.

    s = sigmoid(x W) or softmax(x W), in at least float32
    chosen = top-k of s + b          (b: the selection bias, which gets no gradient of the language-model loss)
    weight = s[chosen] / Σ s[chosen] (when normalised)

Routing replay: experts recorded at sampling time can replace the top-k; the weights still come from s.

Load balancing (N tokens, E experts, c = tokens per expert, each token weighted by the plan's count):

    sign rule:      b += rate · (d − mean d),   d = sign(mean c − c)
    auxiliary loss: E · Σ_e f_e P_e,            f = c / Σc detached, P = mean over tokens of a / Σa
                    with a = s, or a = s + b where b learns by gradient
    MaxVio:         max c / mean c − 1

If f covers all micro-batches of a step, and P is one micro-batch's sum divided by the step's number of tokens, the
micro-batches' auxiliary losses add up to that of the step.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from m2forge.kernels.linear import linear_float32
from m2forge.model.config import MoEConfig


class Routing(NamedTuple):
    expert_NK: Tensor
    weight_NK: Tensor
    affinity_E: Tensor
    """Σ over tokens of a / Σa, weighted by count: P of the auxiliary loss before the division."""


class Router(nn.Module):
    def __init__(self, hidden_size: int, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, hidden_size))
        self.bias: Tensor | None = None
        if config.selection_bias:
            bias = torch.zeros(config.num_experts)
            if config.bias_update == "gradient":
                self.bias = nn.Parameter(bias)
            else:
                del self.bias
                self.register_buffer("bias", bias)

    def forward(self, x_ND: Tensor, count_N: Tensor | None = None, recorded_NK: Tensor | None = None) -> Routing:
        """`count_N`: weight of each token in the balance, 1 by default. `recorded_NK`: experts that replace the
        router's choice; −1 in all K entries of a token without a record."""
        logits_NE = linear_float32(x_ND, self.weight)
        scores_NE = logits_NE.sigmoid() if self.config.scoring == "sigmoid" else logits_NE.softmax(-1)
        selection_NE = scores_NE if self.bias is None else scores_NE + self.bias
        expert_NK = selection_NE.detach().topk(self.config.top_k, dim=-1, sorted=False).indices
        if recorded_NK is not None:
            expert_NK = torch.where(recorded_NK < 0, expert_NK, recorded_NK.to(expert_NK.dtype))
        weight_NK = scores_NE.gather(1, expert_NK)
        if self.config.normalize:
            weight_NK = weight_NK / weight_NK.sum(-1, keepdim=True)
        return Routing(expert_NK, weight_NK, self._affinity(scores_NE, selection_NE, count_N))

    def _affinity(self, scores_NE: Tensor, selection_NE: Tensor, count_N: Tensor | None) -> Tensor:
        if self.config.aux_loss_weight == 0:
            return scores_NE.new_zeros(self.config.num_experts)
        a_NE = selection_NE if self.config.bias_update == "gradient" else scores_NE
        share_NE = a_NE / a_NE.sum(-1, keepdim=True)
        return (share_NE if count_N is None else share_NE * count_N[:, None]).sum(0)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Router":
        """Moves and casts like any module, but keeps the bias in at least float32: its small updates would vanish
        below."""
        # The data, not the tensor: a cast replaces a parameter's data in place.
        exact = None if self.bias is None else self.bias.data
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if exact is not None and self.bias is not None and self.bias.element_size() < torch.float32.itemsize:
            self.bias.data = exact.to(self.bias.device, torch.float32)
        return self


def max_violation(load_LE: Tensor) -> Tensor:
    """MaxVio of each layer: the highest expert load relative to the mean, minus 1; 0 is perfect balance."""
    load_LE = load_LE.double()
    return load_LE.amax(-1) / load_LE.mean(-1).clamp(min=1e-12) - 1


@torch.no_grad()
def update_bias(bias_E: Tensor, load_E: Tensor, rate: float) -> None:
    """The centred sign rule, in place."""
    load_E = load_E.to(bias_E.dtype)
    direction_E = torch.sign(load_E.mean() - load_E)
    bias_E += rate * (direction_E - direction_E.mean())


def aux_loss(load_LE: Tensor, affinity_LE: Tensor, num_tokens: int | Tensor) -> Tensor:
    """The auxiliary load-balancing loss, averaged over layers; 1 at perfect balance.

    `load_LE` and `num_tokens` are those of the whole step, weighted by count; `affinity_LE` may be one micro-batch's.
    """
    fraction_LE = load_LE.to(affinity_LE.dtype) / load_LE.sum(-1, keepdim=True).clamp(min=1)
    return affinity_LE.shape[-1] * (fraction_LE.detach() * affinity_LE).sum(-1).mean() / num_tokens
