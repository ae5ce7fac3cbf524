"""`m2forge STAGE --help` prints the whole schema, as wide as the terminal, without torch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from m2forge.command_config import config_kinds
from m2forge.config_class import Config
from m2forge.config_help import render_schema
from m2forge.config_schema import read_schema
from m2forge.pretrain.config import PretrainConfig

ROOT = Path(__file__).parent.parent
WITHOUT_TORCH = (
    "import sys; sys.modules['torch'] = None; from m2forge import cli; sys.argv[0] = 'm2forge'; sys.exit(cli.main())"
)


def run_help(command: str, columns: int) -> str:
    environment = os.environ | {"COLUMNS": str(columns)}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, command, "--help"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("command", ["pretrain", "rl", "gateway"])
def test_help_holds_the_schema_without_torch_and_styles(command: str) -> None:
    out = run_help(command, 100)
    assert out.startswith(f"usage: m2forge {command}")
    assert "\x1b" not in out
    for option, kind in config_kinds(command).items():
        assert f"{option} TABLE.KEY=VALUE" in " ".join(out.split())
        require_schema(out, kind)


def require_schema(out: str, kind: type[Config]) -> None:
    words = " ".join(out.split())
    for table in read_schema(kind):
        assert table.header in out
        for key in table.keys:
            assert (f"\n{key.name} = {key.default}" if key.default else f"\n{key.name}") in out
            assert key.type in words
            assert key.doc in words


@pytest.mark.parametrize("command", ["corpus", "sft", "eval", "pipeline", "serve", "chat", "tasks"])
def test_the_schema_of_other_commands_is_whole(command: str) -> None:
    kinds = config_kinds(command)
    assert kinds
    for option, kind in kinds.items():
        require_schema("\n" + render_schema(kind, option, Console(width=100)), kind)


def test_lines_are_as_long_as_the_terminal_is_wide() -> None:
    for columns in (60, 100):
        lines = run_help("sft", columns).partition("config keys")[2].splitlines()
        assert columns - 12 < max(map(len, lines)) <= columns


def test_a_terminal_gets_styles() -> None:
    text = render_schema(PretrainConfig, "--set", Console(force_terminal=True, color_system="standard", width=80))
    assert "\x1b[1;36m[train.optimizer]" in text
