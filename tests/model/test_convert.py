"""Import and export by the command line: whole folders, or exit code 2 and nothing."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from m2forge import cli
from m2forge.errors import ConfigError
from m2forge.model.build import build
from m2forge.model.checkpoint import load_model, save_model
from m2forge.model.config import WindowConfig
from m2forge.model.convert import import_model
from tests.model.draw import SMALL

COMPANIONS = {
    "tokenizer.json": "{}",
    "tokenizer_config.json": '{"a": 1}',
    "chat_template.jinja": "{{ messages }}",
    "generation_config.json": "{}",
    "merges.txt": "a b",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder of ours, with multi-token prediction, a tokenizer, and files that are not the model's."""
    folder = tmp_path / "ours"
    save_model(build(SMALL), folder)
    for name, text in {**COMPANIONS, "README.md": "x", "optimizer.pt": "x"}.items():
        (folder / name).write_text(text)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": [2, 5]}))
    return folder


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_export_gives_other_programs_what_they_know(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dest = tmp_path / "public"
    assert cli.main(["export", str(folder), str(dest), "--max-shard-gb", "0.002"]) == 0
    out = capsys.readouterr().out
    assert f"wrote {dest}: minimax_m2, 4 layers" in out
    assert "from_pretrained" in out
    shards = {path.name for path in dest.glob("*.safetensors")}
    assert len(shards) > 1
    assert names(dest) == {*COMPANIONS, "config.json", "model.safetensors.index.json", *shards}
    assert all((dest / name).read_text() == text for name, text in COMPANIONS.items())
    config = json.loads((dest / "config.json").read_text())
    assert "m2forge" not in config
    assert config["eos_token_id"] == [2, 5]
    loading: Any = AutoModelForCausalLM.from_pretrained(dest, output_loading_info=True)
    peer, report = loading
    assert not report["unexpected_keys"]
    assert not report["missing_keys"]
    tokens = torch.arange(20)[None]
    model = load_model(folder)
    with torch.no_grad():
        logits = model.logits(model(tokens).hidden_ND)
        # float32 rounding over four layers of width 128.
        torch.testing.assert_close(logits, peer(tokens, use_cache=False).logits[0], atol=1e-5, rtol=1e-5)


def test_import_keeps_weights_companions_and_token_ids(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dest = tmp_path / "imported"
    assert cli.main(["import", str(folder), str(dest), "--dtype", "bfloat16"]) == 0
    assert f"next: m2forge params {dest}" in capsys.readouterr().out
    assert names(dest) == {*COMPANIONS, "config.json", "model.safetensors"}
    assert json.loads((dest / "config.json").read_text())["eos_token_id"] == [2, 5]
    loaded, original = load_model(dest), load_model(folder)
    assert loaded.config == SMALL
    for name, tensor in loaded.state_dict().items():
        assert tensor.dtype == (torch.float32 if name.endswith("router.bias") else torch.bfloat16)
        assert torch.equal(tensor, original.state_dict()[name].to(tensor.dtype)), name


def test_what_transformers_saves_is_imported(tmp_path: Path) -> None:
    save_model(build(SMALL), tmp_path / "a", public_only=True)
    AutoModelForCausalLM.from_pretrained(tmp_path / "a").save_pretrained(tmp_path / "b")
    import_model(tmp_path / "b", tmp_path / "c")
    one, other = load_model(tmp_path / "a"), load_model(tmp_path / "c")
    assert one.config == other.config
    assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in one.state_dict().items())


def damaged(folder: Path, how: str) -> None:
    weights = folder / "model.safetensors"
    if how == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
        return
    tensors = load_file(weights)
    tensors["model.norm.weight"] = torch.ones(3)
    del tensors["lm_head.weight"]
    save_file(tensors, weights)


@pytest.mark.parametrize("command", ["import", "export"])
@pytest.mark.parametrize("how", ["truncated", "misshapen"])
def test_bad_weights_exit_with_2_and_write_nothing(
    folder: Path, tmp_path: Path, command: str, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged(folder, how)
    assert cli.main([command, str(folder), str(tmp_path / "new" / "dest")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("m2forge: error:") == 1
    assert ("not a complete safetensors file" if how == "truncated" else "2 tensors do not fit") in captured.err
    assert names(tmp_path) == {"ours"}


def test_bad_paths_exit_with_2_and_write_nothing(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "occupied").mkdir()
    (tmp_path / "occupied" / "note").write_text("mine")
    for source, dest, message in (
        ("absent", "dest", "is not a folder"),
        ("ours", "occupied", "not empty"),
        ("ours", "ours", "not empty"),
    ):
        assert cli.main(["import", str(tmp_path / source), str(tmp_path / dest)]) == 2
        assert message in capsys.readouterr().err
    assert names(tmp_path) == {"ours", "occupied"}
    assert names(tmp_path / "occupied") == {"note"}


def test_a_network_that_cannot_be_expressed_is_not_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    attention = SMALL.attention.model_copy(update={"window": WindowConfig(size=8, layers=(0,))})
    save_model(build(SMALL.model_copy(update={"attention": attention})), tmp_path / "ours")
    assert cli.main(["export", str(tmp_path / "ours"), str(tmp_path / "dest")]) == 2
    assert "cannot express attention.window" in capsys.readouterr().err
    assert names(tmp_path) == {"ours"}


def test_an_unknown_dtype_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'bfloat16'"):
        import_model(folder, tmp_path / "dest", dtype="bfloat")
    assert names(tmp_path) == {"ours"}
