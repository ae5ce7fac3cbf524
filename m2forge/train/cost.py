"""FLOPs of a training step, computed from the documents and targets of its packs.

    flops = Σ over documents of  length · (base + slope · length)  +  head · targets

A token attends to half of its document on average, so its cost grows with the document's length, not with the context
limit of the phase; and the head runs only at positions with a target. `count` gives the cost at two lengths; the cost
is linear between them, which is exact without attention windows.
"""

from collections.abc import Sequence

import numpy as np

from m2forge.model.config import ModelConfig
from m2forge.model.count import count
from m2forge.records import Pack
from m2forge.train.batch import num_targets


class TokenCost:
    def __init__(self, config: ModelConfig, context: int) -> None:
        first, *rest = count(config, (1, context) if context > 1 else (1,)).costs
        self._slope = (rest[0].training_flops - first.training_flops) / (context - 1) if rest else 0.0
        # Forward (1x) and backward (2x), for the main model and each MTP module.
        self._head = 3 * 2 * config.vocab_size * config.hidden_size * (1 + config.num_mtp)
        self._base = first.training_flops - self._slope - self._head

    def training_flops(self, packs: Sequence[Pack]) -> float:
        """FLOPs of the forward and backward passes over `packs`."""
        length = np.concatenate([pack.lengths for pack in packs]).astype(np.float64)
        through_layers = float((length * (self._base + self._slope * length)).sum())
        return through_layers + self._head * sum(num_targets(pack) for pack in packs)
