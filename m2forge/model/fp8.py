"""FP8 weights with one scale per block of 128 × 128, as in the released M2 checkpoints.

    weight[r, c] = stored[r, c] · scale[r // 128, c // 128]

`stored` is float8_e4m3fn of shape (R, C); `scale` is stored beside it as `<name>_scale_inv`, of shape (⌈R/128⌉,
⌈C/128⌉): blocks at the lower and right edge may be partial. Products are computed in float32 and rounded once to the
requested dtype.
"""

import torch
from torch import Tensor

from m2forge.model.config_file import FP8_BLOCK as BLOCK

SCALE_SUFFIX = "_scale_inv"


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the scales of a weight of this shape."""
    return tuple(-(-size // BLOCK) for size in shape)


def dequantize(stored_RC: Tensor, scale: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The weight in `dtype`. Uses temporary memory for at most one band of 128 rows."""
    if stored_RC.dim() != 2 or tuple(scale.shape) != scale_shape(tuple(stored_RC.shape)):
        raise ValueError(
            f"a weight of shape {list(stored_RC.shape)} with scales of shape {list(scale.shape)}; "
            f"expected a matrix and one scale per block of {BLOCK} × {BLOCK}"
        )
    weight_RC = torch.empty(stored_RC.shape, dtype=dtype, device=stored_RC.device)
    scale = scale.to(torch.float32)
    for band, scale_B in zip(range(0, stored_RC.shape[0], BLOCK), scale, strict=True):
        scale_C = scale_B.repeat_interleave(BLOCK)[: stored_RC.shape[1]]
        weight_RC[band : band + BLOCK] = stored_RC[band : band + BLOCK].to(torch.float32) * scale_C
    return weight_RC
