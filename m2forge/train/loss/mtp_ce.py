"""Cross-entropy of the multi-token prediction modules at the loss edges of the main model.

    L_k = Σ_m  weight[m] · ( − log p_k(target[m]) )        module k, edge m

p_k is the softmax of module k at temperature 1, whatever temperature the token was sampled at.
"""

from torch import Tensor

from m2forge.kernels.cross_entropy import linear_cross_entropy


def mtp_ce(
    hidden_ND: Tensor, head_VD: Tensor, target_M: Tensor, *, position_M: Tensor, weight_M: Tensor, float32_head: bool
) -> tuple[Tensor, Tensor]:
    """(L_k of one module, − log p_k of each edge without gradient)."""
    return linear_cross_entropy(
        hidden_ND, head_VD, target_M, position_M=position_M, weight_M=weight_M, float32_head=float32_head
    )
