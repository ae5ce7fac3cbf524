"""The plain generation loop."""

import pytest
import torch

from m2forge.model.build import build
from m2forge.model.generate import generate
from m2forge.model.preset import PRESETS
from m2forge.model.transformer import Transformer


@pytest.fixture(scope="module")
def model() -> Transformer:
    model = build(PRESETS["m2-nano"])
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)  # fresh weights give nearly even logits; these give clear choices
    return model


def test_greedy_takes_the_likeliest_token_each_time(model: Transformer) -> None:
    prompt = [3, 1, 4]
    new = generate(model, prompt, max_new_tokens=6)
    assert len(new) == 6
    with torch.no_grad():
        logits = model.logits(model(torch.tensor([prompt + new])).hidden_ND)
    assert logits[2:-1].argmax(-1).tolist() == new
    assert generate(model, torch.tensor(prompt), max_new_tokens=6) == new


def test_a_stop_token_ends_the_text_and_is_part_of_it(model: Transformer) -> None:
    new = generate(model, [3], max_new_tokens=8)
    end = new.index(new[3])
    assert generate(model, [3], max_new_tokens=8, stop_ids=(new[3],)) == new[: end + 1]
    assert generate(model, [3], max_new_tokens=0) == []


def test_a_prompt_that_ends_in_a_stop_token_is_still_continued(model: Transformer) -> None:
    assert len(generate(model, [3, 9], max_new_tokens=1, stop_ids=(9,))) == 1


def test_samples_depend_on_the_seed_alone(model: Transformer) -> None:
    def sample(seed: int) -> list[int]:
        return generate(model, [3], max_new_tokens=12, temperature=1.0, seed=seed)

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)


def test_samples_follow_the_distribution(model: Transformer) -> None:
    with torch.no_grad():
        probability = model.logits(model(torch.tensor([[3]])).hidden_ND)[0].div(0.5).softmax(-1)
    drawn = [generate(model, [3], max_new_tokens=1, temperature=0.5, seed=seed)[0] for seed in range(200)]
    likeliest = int(probability.argmax())
    expected = float(probability[likeliest])
    deviation = (expected * (1 - expected) / 200) ** 0.5
    # Four standard deviations; the seeds are fixed, so the outcome is too.
    assert abs(drawn.count(likeliest) / 200 - expected) < 4 * deviation


@pytest.mark.parametrize(
    ("prompt", "temperature", "message"),
    [
        ([], 0.0, "prompt is empty"),
        ([1, 512, -1], 0.0, r"outside 0\.\.511: \[512, -1\]"),
        ([1], -1.0, "temperature -1"),
    ],
)
def test_bad_input_is_refused(model: Transformer, prompt: list[int], temperature: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(model, prompt, max_new_tokens=1, temperature=temperature)
