"""Weights add up as promised: every token alike, or every episode alike."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2forge.errors import RecordError
from m2forge.reward.advantage import WEIGHTINGS, episode_mean, token_mean

SAMPLES = st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 6)), max_size=30)
CLOSE = 1e-12
"""Relative: a few dozen sums and products in float64."""


def columns(samples: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
    return [tokens for tokens, _ in samples], [episode for _, episode in samples]


def test_the_numbers_of_the_docstring() -> None:
    tokens, episodes = [10, 30, 60], [0, 0, 1]
    assert token_mean(tokens, episodes).tolist() == [1 / 100] * 3
    assert episode_mean(tokens, episodes).tolist() == [1 / 80, 1 / 80, 1 / 120]


@pytest.mark.parametrize("name", sorted(WEIGHTINGS))
@given(samples=SAMPLES)
def test_the_weights_of_all_tokens_add_up_to_one(name: str, samples: list[tuple[int, int]]) -> None:
    tokens, episodes = columns(samples)
    weights = {"token_mean": token_mean, "episode_mean": episode_mean}[name](tokens, episodes)
    assert weights.shape == (len(samples),)
    assert np.isfinite(weights).all()
    assert (weights > 0).all()
    assert weights @ np.array(tokens, float) == pytest.approx(1.0 if sum(tokens) else 0.0, rel=CLOSE)


@given(SAMPLES)
def test_token_mean_is_the_mean_over_tokens(samples: list[tuple[int, int]]) -> None:
    tokens, episodes = columns(samples)
    terms = [float(n % 7) - 3.0 for n in range(sum(tokens))]
    owners = np.repeat(np.arange(len(tokens)), tokens)
    loss = float((token_mean(tokens, episodes)[owners] * terms).sum())
    assert loss == pytest.approx(sum(terms) / max(1, len(terms)), abs=1e-11)


@given(SAMPLES)
def test_episode_mean_gives_every_episode_with_tokens_the_same(samples: list[tuple[int, int]]) -> None:
    tokens, episodes = columns(samples)
    shares = np.bincount(episodes, episode_mean(tokens, episodes) * tokens, minlength=7)
    counted = {episode for count, episode in samples if count}
    for episode in range(7):
        assert shares[episode] == pytest.approx(1 / len(counted) if episode in counted else 0.0, rel=CLOSE)


@given(st.lists(st.integers(0, 50), min_size=2, max_size=8), st.integers(1, 60))
def test_an_episode_weighs_the_same_however_it_is_split(parts: list[int], other: int) -> None:
    whole = episode_mean([sum(parts), other], [0, 1])
    split = episode_mean([*parts, other], [0] * len(parts) + [1])
    assert split[-1] == whole[-1]
    assert split[0] == whole[0]


def test_what_cannot_be_is_refused_by_name() -> None:
    with pytest.raises(RecordError, match="one per sample, 2, received 1"):
        token_mean([1, 2], [0])
    with pytest.raises(RecordError, match="num_tokens: expected 0 or more, received -1"):
        token_mean([-1], [0])
    with pytest.raises(RecordError, match="episodes: expected 0 or more, received -3"):
        episode_mean([1], [-3])
