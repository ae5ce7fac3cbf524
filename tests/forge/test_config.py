"""Configurations of a run that cannot do what they say are refused when they are loaded."""

from pathlib import Path

import pytest

from m2forge.errors import ConfigError
from tests.forge.scene import make_config


@pytest.mark.parametrize("parallel", ["data", "fsdp"])
def test_a_trainer_over_several_processes_is_refused(tmp_path: Path, parallel: str) -> None:
    with pytest.raises(ConfigError, match=f'train.machine.parallel: RL trains in one process, received "{parallel}"'):
        make_config(tmp_path, train={"machine": {"parallel": parallel}})
    make_config(tmp_path, train={"machine": {"parallel": "none"}})
