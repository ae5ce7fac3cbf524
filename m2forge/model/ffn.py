"""Feed-forward layers: a dense SwiGLU network, or a mixture of experts (MoE) behind a router."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from m2forge.kernels.expert import dispatch, expert_ffn
from m2forge.kernels.gate import gated
from m2forge.model.config import ModelConfig, MoEConfig
from m2forge.model.linear import Linear
from m2forge.model.router import Router, Routing


class Balance(NamedTuple):
    """Routing statistics of one MoE layer: tokens per expert, the sum for P of the auxiliary loss, and the chosen
    experts."""

    load_E: Tensor
    affinity_E: Tensor
    expert_NK: Tensor


class DenseFFN(nn.Module):
    """W2 (silu(W1 x) * W3 x), with W1 above W3 in one matrix."""

    def __init__(self, hidden_size: int, width: int) -> None:
        super().__init__()
        self.w13 = Linear(hidden_size, 2 * width)
        self.w2 = Linear(width, hidden_size)

    def forward(
        self, x_ND: Tensor, count_N: Tensor | None = None, recorded_NK: Tensor | None = None
    ) -> tuple[Tensor, None]:
        return self.w2(gated(self.w13(x_ND))), None


class MixtureFFN(nn.Module):
    def __init__(self, hidden_size: int, config: MoEConfig) -> None:
        super().__init__()
        width = config.intermediate_size
        self.num_experts = config.num_experts
        self.router = Router(hidden_size, config)
        self.w13 = nn.Parameter(torch.empty(config.num_experts, 2 * width, hidden_size))
        self.w2 = nn.Parameter(torch.empty(config.num_experts, hidden_size, width))

    def forward(
        self, x_ND: Tensor, count_N: Tensor | None = None, recorded_NK: Tensor | None = None
    ) -> tuple[Tensor, Balance]:
        routing: Routing = self.router(x_ND, count_N, recorded_NK)
        where = dispatch(routing.expert_NK, self.num_experts)
        out_ND = expert_ffn(x_ND, self.w13, self.w2, routing.weight_NK, where)
        load_E = where.load_E if count_N is None else where.counted_load(count_N)
        return out_ND, Balance(load_E, routing.affinity_E, routing.expert_NK)


def build_ffn(config: ModelConfig, layer: int) -> DenseFFN | MixtureFFN:
    if config.moe is not None and config.is_sparse(layer):
        return MixtureFFN(config.hidden_size, config.moe)
    assert config.intermediate_size is not None
    return DenseFFN(config.hidden_size, config.intermediate_size)
