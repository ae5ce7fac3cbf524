"""Names to configurations."""

from pathlib import Path

import pytest

from m2forge import cli
from m2forge.config import dump
from m2forge.errors import CheckpointError, ConfigError, NotFoundError
from m2forge.model.build import build
from m2forge.model.checkpoint import save_model
from m2forge.model.preset import PRESETS, resolve_config

TINY = PRESETS["m2-tiny"]


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_found_by_name(name: str) -> None:
    assert resolve_config(name) == PRESETS[name]


def test_a_toml_file_and_a_folder_are_found_by_path(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(dump(TINY))
    save_model(build(TINY), tmp_path / "tiny")
    assert resolve_config(str(tmp_path / "tiny.toml")) == TINY
    assert resolve_config(str(tmp_path / "tiny")) == TINY
    sparser = resolve_config(str(tmp_path / "tiny"), overrides=["moe.top_k=1"])
    assert sparser.moe is not None
    assert sparser.moe.top_k == 1


def test_overrides_come_before_the_cut() -> None:
    config = resolve_config("m2-tiny", layers=2, overrides=["moe.dense_layers=[0, 3]", "intermediate_size=64"])
    assert config.num_layers == 2
    assert config.moe is not None
    assert config.moe.dense_layers == (0,)


@pytest.mark.parametrize("layers", [0, -1, 5])
def test_a_cut_must_leave_layers_that_exist(layers: int) -> None:
    with pytest.raises(ConfigError, match=f"layers {layers}: m2-tiny has 4"):
        resolve_config("m2-tiny", layers=layers)


def test_bad_names_and_keys_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="did you mean 'm2-mini'"):
        resolve_config("m2-mni")
    with pytest.raises(ConfigError, match=r"--set moe\.topk: moe\.topk: unknown key.*did you mean 'top_k'"):
        resolve_config("m2-tiny", overrides=["moe.topk=1"])
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        resolve_config(str(tmp_path))


@pytest.mark.parametrize("argv", [["m2-mni"], ["m2", "--set", "layer=3"], ["m2", "--layers", "0"]])
def test_the_command_line_exits_with_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["params", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("m2forge: error: ")
    assert len(captured.err.splitlines()) == 1
