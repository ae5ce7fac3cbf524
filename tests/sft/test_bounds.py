"""Archives of trajectories that unpack to too much are reported, and what came before stands."""

import gzip
import json
from pathlib import Path

import pyarrow
import pytest

from m2forge.sft.config import SourceConfig
from m2forge.sft.dataset import read_source
from m2forge.sft.report import Problem, Report
from tests.bounds import within

GOOD = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
LINE = json.dumps(GOOD).encode() + b"\n"


def pack(path: Path, data: bytes) -> None:
    packed = gzip.compress(data, 1) if path.suffix == ".gz" else pyarrow.compress(data, codec="zstd", asbytes=True)
    path.write_bytes(packed)


def read(path: Path, **unpack: float) -> tuple[int, Report]:
    report = Report()
    source = SourceConfig.model_validate({"path": str(path), "unpack": unpack})
    return len(list(read_source(source, report))), report


@pytest.mark.parametrize("kind", ["gz", "zst"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_an_archive_that_unpacks_to_too_much_stops_at_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: str
) -> None:
    monkeypatch.setattr("m2forge.unpack.MIN_BYTES", 1 << 20)
    path = tmp_path / f"{name}.{kind}"
    pack(path, LINE + b" " * (200 << 20))
    with within(megabytes=64):
        num_read, report = read(path, max_ratio=10.0)
    assert num_read == (1 if name == "a.jsonl" else 0)
    (problem,) = report.problems
    assert problem is Problem.TOO_LARGE
    assert "raise unpack.max_ratio" in str(report.problems[problem])


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_a_line_that_is_too_long_is_skipped_and_the_next_is_read(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"a.jsonl.{kind}"
    pack(path, LINE + b"x" * (40 << 20) + b"\n" + LINE)
    with within(megabytes=16):
        num_read, report = read(path, max_ratio=1e6, max_line_bytes=1 << 20)
    assert num_read == 2
    assert list(report.problems) == [Problem.TOO_LARGE]
