"""Files and folders of trajectories: which files are read, as what, in which order."""

import json
from pathlib import Path

import pytest

from m2forge.errors import NotFoundError
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


def test_a_file_is_read_as_what_its_name_or_the_configuration_says(folder: Path) -> None:
    path = folder / "trial" / "agent" / "trajectory.json"
    assert len(list(read_source(SourceConfig(path=str(path)), Report()))) == 1
    renamed = path.rename(path.with_name("trajectory.dat"))
    assert len(list(read_source(SourceConfig(path=str(renamed), kind="atif"), Report()))) == 1


def test_a_source_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no such file or folder"):
        list_files(SourceConfig(path=str(tmp_path / "nothing")))
    with pytest.raises(NotFoundError, match=r"holds no \.json or \.jsonl or \.ndjson file"):
        list_files(SourceConfig(path=str(tmp_path)))
