"""Decoding from a cache against reading everything again, on random networks in float64."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from m2forge.evaluate.continuation import Cached, Rereading
from m2forge.evaluate.predictor import ModelPredictor
from m2forge.model.build import build
from m2forge.model.config import ModelConfig
from tests.model.draw import model_configs


@given(config=model_configs(), seed=st.integers(0, 2**16), num_steps=st.integers(1, 5))
def test_a_cache_gives_the_logits_of_reading_again(config: ModelConfig, seed: int, num_steps: int) -> None:
    model = build(config, dtype=torch.float64, seed=seed)
    generator = np.random.default_rng(seed)
    documents = [
        generator.integers(0, config.vocab_size, int(generator.integers(1, 20)), np.int32)
        for _ in range(int(generator.integers(1, 4)))
    ]
    cached, plain = Cached(model, documents), Rereading(ModelPredictor(model), documents)
    num_open = len(documents)
    for _ in range(num_steps):
        torch.testing.assert_close(cached.logits(), plain.logits(), rtol=1e-9, atol=1e-9)
        tokens = generator.integers(0, config.vocab_size, num_open).tolist()
        # In any order, and never none.
        kept = generator.permutation(num_open)[: int(generator.integers(1, num_open + 1))].tolist()
        cached.extend(tokens, kept)
        plain.extend(tokens, kept)
        num_open = len(kept)


def test_a_cache_grows_beyond_its_room() -> None:
    from tests.model.draw import SMALL

    model = build(SMALL, dtype=torch.float64)
    documents = [np.array([1, 2, 3], np.int32), np.array([4], np.int32)]
    cached, plain = Cached(model, documents), Rereading(ModelPredictor(model), documents)
    for step in range(70):
        cached.extend([step, step + 1], [0, 1])
        plain.extend([step, step + 1], [0, 1])
    torch.testing.assert_close(cached.logits(), plain.logits(), rtol=1e-9, atol=1e-9)
