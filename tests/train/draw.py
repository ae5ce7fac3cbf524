"""Random packs, and a small network to train on them."""

from collections.abc import Mapping

import numpy as np
import torch

from m2forge.model.build import build
from m2forge.model.config import ModelConfig
from m2forge.model.transformer import Transformer
from m2forge.records import NO_TARGET, Pack

VOCAB = 32


def small_model(
    dtype: torch.dtype = torch.float64, attention: Mapping[str, object] | None = None, **changes: object
) -> Transformer:
    """`attention`: changes of it."""
    sizes = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "rotary_dim": 4, "qk_norm": "flat"}
    data: dict[str, object] = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "num_layers": 2,
        "attention": {**sizes, **(attention or {})},
        "moe": {"num_experts": 4, "top_k": 2, "intermediate_size": 8},
        "num_mtp": 2,
        "init_std": 0.3,
    }
    return build(ModelConfig.model_validate(data | changes), dtype=dtype, seed=0)


def draw_pack(seed: int, lengths: list[int], num_tags: int = 1, share_trained: float = 0.7) -> Pack:
    generator = np.random.default_rng(seed)
    tokens = generator.integers(0, VOCAB, sum(lengths))
    targets = generator.integers(0, VOCAB, sum(lengths))
    targets[generator.random(sum(lengths)) > share_trained] = NO_TARGET
    tags = generator.integers(0, num_tags, len(lengths))
    return Pack(*(np.array(values, np.int32) for values in (tokens, targets, lengths, tags)))
