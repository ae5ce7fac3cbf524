"""The argmax token of each row of logits (the first of equals) and its logprob, in one pass on a CPU.

    token = argmax_v z[v]        logprob = z[token] − logsumexp_v z[v]

A row with NaN gives the index of its first NaN, and NaN. Without gradients.

Shapes: B rows, V vocabulary.
"""

import torch
from torch import Tensor

from m2forge.kernels import arithmetic as native
from m2forge.kernels.arithmetic import raised


def greedy(logits_BV: Tensor) -> tuple[Tensor, Tensor]:
    """(token_B, logprob_B), the latter in at least float32."""
    is_narrow = logits_BV.dtype == torch.bfloat16
    serves = native.serves(logits_BV, dtype=torch.bfloat16 if is_narrow else torch.float32)
    if not serves or native.needs_gradient(logits_BV):
        return greedy_plain(logits_BV)
    logits_BV, num_rows = logits_BV.contiguous(), logits_BV.shape[0]
    token_B, logprob_B = torch.empty(num_rows, dtype=torch.int64), torch.empty(num_rows, dtype=torch.float32)
    native.call("greedy", logits_BV, *logits_BV.shape, int(is_narrow), token_B, logprob_B)
    return token_B, logprob_B


def greedy_plain(logits_BV: Tensor) -> tuple[Tensor, Tensor]:
    raw_BV = raised(logits_BV)
    token_B = raw_BV.argmax(-1)
    return token_B, raw_BV.gather(-1, token_B[:, None])[:, 0] - raw_BV.logsumexp(-1)
