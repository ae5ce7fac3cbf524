"""Imitation of the sampled tokens, whatever model sampled them and whatever reward they earned.

    value = − logp
    slope = − 1

logp is under the softmax at temperature 1, whatever the sampling temperature: there is no old policy to match.
"""

import torch
from torch import Tensor


def sft(logp_M: Tensor) -> tuple[Tensor, Tensor]:
    return -logp_M, -torch.ones_like(logp_M)
