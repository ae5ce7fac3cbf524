"""Rotary position embedding: a config and the tokens' positions in, cos and sin of their angles out.

    angle[n, i] = position[n] · frequency[i],      frequency[i] = theta^(−2i / rotary_dim)

Beyond the trained context frequencies are scaled: all of them (linear), or the low ones with a blend into the high ones
(llama3, YaRN). YaRN also multiplies cos and sin by a factor. kernels/pointwise.py applies them.

Shapes: N tokens, R = rotating dimensions / 2.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from m2forge.kernels.arithmetic import at_least_float32
from m2forge.model.config import AttentionConfig, RopeScaling


class Rotation(NamedTuple):
    """cos and sin of every token's angles, times the config's `rotary_factor`, (N, rotary_dim / 2)."""

    cos: Tensor
    sin: Tensor


def frequencies(config: AttentionConfig, device: torch.device | None = None) -> Tensor:
    """theta^(−2i / rotary_dim) for i < rotary_dim / 2, scaled if the config says so."""
    exponent = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32, device=device) / config.rotary_dim
    plain, scaling = 1.0 / (config.rope_theta**exponent), config.rope_scaling
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    share = _yarn_share(config, scaling, device) if scaling.kind == "yarn" else _llama3_share(plain, scaling)
    return share * plain + (1 - share) * plain / scaling.factor


def _llama3_share(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """How much of each frequency stays: all where its wavelength is short against the trained context, none where it is
    long."""
    wavelength = 2 * math.pi / plain
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    return ((scaling.original_context / wavelength - low) / (high - low)).clamp(0, 1)


def _yarn_share(config: AttentionConfig, scaling: RopeScaling, device: torch.device | None) -> Tensor:
    """How much of each frequency stays. It falls linearly over the dimensions between `low` and `high`, those that turn
    beta_fast and beta_slow times within the trained context c:

        dimension(turns) = rotary_dim · ln(c / (2π · turns)) / (2 · ln theta)
    """

    def dimension(turns: float) -> float:
        ratio = scaling.original_context / (2 * math.pi * turns)
        return config.rotary_dim * math.log(ratio) / (2 * math.log(config.rope_theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.rotary_dim - 1)
    width = high - low or 0.001  # equal bounds make a step
    index_R = torch.arange(config.rotary_dim // 2, dtype=torch.float32, device=device)
    return 1 - ((index_R - low) / width).clamp(0, 1)


def rotation(position_N: Tensor, frequency_R: Tensor, dtype: torch.dtype, factor: float) -> Rotation:
    """The angles position[n] · frequency[i] of the leading `rotary_dim` dimensions of each head, in at least float32;
    kernels/pointwise.py applies them. `factor`: the config's `rotary_factor`.
    """
    precision = at_least_float32(dtype)
    angle_NR = position_N.to(precision)[:, None] * frequency_R.to(precision)
    cos_NR, sin_NR = angle_NR.cos(), angle_NR.sin()
    return Rotation(cos_NR, sin_NR) if factor == 1 else Rotation(cos_NR * factor, sin_NR * factor)
