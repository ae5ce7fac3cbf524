"""Log-probabilities that a step hands out are those of the policy that it began with, sample by sample."""

import numpy as np
import pytest
import torch

from m2forge.train.config import OptimizerConfig, PolicyConfig
from m2forge.train.engine import TrainEngine
from tests.train.draw import small_model
from tests.train.naive import make_tree, naive_step
from tests.tree.draw import make_call


@pytest.mark.parametrize("slack", [0, 3, 100])
def test_they_equal_independent_rows_however_trees_are_packed(slack: int) -> None:
    calls = [([1, 2], [3, 4, 0]), ([1, 2, 3, 4, 0, 2], [1, 1]), ([1, 2], [3, 1]), ([4], []), ([1, 2], [3, 4, 0])]
    made = [make_call(prompt, response, seed) for seed, (prompt, response) in enumerate(calls)]
    trees = [make_tree(made), make_tree(made[::-1], "u")]
    samples = [sample for tree in trees for sample in tree.samples]
    config = PolicyConfig(pack_tokens=max(sample.num_tokens for sample in samples) + slack)
    model = small_model()
    ratios = naive_step(model, trees, config).ratios.split([sample.num_response for sample in samples])
    expected = {sample.name: ratio.log().numpy() for sample, ratio in zip(samples, ratios, strict=True)}
    report = TrainEngine(model, OptimizerConfig(), policy=config).step(trees, lr=0.1)
    found = {sample.name: logprobs - sample.logprobs for sample, logprobs in report.logprobs()}
    assert found.keys() == expected.keys()
    for name, log_ratios in found.items():
        # What is handed out is float32.
        np.testing.assert_allclose(log_ratios, expected[name], rtol=0, atol=1e-5)


def test_what_is_refused_has_none_and_neither_has_an_empty_step() -> None:
    calls = [make_call([1, 2], [3, 4], 0), make_call([1, 2, 3, 4, 0, 1, 2, 3], [1, 1], 1)]
    engine = TrainEngine(small_model(), OptimizerConfig(), policy=PolicyConfig(pack_tokens=4))
    (found,) = engine.step([make_tree(calls)], lr=0.0).logprobs()
    assert found[0].name == "ts0"
    assert found[1].shape == (2,)
    assert engine.step([], lr=0.0).logprobs() == []


def test_packs_stay_apart_from_the_weights_that_follow() -> None:
    """The numbers are of before the step, also when the weights have moved far."""
    trees = [make_tree([make_call([1, 2], [3, 4, 0], 0), make_call([4], [2, 2], 1)])]
    model = small_model()
    engine = TrainEngine(model, OptimizerConfig(), policy=PolicyConfig())
    first = engine.step(trees, lr=0.0)
    second = engine.step(trees, lr=1.0)
    third = engine.step(trees, lr=0.0)
    for (_, one), (_, other), (_, moved) in zip(first.logprobs(), second.logprobs(), third.logprobs(), strict=True):
        assert torch.equal(torch.tensor(one), torch.tensor(other))
        assert (np.abs(moved - one) > 0.01).any()
