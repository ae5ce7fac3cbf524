"""The cost of a step follows documents and targets, not the context that is allowed."""

import pytest

from m2forge.model.count import count
from m2forge.train.loop import TokenCost
from tests.train.draw import draw_pack, small_model


@pytest.mark.parametrize("length", [1, 7, 64])
def test_documents_of_one_length_cost_what_the_count_says(length: int) -> None:
    config = small_model(max_context=64).config
    expected = 3 * length * count(config, (length,)).costs[0].training_flops
    packs = [draw_pack(seed, lengths, share_trained=1.0) for seed, lengths in enumerate(([length], [length, length]))]
    assert TokenCost(config, 64).training_flops(packs) == pytest.approx(expected, rel=1e-12)


def test_the_same_tokens_cost_less_in_shorter_documents() -> None:
    cost = TokenCost(small_model(max_context=64).config, 64)
    whole, halves = (cost.training_flops([draw_pack(0, lengths)]) for lengths in ([64], [32, 32]))
    assert halves < whole


def test_without_targets_the_head_costs_nothing() -> None:
    config = small_model(max_context=64).config
    cost = TokenCost(config, 64)
    some, none = (cost.training_flops([draw_pack(0, [64], share_trained=share)]) for share in (1.0, 0.0))
    # A product with the head, once forward and twice backward, by the main model and two modules.
    assert some - none == 64 * 3 * (2 * config.vocab_size * config.hidden_size) * 3


def test_a_context_of_one_token_has_a_cost() -> None:
    assert TokenCost(small_model().config, 1).training_flops([draw_pack(0, [1, 1])]) > 0
