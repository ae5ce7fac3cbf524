"""Configurations of a run that cannot do what they say are refused when they are loaded."""

from pathlib import Path

import pytest

from m2forge.errors import ConfigError
from tests.rl.scene import make_config


@pytest.mark.parametrize("parallel", ["data", "fsdp"])
def test_a_trainer_over_several_processes_is_refused(tmp_path: Path, parallel: str) -> None:
    with pytest.raises(ConfigError, match=f'train.machine.parallel: RL trains in one process, received "{parallel}"'):
        make_config(tmp_path, train={"machine": {"parallel": parallel}})
    make_config(tmp_path, train={"machine": {"parallel": "none"}})


def test_shuffled_rewards_are_refused_where_deployed_agents_are_admitted(tmp_path: Path) -> None:
    make_config(tmp_path, pool={"admit_deployed": True})
    with pytest.raises(ConfigError, match=r"reward.shuffled: deployed agents' rewards are taken as they are posted"):
        make_config(tmp_path, pool={"admit_deployed": True}, reward={"shuffled": True})


def test_the_gateway_takes_a_free_port_unless_one_is_given(tmp_path: Path) -> None:
    assert make_config(tmp_path).gateway_port == 0
    assert make_config(tmp_path, gateway={"max_closed": 3}).gateway_port == 0
    assert make_config(tmp_path, gateway={"port": 8501}).gateway_port == 8501


@pytest.mark.parametrize(("name", "value"), [("journal", "elsewhere"), ("records_experts", True)])
def test_what_the_run_sets_itself_is_refused(tmp_path: Path, name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"gateway.{name} is set by the run"):
        make_config(tmp_path, gateway={"port": 0, name: value})
