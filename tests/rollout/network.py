"""A network that fits the contract of engines and takes a millisecond a token."""

from pathlib import Path

import torch

from m2forge.model.build import build
from m2forge.model.checkpoint import save_model
from m2forge.model.preset import resolve_config
from m2forge.model.transformer import Transformer
from tests.pretrain.small import NETWORK
from tests.rollout.engine_contract import CONTEXT, VOCAB_SIZE


def make_network(seed: int) -> Transformer:
    sizes = (f"vocab_size={VOCAB_SIZE}", f"max_context={CONTEXT}", "num_mtp=0")
    # float64, in which a batch of another size rounds too little to change a draw
    return build(resolve_config("m2-nano", overrides=[*NETWORK, *sizes]), dtype=torch.float64, seed=seed)


def write_network(folder: Path) -> None:
    """Another one of the same sizes than `make_network(0)`."""
    save_model(make_network(1), folder)
