"""Biases that matter, so that a test which forgets them fails; initial ones are zero."""

import torch

from m2forge.model.transformer import Attention, Transformer


def set_biases(model: Transformer, std: float, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for router in model.routers():
        if router.bias is not None:
            router.bias.data.normal_(0.0, std, generator=generator)
    for part in model.modules():
        if isinstance(part, Attention) and part.config.qkv_bias:
            part.qkv.bias.data.normal_(0.0, std, generator=generator)
