"""Presets of public agents: merged below the user's keys, and shipped with the package."""

import json
import sys
import tomllib
from pathlib import Path

import pytest

from m2forge.agents.config import CommandConfig, VersionConfig
from m2forge.agents.preset import preset_names
from m2forge.agents.program import require_version
from m2forge.config import dump, load_resolved, write_resolved
from m2forge.errors import ConfigError
from m2forge.rl.config import CommandAgentConfig, RLConfig
from tests.rl.scene import make_config

NAMES = ["claude-code", "codex", "mini-swe-agent", "opencode", "openhands", "qwen-code"]


def load_preset(folder: Path, name: str, **keys: object) -> CommandAgentConfig:
    agent = make_config(folder, agent={"preset": name} | keys).agent
    assert isinstance(agent, CommandAgentConfig)
    return agent


def test_the_presets_are_those_that_the_key_names() -> None:
    assert preset_names() == NAMES
    doc = Path(sys.modules[CommandConfig.__module__].__file__ or "").read_text()
    assert all(name in doc for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_pins_its_version_and_names_the_gateway(tmp_path: Path, name: str) -> None:
    agent = load_preset(tmp_path, name)
    assert agent.version is not None
    assert agent.version.command[0] == agent.command[0]
    texts = [*agent.command, *agent.env.values(), *agent.files.values()]
    assert any("{instruction}" in text for text in texts)
    for path, text in agent.files.items():
        if path.endswith(".json"):
            json.loads(text)
        elif path.endswith(".toml"):
            tomllib.loads(text)


def test_keys_of_the_user_stand_over_the_presets(tmp_path: Path) -> None:
    below = load_preset(tmp_path, "claude-code")
    above = load_preset(tmp_path, "claude-code", timeout_s=5.0, env={"MORE": "1", "IS_SANDBOX": "0"}, max_concurrent=9)
    assert (above.timeout_s, above.max_concurrent, above.command) == (5.0, 9, below.command)
    assert above.env == {**below.env, "MORE": "1", "IS_SANDBOX": "0"}
    with pytest.raises(ConfigError, match=r"no preset 'claude'; did you mean 'claude-code'\?"):
        make_config(tmp_path, agent={"preset": "claude"})


def test_a_stored_config_holds_the_merged_keys_alone(tmp_path: Path) -> None:
    config = make_config(tmp_path, agent={"preset": "codex"})
    assert "preset" not in tomllib.loads(dump(config))["agent"]
    write_resolved(config, tmp_path / "config.toml")
    assert load_resolved(RLConfig, tmp_path / "config.toml").agent.model_dump() == config.agent.model_dump()


def test_another_version_of_the_program_is_refused(tmp_path: Path) -> None:
    program = tmp_path / "agent"
    program.write_text("#!/bin/sh\necho agent 1.2.3\n")
    program.chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    require_version(VersionConfig(command=("agent", "--version"), text="1.2.3"), env, ())
    with pytest.raises(ConfigError, match=r"expected '1\.2\.4' from `agent --version`, received 'agent 1\.2\.3'"):
        require_version(VersionConfig(command=("agent", "--version"), text="1.2.4"), env, ())
