"""Expert parallelism: the experts' operator over ranks that hold some of the experts each.

    x, chosen experts, weights → all-to-all → the ranks of those experts: weighted sums → all-to-all → added up

A token's row travels once to each rank that holds any of its experts, however many it holds, together with those
experts and their weights. That rank computes their weighted sum, and one row travels back. The backward pass runs
the same all-to-alls in reverse, so the gradient of an expert is the sum over the tokens of all ranks of the group.

All ranks of the group call the operator together, with any number of tokens each.

Shapes: N tokens here, R ranks of the group, T = rows sent, K experts per token, E experts of one rank.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from m2forge.kernels.arithmetic import raised
from m2forge.kernels.expert import Dispatch, dispatch_some, expert_ffn
from m2forge.train.all_to_all import make_route


@dataclass(frozen=True)
class ParallelExpertFFN:
    """`kernels.expert.expert_ffn` with weights that are sharded over the ranks of `group`, in its order."""

    group: dist.ProcessGroup

    def __call__(self, x_ND: Tensor, w13_EGD: Tensor, w2_EDF: Tensor, weight_NK: Tensor, where: Dispatch) -> Tensor:
        assert isinstance(w13_EGD, DTensor)
        assert isinstance(w2_EDF, DTensor)
        w13_EGD, w2_EDF = w13_EGD.to_local(), w2_EDF.to_local()
        num_experts = w2_EDF.shape[0]
        expert_NK = torch.searchsorted(where.ends_E, where.slot_NK, right=True)
        rank_NK = expert_NK // num_experts
        sends_RN = torch.zeros(self.group.size(), len(x_ND), dtype=torch.bool, device=x_ND.device)
        sends_RN.scatter_(0, rank_NK.T, True)
        rank_T, token_T = sends_RN.nonzero(as_tuple=True)
        is_there_TK = rank_NK[token_T] == rank_T[:, None]
        expert_TK = torch.where(is_there_TK, expert_NK[token_T] % num_experts, -1)
        weight_TK = torch.where(is_there_TK, weight_NK[token_T], 0.0)
        to = make_route(self.group, sends_RN.sum(1))
        x, weight_K = to.send(x_ND[token_T]), to.send(weight_TK)
        out = expert_ffn(x, w13_EGD, w2_EDF, weight_K, dispatch_some(to.send(expert_TK), num_experts))
        out_TD = to.back().send(out)
        total_ND = torch.zeros_like(raised(x_ND)).index_add(0, token_T, raised(out_TD))
        return total_ND.to(x_ND.dtype)
