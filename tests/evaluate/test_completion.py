"""Completions by the engine against the plain loop."""

import copy

import numpy as np
import pytest
import torch

from m2forge.evaluate.predictor import ModelPredictor, complete
from m2forge.model.build import build
from m2forge.model.transformer import Transformer
from tests.model.draw import SMALL
from tests.model.generate import generate

PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6, 5], [3], [5, 8]]


@pytest.fixture(scope="module")
def model() -> Transformer:
    model = build(SMALL)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return model


@pytest.fixture(scope="module")
def plain(model: Transformer) -> list[list[int]]:
    """What the plain loop gives for each of `PROMPTS`."""
    return [generate(model, prompt, max_new_tokens=20) for prompt in PROMPTS]


@pytest.mark.parametrize("max_pack_tokens", [1, 12, 1000])
def test_greedy_completions_equal_the_plain_loop(
    model: Transformer, plain: list[list[int]], max_pack_tokens: int
) -> None:
    assert complete(ModelPredictor(model), PROMPTS, max_new_tokens=20, max_pack_tokens=max_pack_tokens) == plain


@pytest.mark.parametrize("max_pack_tokens", [1, 12, 1000])
def test_a_sampled_completion_depends_on_its_seed_alone(model: Transformer, max_pack_tokens: int) -> None:
    def sample(prompts: list[list[int]], seed: int) -> list[list[int]]:
        return complete(
            ModelPredictor(model),
            prompts,
            max_new_tokens=6,
            temperature=0.7,
            seed=seed,
            max_pack_tokens=max_pack_tokens,
        )

    together = sample(PROMPTS, 5)
    assert together == [sample([prompt], 5 + index)[0] for index, prompt in enumerate(PROMPTS)]
    assert together != sample(PROMPTS, 6)


def test_a_predictor_serves_call_after_call_as_its_cache_grows(model: Transformer) -> None:
    predictor, rng = ModelPredictor(model), np.random.default_rng(0)
    beyond = SMALL.max_context + 8
    for length in (5, 200, 20, beyond):
        prompts = [rng.integers(0, SMALL.vocab_size, length).tolist() for _ in range(3)]
        new = complete(predictor, prompts, max_new_tokens=3, max_pack_tokens=100)
        assert new == [generate(model, prompt, max_new_tokens=3) for prompt in prompts]


def test_weights_that_give_no_numbers_are_reported(model: Transformer, caplog: pytest.LogCaptureFixture) -> None:
    broken = copy.deepcopy(model)
    with torch.no_grad():
        broken.head_weight.fill_(torch.nan)
    assert complete(ModelPredictor(broken), PROMPTS, max_new_tokens=2) == [[], [], [], []]
    assert "4 of 4 completions end early: the network's logits are not finite" in caplog.text


def test_stop_tokens_and_bounds_end_prompts_one_by_one(model: Transformer) -> None:
    free = complete(ModelPredictor(model), PROMPTS, max_new_tokens=6)
    stop = free[1][2]
    stopped = complete(ModelPredictor(model), PROMPTS, max_new_tokens=6, stop_ids=(stop,))
    assert stopped == [row[: row.index(stop) + 1] if stop in row else row for row in free]
    done: list[int] = []
    bounded = complete(ModelPredictor(model), PROMPTS, max_new_tokens=[0, 1, 2, 3], advance=done.append)
    assert bounded == [row[:count] for count, row in enumerate(free)]
    assert done == [1, 1, 1, 1]


def test_bad_input_is_refused(model: Transformer) -> None:
    with pytest.raises(ValueError, match=r"temperature: .*-1"):
        complete(ModelPredictor(model), PROMPTS, max_new_tokens=1, temperature=-1.0)
    with pytest.raises(ValueError, match="prompt is empty"):
        complete(ModelPredictor(model), [[1], []], max_new_tokens=1)
