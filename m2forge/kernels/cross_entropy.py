"""Cross-entropy from hidden states, one chunk of logits at a time (`linear_loss`).

    loss = Σ_m  weight[m] · ( logsumexp_v z[m,v] − z[m, target[m]] ),    z[m] = head · hidden[position[m]]

Shapes: N tokens, M loss positions, C positions of a chunk, D hidden size, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from m2forge.kernels import native
from m2forge.kernels.linear_loss import check_targets, linear_loss
from m2forge.kernels.precision import at_least_float32, raised


def linear_cross_entropy(
    hidden_ND: Tensor,
    head_VD: Tensor,
    target_M: Tensor,
    *,
    position_M: Tensor | None = None,
    weight_M: Tensor | None = None,
    float32_head: bool = False,
    chunk_bytes: int | None = None,
) -> tuple[Tensor, Tensor]:
    """(loss, the unweighted loss of each position, without gradient).

    Without `position_M` every token carries a loss; without `weight_M` the loss is their mean.
    """
    precision = at_least_float32(hidden_ND.dtype)
    if position_M is None:
        position_M = torch.arange(hidden_ND.shape[0], device=hidden_ND.device)
    if weight_M is None:
        weight_M = torch.full_like(target_M, 1.0 / max(1, target_M.shape[0]), dtype=precision)
    if not position_M.shape == target_M.shape == weight_M.shape:
        shapes = [tuple(x.shape) for x in (position_M, target_M, weight_M)]
        raise ValueError(f"positions, targets and weights differ in shape: {shapes}; give one of each per loss")
    check_targets(target_M, head_VD.shape[0])
    weight_M = weight_M.to(precision)
    nll_M = torch.empty_like(weight_M)

    def score(logits_CV: Tensor, chunk: slice) -> tuple[Tensor, Tensor]:
        nll_M[chunk], grad_CV = _nll_and_grad(logits_CV, target_M[chunk], weight_M[chunk])
        return torch.dot(nll_M[chunk], weight_M[chunk]), grad_CV

    loss = linear_loss(hidden_ND, head_VD, position_M, score, float32_head=float32_head, chunk_bytes=chunk_bytes)
    return loss, nll_M


def linear_cross_entropy_plain(hidden_ND: Tensor, head_VD: Tensor, target_N: Tensor) -> Tensor:
    """The mean over all tokens with all logits at once: the reference that the chunked form must equal."""
    return F.cross_entropy(raised(hidden_ND @ head_VD.t()), target_N)


def _nll_and_grad(logits_CV: Tensor, target_C: Tensor, weight_C: Tensor) -> tuple[Tensor, Tensor]:
    """(loss per row, weight · (softmax − one-hot)); the logits' memory is reused for the gradient."""
    if logits_CV.is_cuda:
        from m2forge.kernels.cross_entropy_triton import nll_and_grad_

        return nll_and_grad_(logits_CV, target_C, weight_C), logits_CV
    logits_CV = raised(logits_CV)
    if native.serves(logits_CV, weight_C):
        nll_C = torch.empty_like(weight_C)
        native.call("nll_and_grad", logits_CV, target_C.contiguous(), weight_C.contiguous(), *logits_CV.shape, nll_C)
        return nll_C, logits_CV
    lse_C1 = logits_CV.logsumexp(-1, keepdim=True)
    target_C1 = target_C[:, None]
    nll_C1 = lse_C1 - logits_CV.gather(1, target_C1)
    grad_CV = logits_CV.sub_(lse_C1).exp_()
    grad_CV.scatter_add_(1, target_C1, torch.full_like(nll_C1, -1.0))
    return nll_C1[:, 0], grad_CV.mul_(weight_C[:, None].to(grad_CV.dtype))
