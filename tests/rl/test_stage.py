"""`train_rl`: what it takes as a config, and how overrides reach it."""

from pathlib import Path
from typing import Any

import pytest

from m2forge import train_rl
from m2forge.config import Setting, build, write_resolved
from m2forge.errors import ConfigError, NotFoundError
from m2forge.rl import loop as stage
from m2forge.rl.config import RLConfig
from tests.rl.scene import make_config

OVERRIDES: dict[str, Setting] = {
    "group_size": 4,
    "policy": {"pack_tokens": 4096},
    "curriculum.seed": 7,
    "agent": {"command": ["a", 'b "c" = 1']},
    "pool": {"window": {"queue": 64}},
}


@pytest.mark.parametrize("form", ["file", "mapping", "config"])
def test_a_config_in_any_form_takes_overrides(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(tmp_path, num_steps=2)
    found: list[tuple[RLConfig, Path]] = []
    monkeypatch.setattr(stage, "run_rl", lambda config, runs: found.append((config, runs)))
    write_resolved(config, tmp_path / "rl.toml")
    forms: dict[str, Any] = {"file": tmp_path / "rl.toml", "mapping": config.model_dump(mode="json", exclude_none=True)}
    train_rl(forms.get(form, config), runs=tmp_path / "runs", **OVERRIDES)
    ((resolved, runs),) = found
    assert runs == tmp_path / "runs"
    expected = build(
        RLConfig,
        config.model_dump(mode="json", exclude_none=True),
        [
            "group_size=4",
            "policy.pack_tokens=4096",
            "curriculum.seed=7",
            "agent.command=['a', 'b \"c\" = 1']",
            "pool.window.queue=64",
        ],
    )
    assert resolved == expected
    assert resolved.agent.model_dump()["command"] == ("a", 'b "c" = 1')


def test_a_config_that_cannot_be_used_is_one_message(tmp_path: Path) -> None:
    config = make_config(tmp_path / "none", num_steps=2)
    with pytest.raises(ConfigError, match="group_siz: unknown key, value 3; did you mean 'group_size'"):
        train_rl(config, group_siz=3)
    with pytest.raises(ConfigError, match="cannot be read"):
        train_rl(tmp_path / "none.toml")
    with pytest.raises(NotFoundError, match="none' is not a folder"):
        train_rl(config, runs=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()
