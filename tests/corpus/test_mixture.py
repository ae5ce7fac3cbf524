"""Shares that follow the wish, the floor and the limit on repetition."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2forge.corpus.config import MixtureConfig
from m2forge.corpus.mixture import resolve_mixture
from m2forge.errors import ConfigError

counts = st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 10**9), min_size=1)


@given(counts, st.dictionaries(st.sampled_from("abcdef"), st.floats(0.1, 10)), st.floats(0, 0.16), st.floats(1, 8))
def test_shares_keep_between_floor_and_limit(
    num_tokens: dict[str, int], upsample: dict[str, float], floor: float, max_epochs: float
) -> None:
    config = MixtureConfig(upsample=upsample, floor=floor, max_epochs=max_epochs)
    mixture = resolve_mixture(config, num_tokens)
    assert sum(mixture.shares.values()) == pytest.approx(1)
    for domain, share in mixture.shares.items():
        assert mixture.epochs[domain] <= max_epochs * (1 + 1e-9)
        limit = max_epochs * num_tokens[domain] / sum(num_tokens.values())
        assert share >= min(floor, limit) * (1 - 1e-9)


def test_without_a_wish_every_token_counts_once() -> None:
    mixture = resolve_mixture(MixtureConfig(), {"web": 900, "code": 100})
    assert mixture.shares == pytest.approx({"web": 0.9, "code": 0.1})
    assert mixture.epochs == pytest.approx({"web": 1.0, "code": 1.0})


def test_upsampling_and_weights_move_shares() -> None:
    mixture = resolve_mixture(MixtureConfig(upsample={"code": 3.0}), {"web": 900, "code": 100})
    assert mixture.shares == pytest.approx({"web": 0.75, "code": 0.25})
    mixture = resolve_mixture(MixtureConfig(weights={"web": 1.0, "code": 1.0}), {"web": 900, "code": 100})
    assert mixture.epochs["code"] == pytest.approx(4.0)
    mixture = resolve_mixture(MixtureConfig(weights={"code": 1.0}), {"web": 900, "code": 100})
    assert mixture.shares == {"code": 1.0}


def test_wishes_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="exceeds 1"):
        resolve_mixture(MixtureConfig(floor=0.6), {"web": 900, "code": 100})
    with pytest.raises(ConfigError, match="no domain with documents"):
        resolve_mixture(MixtureConfig(weights={"books": 1.0}), {"web": 900})
