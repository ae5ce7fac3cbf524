"""The configuration: what it refuses, and that it travels as TOML."""

import tomllib

import pytest

from m2forge.config import build, dump
from m2forge.errors import ConfigError
from m2forge.reward.config import RewardConfig


def test_a_configuration_written_as_toml_is_read_back_equal() -> None:
    config = build(
        RewardConfig,
        {
            "alpha": 0.5,
            "rules": {"unknown_tool": -2, "mixing": {"allowed_share": 0.1}},
            "speed": {"shape": "exponential"},
            "advantage": {"baseline": "trajectory_mean", "weighting": "episode_mean", "normalisation": "batch_std"},
        },
    )
    assert build(RewardConfig, tomllib.loads(dump(config))) == config
    assert config.rules.unknown_tool == -2.0


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("alpha=-1", "alpha"),
        ("advantage.gamma=1.5", "gamma"),
        ("rules.malformed_call=1", "malformed_call"),
        ("rules.structured_step=-1", "structured_step"),
        ("rules.mixing.full_share=0.01", "full_share"),
        ("speed.shape=cubic", "shape"),
        ("speed.half_ratio=0", "half_ratio"),
        ("advantage.baseline=none", "baseline"),
        ("advantage.min_std=0", "min_std"),
        ("gama=1", "gama"),
    ],
)
def test_what_makes_no_sense_is_refused(override: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build(RewardConfig, {}, [override])
