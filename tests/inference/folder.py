"""A model folder for inference: random weights, and the tokenizer of the gateway's tests."""

from pathlib import Path

import torch

from m2forge.model.build import build
from m2forge.model.checkpoint import save_model
from m2forge.model.preset import resolve_config
from m2forge.text.format import ChatFormat
from tests.gateway.dialogue import FORMATS
from tests.pretrain.small import NETWORK

CONTEXT = 1024
NUM_UNKNOWN = 8
"""Ids of the network that its tokenizer lacks, as padded vocabularies have."""


def write_model(folder: Path, format: ChatFormat | None = None, *, context: int = CONTEXT, seed: int = 3) -> Path:
    """`format`: its tokenizer; by default the minimax one."""
    tokenizer = (FORMATS["minimax_m2"]() if format is None else format).tokenizer
    sizes = (f"vocab_size={tokenizer.vocab_size + NUM_UNKNOWN}", f"max_context={context}", "num_mtp=0")
    # float64, in which a batch of another size rounds too little to change a greedy choice
    network = build(resolve_config("m2-nano", overrides=[*NETWORK, *sizes]), dtype=torch.float64, seed=seed)
    save_model(network, folder)
    tokenizer.save(folder)
    return folder
