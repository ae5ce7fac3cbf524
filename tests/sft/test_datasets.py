"""Folders that Hugging Face's datasets library writes, through the command: trained as the same rows in JSONL are."""

from pathlib import Path

import pytest
import torch

from m2forge import cli
from m2forge.config import TomlValue, build, write_resolved
from m2forge.model.checkpoint import load_model
from m2forge.sft.config import SFTConfig
from m2forge.sft.synthetic import generate
from tests.sft.sample import write_lines
from tests.sft.start import write_start


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same conversations with tool calls as JSONL, saved splits, a hub's folder, and with tools as JSON values."""
    from datasets import Dataset, DatasetDict, Json, List

    root = tmp_path_factory.mktemp("datasets")
    items = list(generate(6, seed=0, split="train"))
    write_lines(root / "lines" / "a.jsonl", items)
    train, test = Dataset.from_list(items), Dataset.from_list(items[:2])
    DatasetDict(train=train, test=test).save_to_disk(root / "saved", num_shards={"train": 2, "test": 1})
    (root / "hub" / "data").mkdir(parents=True)
    for index in range(2):
        train.shard(2, index).to_parquet(root / "hub" / "data" / f"train-{index:05d}-of-00002.parquet")
    test.to_parquet(root / "hub" / "data" / "test-00000-of-00001.parquet")
    features = train.features.copy()
    features["tools"] = List(Json())
    Dataset.from_list(items, features=features).save_to_disk(root / "json")
    write_start(root / "model")
    return root


def weights(folder: Path, tmp_path: Path, name: str, source: dict[str, TomlValue]) -> dict[str, torch.Tensor]:
    data: dict[str, TomlValue] = {
        "name": name,
        "model": str(folder / "model"),
        "pack_tokens": 512,
        "lr": {"start": 1e-2},
        "data": {"context": 512, "strict": True, "sources": [source | {"path": str(folder / name)}]},
        "train": {"checkpoint": {"keep": 0}, "machine": {"device": "cpu", "num_threads": 1}},
    }
    write_resolved(build(SFTConfig, data), tmp_path / "sft.toml")
    assert cli.main(["sft", str(tmp_path / "sft.toml"), "--runs", str(tmp_path)]) == 0
    return load_model(tmp_path / name / "model").state_dict()


def test_datasets_folders_train_what_their_rows_in_jsonl_train(folder: Path, tmp_path: Path) -> None:
    expected = weights(folder, tmp_path, "lines", {})
    for name, source in (("saved", {"split": "train"}), ("hub", {"split": "train"}), ("json", {})):
        found = weights(folder, tmp_path, name, dict(source))
        assert [key for key in expected if not torch.equal(found[key], expected[key])] == [], name


def test_a_folder_of_splits_without_a_choice_ends_with_one_error(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_resolved(
        build(
            SFTConfig,
            {
                "name": "x",
                "model": str(folder / "model"),
                "pack_tokens": 512,
                "lr": {"start": 1e-2},
                "data": {"context": 512, "sources": [{"path": str(folder / "saved")}]},
            },
        ),
        tmp_path / "sft.toml",
    )
    assert cli.main(["sft", str(tmp_path / "sft.toml"), "--runs", str(tmp_path)]) == 2
    shown = "".join(capsys.readouterr().err.split())
    assert "hasthesplitstrain,test;setsplittotheonetoread" in shown
