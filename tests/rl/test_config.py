"""Configurations of a run that cannot do what they say are refused when they are loaded."""

import tomllib
from pathlib import Path

import pytest

from m2forge.config import build, dump, load_resolved
from m2forge.errors import ConfigError
from m2forge.rl.config import RLConfig
from m2forge.train.run_dir import open_run
from tests.rl.scene import make_config


def test_shuffled_rewards_are_refused_with_deployed_agents(tmp_path: Path) -> None:
    make_config(tmp_path, pool={"admit_deployed": True})
    with pytest.raises(ConfigError, match=r"reward.shuffled: deployed agents' rewards are taken as they are posted"):
        make_config(tmp_path, pool={"admit_deployed": True}, reward={"shuffled": True})


def test_the_gateway_takes_a_free_port_unless_one_is_given(tmp_path: Path) -> None:
    assert make_config(tmp_path).gateway_port == 0
    assert make_config(tmp_path, gateway={"max_closed": 3}).gateway_port == 0
    assert make_config(tmp_path, gateway={"port": 8501}).gateway_port == 8501


def test_versions_may_be_broadcast(tmp_path: Path) -> None:
    weights = {"sync": "collective"}
    assert make_config(tmp_path, weights=weights).weights.sync == "collective"
    assert make_config(tmp_path, weights=weights, cluster={"launcher": "ray"}).cluster.launcher == "ray"
    assert make_config(tmp_path, weights=weights, train={"lora": {"rank": 2}}).train.lora is not None


def test_samplers_of_another_engine_are_not_counted(tmp_path: Path) -> None:
    engine = {"server": {"kind": "vllm", "url": "http://127.0.0.1:8000"}}
    assert make_config(tmp_path, engine=engine).cluster.samplers == 1
    with pytest.raises(
        ConfigError, match=r"engine.server.url names 1 vllm servers, received 2; set 1, or list as many"
    ):
        make_config(tmp_path, engine=engine, cluster={"samplers": 2})


def test_processes_outlive_the_loop_only_with_hosts(tmp_path: Path) -> None:
    make_config(tmp_path, cluster={"agent_hosts": 1, "outlive_s": 60.0})
    config = make_config(tmp_path, cluster={"outlive_s": 600.0})
    assert build(RLConfig, tomllib.loads(dump(config))) == config
    with pytest.raises(ConfigError, match=r"outlive_s \(60\): .*; set agent_hosts to 1 or more, or leave it out"):
        make_config(tmp_path, cluster={"outlive_s": 60.0})


def test_adapters_are_not_trained_by_muon(tmp_path: Path) -> None:
    make_config(tmp_path, train={"optimizer": {"kind": "muon"}})
    with pytest.raises(ConfigError, match=r'adapters are trained by AdamW; set optimizer.kind = "adamw"'):
        make_config(tmp_path, train={"optimizer": {"kind": "muon"}, "lora": {"rank": 2}})


def test_each_of_several_servers_is_a_sampler(tmp_path: Path) -> None:
    def engine(*urls: str) -> dict[str, object]:
        return {"server": {"kind": "sglang", "url": [*urls]}}

    config = make_config(tmp_path, engine=engine("http://a:1", "https://b:1"), cluster={"samplers": 2})
    assert config.engine.server is not None
    assert config.engine.server.urls == ("http://a:1", "https://b:1")
    assert make_config(tmp_path, engine=engine("http://a:1")).cluster.samplers == 1
    with pytest.raises(ConfigError, match=r"engine.server.url names 2 sglang servers, received 1; set 2"):
        make_config(tmp_path, engine=engine("http://a:1", "http://b:1"))
    with pytest.raises(ConfigError, match=r"each of several sglang servers has a URL of its own"):
        make_config(tmp_path, engine=engine("http://a:1", "http://a:1/"), cluster={"samplers": 2})
    for urls in ((), ("http://a:1", "b:1")):
        with pytest.raises(ConfigError, match=r"url: expected http://HOST:PORT, or a list of such URLs, received"):
            make_config(tmp_path, engine=engine(*urls), cluster={"samplers": 2})
    changed = make_config(tmp_path, engine=engine("http://c:1"))
    open_run(tmp_path / "run", config, 0)
    open_run(tmp_path / "run", changed, 0)


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
