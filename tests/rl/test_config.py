"""Configurations of a run that cannot do what they say are refused when they are loaded."""

import tomllib
from pathlib import Path

import pytest

from m2forge.config import build, dump, load_resolved
from m2forge.errors import ConfigError
from m2forge.rl.config import RLConfig
from tests.rl.scene import make_config


def test_shuffled_rewards_are_refused_with_deployed_agents(tmp_path: Path) -> None:
    make_config(tmp_path, pool={"admit_deployed": True})
    with pytest.raises(ConfigError, match=r"reward.shuffled: deployed agents' rewards are taken as they are posted"):
        make_config(tmp_path, pool={"admit_deployed": True}, reward={"shuffled": True})


def test_the_gateway_takes_a_free_port_unless_one_is_given(tmp_path: Path) -> None:
    assert make_config(tmp_path).gateway_port == 0
    assert make_config(tmp_path, gateway={"max_closed": 3}).gateway_port == 0
    assert make_config(tmp_path, gateway={"port": 8501}).gateway_port == 8501


def test_adapters_are_not_broadcast(tmp_path: Path) -> None:
    weights = {"sync": "collective"}
    assert make_config(tmp_path, weights=weights).weights.sync == "collective"
    with pytest.raises(ConfigError, match=r'weights.sync = "collective" works on one machine only'):
        make_config(tmp_path, weights=weights, cluster={"launcher": "ray"})
    with pytest.raises(ConfigError, match=r'weights.sync = "collective": with train.lora versions are small adapters'):
        make_config(tmp_path, weights=weights, train={"lora": {"rank": 2}})


def test_samplers_of_another_engine_are_not_counted(tmp_path: Path) -> None:
    engine = {"server": {"kind": "vllm", "url": "http://127.0.0.1:8000"}}
    assert make_config(tmp_path, engine=engine).cluster.samplers == 1
    with pytest.raises(ConfigError, match=r"cluster.samplers: engine.server names one vllm server"):
        make_config(tmp_path, engine=engine, cluster={"samplers": 2})


@pytest.mark.parametrize(("name", "value"), [("journal", "elsewhere"), ("records_experts", True)])
def test_what_the_run_sets_itself_is_refused(tmp_path: Path, name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"gateway.{name} is set by the run"):
        make_config(tmp_path, gateway={"port": 0, name: value})


FORMER = {"rate": "lr", "check": "eval", "engine.rollout.on_load": "engine.rollout.on_weight_update"}


def test_former_keys_are_refused_with_their_names_now(tmp_path: Path) -> None:
    values = {"rate": "{ start = 1e-3 }", "check": "{ num_tasks = 3 }", "engine.rollout.on_load": "finish"}
    config = make_config(tmp_path)
    for key, name in FORMER.items():
        with pytest.raises(ConfigError, match=rf"{key}: unknown key.* now '{name}'"):
            build(RLConfig, tomllib.loads(dump(config)), [f"{key}={values[key]}"])


def test_a_run_of_former_keys_is_read_under_their_names_now(tmp_path: Path) -> None:
    config = make_config(tmp_path, lr={"start": 1e-3}, eval={"num_tasks": 3})
    text = dump(config)
    for name, key in (("[lr]", "[rate]"), ("[eval]", "[check]"), ("on_weight_update", "on_load")):
        assert name in text
        text = text.replace(name, key)
    (tmp_path / "config.toml").write_text(text, encoding="utf-8")
    assert load_resolved(RLConfig, tmp_path / "config.toml") == config
