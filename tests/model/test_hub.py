"""Models by hub id, fetched from a stand-in for the hub: what is fetched, what is pinned, and what is refused."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from m2forge import LLM, cli
from m2forge.config import TomlValue, build, load, write_resolved
from m2forge.errors import ConfigError, M2ForgeError, NotFoundError
from m2forge.evaluate.config import EvalConfig
from m2forge.evaluate.run import run_eval
from m2forge.model.checkpoint import load_model, save_model
from m2forge.model.hub import find_folder, find_model, pinned
from m2forge.model.preset import resolve_config
from m2forge.pretrain.config import PretrainConfig
from m2forge.sft.config import SFTConfig
from m2forge.sft.stage import run_sft
from m2forge.sft.synthetic import write_jsonl
from tests.inference.folder import write_model
from tests.model.stand_in_hub import ID, StandInHub, hub_at, serving
from tests.pretrain.small import make_config as make_pretrain
from tests.pretrain.small import write_corpus

ROOT = Path(__file__).parent.parent.parent
CLOSED = "http://127.0.0.1:9"
"""No process listens there."""
WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; from m2forge import cli; sys.exit(cli.main())"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two models of one shape, with files beside them that are not part of a model."""
    root = tmp_path_factory.mktemp("models")
    models = write_model(root / "first", seed=1), write_model(root / "second", seed=2)
    for folder in models:
        (folder / "README.md").write_text("about", encoding="utf-8")
        (folder / "consolidated.safetensors").write_bytes(b"the same for another program")
        (folder / "onnx").mkdir()
        (folder / "onnx" / "config.json").write_text("{}", encoding="utf-8")
    return models


@pytest.fixture
def hub(folders: tuple[Path, Path], tmp_path: Path) -> Iterator[StandInHub]:
    """Serves the first model; nothing of it is in the cache."""
    stand_in = StandInHub()
    stand_in.publish(folders[0])
    with serving(stand_in) as url, hub_at(url, tmp_path / "home"):
        yield stand_in


def own_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


# -- what is fetched ---------------------------------------------------------------------------------------------------


def test_a_hub_model_is_fetched_once_without_foreign_files(hub: StandInHub, folders: tuple[Path, Path]) -> None:
    folder = find_model(ID)
    expected = own_files(folders[0])
    del expected["README.md"], expected["consolidated.safetensors"]
    assert own_files(folder) == expected
    assert sorted(hub.fetched) == sorted(expected)
    assert find_model(ID) == folder
    assert sorted(hub.fetched) == sorted(expected)


def test_only_the_files_that_are_needed_are_fetched(hub: StandInHub) -> None:
    find_folder(ID, parts="config")
    assert hub.fetched == ["config.json"]
    find_folder(ID, parts="tokenizer")
    assert "tokenizer.json" in hub.fetched
    assert not any(name.endswith(".safetensors") for name in hub.fetched)


