"""Files and folders of trajectories: which files are read, as what, in which order."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from m2forge.errors import ConfigError, DataError, NotFoundError
from m2forge.sft.config import SourceConfig, SourceKind
from m2forge.sft.dataset import list_files, read_source
from m2forge.sft.report import Note, Report
from tests.sft.sample import GOOD, write_lines

ATIF = {
    "schema_version": "ATIF-v1.8",
    "agent": {"name": "harness", "version": "1"},
    "steps": [
        {"step_id": 1, "source": "user", "message": "go"},
        {"step_id": 2, "source": "agent", "message": "done"},
    ],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_lines(tmp_path / "b.jsonl", [GOOD, GOOD])
    write_lines(tmp_path / "trial" / "agent" / "trajectory.json", [json.dumps(ATIF)])
    write_lines(tmp_path / "trial" / "result.json", ['{"reward": 1}'])
    write_lines(tmp_path / ".hidden" / "c.jsonl", [GOOD])
    write_lines(tmp_path / "README.md", ["not data"])
    return tmp_path


@pytest.mark.parametrize(
    ("kind", "sources"),
    [
        ("auto", ["b.jsonl:1", "b.jsonl:2", "trial/agent/trajectory.json"]),
        ("jsonl", ["b.jsonl:1", "b.jsonl:2"]),
        ("atif", ["trial/agent/trajectory.json"]),
    ],
)
def test_a_folder_gives_its_files_in_order(folder: Path, kind: SourceKind, sources: list[str]) -> None:
    report = Report()
    found = [trajectory.source for trajectory in read_source(SourceConfig(path=str(folder), kind=kind), report)]
    assert found == [f"{folder}/{source}" for source in sources]
    assert not report.problems
    assert report.count(Note.NOT_ATIF) == (kind != "jsonl")


def test_a_file_is_read_as_its_name_or_the_configuration_says(folder: Path) -> None:
    path = folder / "trial" / "agent" / "trajectory.json"
    assert len(list(read_source(SourceConfig(path=str(path)), Report()))) == 1
    renamed = path.rename(path.with_name("trajectory.dat"))
    assert len(list(read_source(SourceConfig(path=str(renamed), kind="atif"), Report()))) == 1


def test_a_source_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no such file or folder"):
        list_files(SourceConfig(path=str(tmp_path / "nothing")))
    with pytest.raises(NotFoundError, match=r"holds no \.arrow or \.json or \.jsonl or \.ndjson or \.parquet file"):
        list_files(SourceConfig(path=str(tmp_path)))


def names(path: Path, kind: SourceKind = "auto", split: str | None = None) -> list[str]:
    source = SourceConfig(path=str(path), kind=kind, split=split)
    return [str(file.relative_to(path)) for file in list_files(source)]


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    """A folder as on the hub, whose file names say their splits."""
    (tmp_path / "data").mkdir()
    for name in ("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001", "test_sft-00000-of-00001"):
        pq.write_table(pa.Table.from_pylist([GOOD]), tmp_path / "data" / f"{name}.parquet")
    return tmp_path


def test_a_split_is_selected_by_file_name(hub: Path) -> None:
    assert names(hub, split="train") == ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"]
    assert names(hub, split="test_sft") == ["data/test_sft-00000-of-00001.parquet"]
    with pytest.raises(ConfigError, match="has the splits test, test_sft, train; set split to the one to read"):
        names(hub)
    with pytest.raises(NotFoundError, match="has no split 'validation'; it has test, test_sft, train"):
        names(hub, split="validation")
    with pytest.raises(ConfigError, match="split 'train' selects among the files of a folder; leave it out"):
        list_files(SourceConfig(path=str(hub / "data" / "test-00000-of-00001.parquet"), split="train"))


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("train.jsonl", "train"),
        ("my-dev.jsonl.gz", "validation"),
        ("validation/part.parquet", "validation"),
        ("train/eval_set.parquet", "test"),
        ("cache-train-00000-of-00004.arrow", "train"),
        ("contest.jsonl", None),
    ],
)
def test_words_in_file_and_folder_names_say_the_split(tmp_path: Path, name: str, split: str | None) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"")
    (tmp_path / "contest.parquet").write_bytes(b"")
    for word in ("train", "validation", "test"):
        if word == split:
            assert names(tmp_path, split=word) == [name]
        else:
            with pytest.raises(NotFoundError, match=f"has no split '{word}'"):
                names(tmp_path, split=word)


def test_a_folder_of_jsonl_is_read_whole_unless_a_split_is_set(tmp_path: Path) -> None:
    for name in ("train.jsonl", "test.jsonl"):
        write_lines(tmp_path / name, [GOOD])
    assert names(tmp_path) == ["test.jsonl", "train.jsonl"]
    assert names(tmp_path, split="train") == ["train.jsonl"]


def save(folder: Path, split: str | None, num_files: int) -> None:
    """A dataset as `Dataset.save_to_disk` lays it out."""
    folder.mkdir(parents=True)
    files = [f"data-{index:05d}-of-{num_files:05d}.arrow" for index in range(num_files)]
    table = pa.Table.from_pylist([GOOD])
    for name in files:
        with pa.OSFile(str(folder / name), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": f} for f in files], "_split": split}))
    (folder / "dataset_info.json").write_text("{}")


def test_a_saved_dataset_is_read_from_the_files_that_it_lists(tmp_path: Path) -> None:
    save(tmp_path / "one", "train", 2)
    (tmp_path / "one" / "left-over.arrow").write_bytes(b"")
    listed = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    assert names(tmp_path / "one") == names(tmp_path / "one", "arrow", "train") == listed
    report = Report()
    assert len(list(read_source(SourceConfig(path=str(tmp_path / "one")), report))) == 2
    assert not report.problems
    assert not report.notes
    with pytest.raises(NotFoundError, match="the dataset's split is 'train', not 'test'"):
        names(tmp_path / "one", split="test")
    (tmp_path / "one" / listed[1]).unlink()
    with pytest.raises(NotFoundError, match=r"data-00001-of-00002\.arrow is missing, which state\.json lists"):
        names(tmp_path / "one")


def test_a_saved_dictionary_of_datasets_needs_a_split(tmp_path: Path) -> None:
    for split in ("train", "test"):
        save(tmp_path / split, split, 1)
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert names(tmp_path, split="test") == ["test/data-00000-of-00001.arrow"]
    with pytest.raises(ConfigError, match="has the splits train, test; set split"):
        names(tmp_path)
    with pytest.raises(NotFoundError, match="has no split 'dev'; it has train, test"):
        names(tmp_path, split="dev")


@pytest.mark.parametrize(
    "state",
    [
        "{",
        "[]",
        "{}",
        '{"_data_files": [{"filename": "../../secret.arrow"}]}',
        '{"_data_files": [{"filename": "a.arrow"}], "_indices_data_files": [{"filename": "i.arrow"}]}',
    ],
)
def test_a_broken_list_of_files_is_refused(tmp_path: Path, state: str) -> None:
    (tmp_path / "state.json").write_text(state)
    with pytest.raises(DataError, match="save"):
        names(tmp_path)
