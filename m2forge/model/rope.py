"""Rotary position embedding (RoPE) angles for the leading `rotary_dim` dimensions of each head.

    angle[n,i] = position[n] · frequency[i],      frequency[i] = theta^(−2i / rotary_dim), i < rotary_dim / 2

Computed in at least float32. kernels/rotary.py applies the rotation.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from m2forge.kernels.precision import at_least_float32
from m2forge.model.config import AttentionConfig, RopeScaling


class Rotation(NamedTuple):
    """cos and sin of every token's angles, (N, rotary_dim / 2)."""

    cos: Tensor
    sin: Tensor


def frequencies(config: AttentionConfig, device: torch.device | None = None) -> Tensor:
    exponent = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32, device=device) / config.rotary_dim
    plain = 1.0 / (config.rope_theta**exponent)
    return plain if config.rope_scaling is None else _scaled(plain, config.rope_scaling)


def _scaled(plain: Tensor, scaling: RopeScaling) -> Tensor:
    if scaling.kind == "linear":
        return plain / scaling.factor
    wavelength = 2 * math.pi / plain
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    blend = ((scaling.original_context / wavelength - low) / (high - low)).clamp(0, 1)
    return blend * plain + (1 - blend) * plain / scaling.factor


def rotation(position_N: Tensor, frequency_R: Tensor, dtype: torch.dtype) -> Rotation:
    precision = at_least_float32(dtype)
    angle_NR = position_N.to(precision)[:, None] * frequency_R.to(precision)
    return Rotation(angle_NR.cos(), angle_NR.sin())
