"""Builds networks without weights, and networks with initial ones."""

import torch

from m2forge.errors import ConfigError
from m2forge.model.config import ModelConfig
from m2forge.model.transformer import Transformer


def skeleton(config: ModelConfig) -> Transformer:
    """The network on the meta device: shapes and names, no memory."""
    try:
        with torch.device("meta"):
            return Transformer(config)
    except RuntimeError as error:
        raise ConfigError(f"a network of these sizes cannot be built: {str(error).splitlines()[0]}") from error


def empty(config: ModelConfig, device: torch.device | str, dtype: torch.dtype) -> Transformer:
    """The network with uninitialised weights."""
    model = skeleton(config).to(dtype)
    # As `to_empty` does, which loads sympy to compute the strides of meta tensors: half a second in every process.
    model._apply(  # type: ignore[no-untyped-call]
        lambda meta: torch.empty(meta.shape, dtype=meta.dtype, device=device)
    )
    return model


def build(
    config: ModelConfig, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, seed: int = 0
) -> Transformer:
    """The network with initialised weights."""
    model = empty(config, device, dtype)
    model.init_weights(seed)
    return model