def test_the_index_names_the_weights_that_are_fetched(
    hub: StandInHub, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    save_model(load_model(folders[0]), tmp_path / "split", max_shard_bytes=100_000)
    (tmp_path / "split" / "model-extra.safetensors").write_bytes(b"none of it")
    hub.publish(tmp_path / "split")
    shards = {path.name for path in (tmp_path / "split").glob("model-0*.safetensors")}
    assert len(shards) > 1
    fetched = {path.name for path in find_model(ID).glob("*.safetensors")}
    assert fetched == shards


def test_an_interrupted_fetch_is_completed(hub: StandInHub, folders: tuple[Path, Path]) -> None:
    (find_model(ID) / "model.safetensors").unlink()
    hub.fetched.clear()
    assert (find_model(ID) / "model.safetensors").read_bytes() == (folders[0] / "model.safetensors").read_bytes()
    assert len(hub.fetched) <= 1


def test_a_path_that_exists_wins(hub: StandInHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ID).mkdir(parents=True)
    assert find_model(ID) == Path(ID)
    evaluation = {"model": "m2-nano", "output": "out", "suites": [{"task": "needle", "lengths": [64]}]}
    preset = build(EvalConfig, evaluation | {"revision": "main"})  # type: ignore[arg-type]  # checked there
    for name, use in (
        (ID, lambda: find_model(ID, "main")),
        ("m2-nano", lambda: LLM("m2-nano", revision="main")),
        ("m2-nano", lambda: resolve_config("m2-nano", revision="main")),
        ("m2-nano", lambda: run_eval(preset)),
    ):
        with pytest.raises(ConfigError, match=f"revision 'main': {name} is not a hub model"):
            use()
    assert hub.num_requests == 0


# -- what is pinned ----------------------------------------------------------------------------------------------------


def make_sft(folder: Path, **fields: object) -> SFTConfig:
    write_jsonl(folder / "a.jsonl", 4, 0, "train")
    data: dict[str, object] = {
        "name": "run",
        "model": ID,
        "pack_tokens": 900,
        "lr": {"start": 1e-3},
        "data": {"context": 900, "sources": [{"path": str(folder / "a.jsonl")}]},
        "train": {"machine": {"device": "cpu", "num_threads": 1}},
    }
    return build(SFTConfig, data | fields, origin="test")  # type: ignore[arg-type]  # checked there


def test_a_run_stays_at_its_commit_when_the_hub_moves_on(
    hub: StandInHub, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    first = hub.main
    write_resolved(make_sft(tmp_path), tmp_path / "sft.toml")
    words = [str(tmp_path / "sft.toml"), "--runs", str(tmp_path / "runs")]
    assert cli.main(["sft", *words]) == 0
    resolved = load(SFTConfig, tmp_path / "runs" / "run" / "config.toml")
    assert (resolved.model, resolved.revision) == (ID, first)
    second = hub.publish(folders[1])
    hub.fetched.clear()
    assert cli.main(["sft", *words]) == 0
    assert hub.fetched == []
    assert load(SFTConfig, tmp_path / "runs" / "run" / "config.toml") == resolved
    # Another run begins with the newer one, and naming a revision of a started run differs from its commit.
    assert pinned(make_sft(tmp_path)).revision == second
    with pytest.raises(ConfigError, match=f"revision = '{first}', now it is '{second}'"):
        run_sft(make_sft(tmp_path, revision="main"), tmp_path / "runs")


def test_a_pinned_model_in_the_cache_needs_no_network(hub: StandInHub, tmp_path: Path) -> None:
    commit, folder = hub.main, find_model(ID)
    hub.num_requests = 0
    with hub_at(CLOSED, tmp_path / "home"):
        assert find_model(ID, commit) == folder
        # Without a commit the last one known is used.
        assert find_model(ID) == folder
    assert hub.num_requests == 0


def test_a_dry_run_prints_the_commit_and_fetches_the_config(
    hub: StandInHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_resolved(make_sft(tmp_path), tmp_path / "sft.toml")
    evaluation = {"model": ID, "output": str(tmp_path / "eval"), "suites": [{"task": "needle", "lengths": [64]}]}
    write_resolved(build(EvalConfig, evaluation), tmp_path / "eval.toml")  # type: ignore[arg-type]  # checked there
    rl = [str(ROOT / "configs/rl/demo.toml"), "--set", f"model={ID}"]
    for words in (["sft", str(tmp_path / "sft.toml")], ["eval", str(tmp_path / "eval.toml")], ["rl", *rl]):
        assert cli.main([*words, "--dry-run"]) == 0
        out = capsys.readouterr().out
        assert tomllib.loads(out)["revision"] == hub.main
        assert f"{ID}: " in out.partition("# what would run")[2]
    for command in ("serve", "gateway"):
        assert cli.main([command, ID, "--dry-run"]) == 0
        assert f"{ID}: " in capsys.readouterr().out
    assert hub.fetched == ["config.json"]


# -- the doors ---------------------------------------------------------------------------------------------------------


def test_the_environment_names_the_hub_and_params_needs_no_torch(folders: tuple[Path, Path], tmp_path: Path) -> None:
    stand_in = StandInHub()
    stand_in.publish(folders[0])
    with serving(stand_in) as url:
        env = os.environ | {"PYTHONPATH": str(ROOT), "HF_ENDPOINT": url, "HF_HOME": str(tmp_path)}
        command = [sys.executable, "-c", WITHOUT_TORCH, "params", ID, "--revision", stand_in.main, "--json"]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["family"] == "minimax_m2"
    assert stand_in.fetched == ["config.json"]


def test_an_llm_of_a_hub_id_samples_as_one_of_its_folder(hub: StandInHub, folders: tuple[Path, Path]) -> None:
    first = hub.main
    hub.publish(folders[1])
    texts = []
    for model, revision in ((str(folders[0]), None), (ID, first), (str(folders[1]), None), (ID, None)):
        with LLM(model, revision=revision, device="cpu", num_blocks=64) as llm:
            texts.append(llm.generate("def", temperature=0, max_tokens=8).token_ids)
            if (model, revision) == (ID, first):
                llm.load(ID)
                moved = llm.generate("def", temperature=0, max_tokens=8).token_ids
    assert texts[0] == texts[1] != texts[2] == texts[3] == moved


def test_import_and_export_take_a_hub_id(
    hub: StandInHub, folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("import", "export"):
        assert cli.main([command, ID, str(tmp_path / command), "--revision", hub.main]) == 0
        assert (tmp_path / command / "tokenizer.json").is_file()
        assert f"wrote {tmp_path / command}" in capsys.readouterr().out
    assert own_files(tmp_path / "import")["model.safetensors"] == own_files(folders[0])["model.safetensors"]


def test_eval_takes_a_hub_id_and_writes_its_commit(hub: StandInHub, tmp_path: Path) -> None:
    suites = [{"task": "needle", "lengths": [64], "depths": [0.5], "num_samples": 1}]
    evaluation = {"model": ID, "output": str(tmp_path / "out"), "suites": suites, "device": "cpu"}
    write_resolved(build(EvalConfig, evaluation), tmp_path / "eval.toml")  # type: ignore[arg-type]  # checked there
    assert cli.main(["eval", str(tmp_path / "eval.toml")]) == 0
    assert load(EvalConfig, tmp_path / "out" / "eval.toml").revision == hub.main


def test_pretrain_goes_on_from_the_weights_of_a_hub_id(
    hub: StandInHub, folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    phase: dict[str, TomlValue] = {"name": "only", "pack_tokens": 64, "context": 32, "lr": {"start": 0.0}, "steps": 1}
    shutil.copytree(folders[0], tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    hub.publish(tmp_path / "bare")  # the corpus has bytes as tokens, and no tokenizer to compare
    config = make_pretrain(write_corpus(tmp_path / "corpus"), model=ID, model_set=[], phases=[phase])
    write_resolved(config, tmp_path / "pretrain.toml")
    words = ["pretrain", str(tmp_path / "pretrain.toml"), "--runs", str(tmp_path / "runs")]
    assert cli.main([*words, "--dry-run"]) == 0
    assert f"{ID} (its weights)" in capsys.readouterr().out
    assert hub.fetched == ["config.json"]
    assert cli.main(words) == 0
    assert load(PretrainConfig, tmp_path / "runs" / "small" / "config.toml").revision == hub.main
    trained = load_model(tmp_path / "runs" / "small" / "model").embedding.weight
    # At a learning rate of 0 they are the hub's, in the precision of training.
    assert torch.equal(trained, load_model(folders[0], dtype=trained.dtype).embedding.weight)


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "revision", "expected"),
    [
        ("own/absent", None, r"'own/absent': no such folder here, and the hub http://127.* has no model of this name"),
        ("own/a--b", None, r"'own/a--b': .* has no such names"),
        (ID, "v9", rf"'{ID}' \(revision 'v9'\): .* does not have this revision"),
        ("a/b/c", None, "'a/b/c' is not a folder that exists, nor a hub id; give a folder .* or OWNER/NAME"),
        ("nowhere", None, "'nowhere' is not a folder that exists, nor a hub id"),
    ],
)
def test_a_model_that_cannot_be_found_is_one_message(
    hub: StandInHub, model: str, revision: str | None, expected: str
) -> None:
    with pytest.raises(NotFoundError, match=expected) as raised:
        find_model(model, revision)
    assert "\n" not in str(raised.value)


def test_a_hub_that_fails_is_one_message(hub: StandInHub) -> None:
    hub.status = 403
    with pytest.raises(M2ForgeError, match=r"answered .*403 Forbidden.*; try again later; or give a folder"):
        find_model(ID)


def test_a_model_without_safetensors_is_one_message(
    hub: StandInHub, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    shutil.copytree(folders[0], tmp_path / "other")
    (tmp_path / "other" / "model.safetensors").rename(tmp_path / "other" / "pytorch_model.bin")
    hub.publish(tmp_path / "other")
    with pytest.raises(M2ForgeError, match=f"'{ID}' of the hub holds neither model.safetensors nor"):
        find_model(ID)


def test_without_the_library_one_message_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(NotFoundError, match="hub ids need huggingface_hub, which is not installed; run: pip install"):
        find_model(ID)


def test_without_a_network_one_message_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_resolved(make_sft(tmp_path), tmp_path / "sft.toml")
    with hub_at(CLOSED, tmp_path / "home"):
        for words in (["params", ID], ["import", ID, str(tmp_path / "dest")], ["sft", str(tmp_path / "sft.toml")]):
            assert cli.main([*words, *(["--runs", str(tmp_path / "runs")] if words[0] == "sft" else [])]) == 2
            (line,) = capsys.readouterr().err.splitlines()
            assert line.startswith(f"m2forge: error: model '{ID}': no such folder here, and the hub {CLOSED} cannot be")
            assert "connect to the network" in line
    assert not (tmp_path / "runs").exists()
    assert not (tmp_path / "dest").exists()
