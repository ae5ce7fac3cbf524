"""The batched loop against the plain one."""

import pytest
import torch

from m2forge.evaluate.completion import complete
from m2forge.evaluate.predictor import ModelPredictor
from m2forge.model.build import build
from m2forge.model.generate import generate
from m2forge.model.transformer import Transformer
from tests.model.draw import SMALL

PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6, 5], [3], [5, 8]]


@pytest.fixture(scope="module")
def model() -> Transformer:
    model = build(SMALL)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return model


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("max_pack_tokens", [1, 12, 1000])
def test_each_prompt_is_completed_as_if_alone(model: Transformer, temperature: float, max_pack_tokens: int) -> None:
    new = complete(
        ModelPredictor(model),
        PROMPTS,
        max_new_tokens=6,
        temperature=temperature,
        seed=5,
        max_pack_tokens=max_pack_tokens,
    )
    alone = [
        generate(model, prompt, max_new_tokens=6, temperature=temperature, seed=5 + index)
        for index, prompt in enumerate(PROMPTS)
    ]
    assert new == alone


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
    with pytest.raises(ValueError, match="temperature -1"):
        complete(ModelPredictor(model), PROMPTS, max_new_tokens=1, temperature=-1.0)
    with pytest.raises(ValueError, match="prompt is empty"):
        complete(ModelPredictor(model), [[1], []], max_new_tokens=1)
