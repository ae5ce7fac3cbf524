"""Packs as tensors on the device of the network, with their attention plan and their loss edges.

A loss edge is a position that predicts, the token it should predict, and the tag its loss is counted under.

Shapes: N tokens, M edges.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from m2forge.model.plan import AttentionPlan, CausalRows, Documents
from m2forge.records import NO_TARGET, Pack


@dataclass(frozen=True)
class Batch:
    tokens_N: Tensor
    plan: AttentionPlan
    position_M: Tensor
    target_M: Tensor
    tag_M: Tensor


def make_batch(pack: Pack, device: torch.device) -> Batch:
    (position_M,) = (pack.targets != NO_TARGET).nonzero()
    tag_N = np.repeat(pack.tags, pack.lengths)
    return Batch(
        tokens_N=_on(device, pack.tokens),
        plan=_plan(pack, device),
        position_M=_on(device, position_M),
        target_M=_on(device, pack.targets[position_M]),
        tag_M=_on(device, tag_N[position_M]),
    )


def num_targets(pack: Pack) -> int:
    return int((pack.targets != NO_TARGET).sum())


def _plan(pack: Pack, device: torch.device) -> AttentionPlan:
    lengths: list[int] = pack.lengths.tolist()
    if len(set(lengths)) == 1:
        # Rows of one length need no mask but causality, for which CUDA has the faster attention.
        return CausalRows(len(lengths), lengths[0], device)
    return Documents(lengths, device)


def _on(device: torch.device, array: np.ndarray[tuple[int], np.dtype[np.integer]]) -> Tensor:
    host = torch.from_numpy(array.astype(np.int64))
    if device.type == "cuda":
        return host.pin_memory().to(device, non_blocking=True)
    return host
