"""`m2forge pipeline` with the pipeline `swe`, from a git history to a verified task folder."""

import json
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from m2forge.cli import main
from m2forge.sandbox.channel import program
from m2forge.sandbox.namespace import run_folder
from m2forge.tasks.folders.folder import read_folders
from m2forge.tasks.folders.swe_bench import folder_record
from tests.pipelines.swe import projects
from tests.sandbox.places import require

LAST = "\n\ndef last(numbers):\n    return numbers[-1]\n"
TEST_LAST = "from sums import last\n\n\ndef test_last():\n    assert last([4, 5]) == 5\n"


def in_src(files: Mapping[str, str]) -> dict[str, str]:
    return {"src/sums.py" if path == "sums.py" else path: text for path, text in files.items()}


HISTORY = (
    ("Begin", in_src(projects.OLD)),
    ("Say more", {"README.md": "Sums of numbers.\n"}),
    (
        "Let total count the first number too, as its name says\n\nSee #12.",
        # Before it, one test file cannot be imported: the others must run all the same.
        in_src(projects.NEW) | {"src/sums.py": projects.FIXED + LAST, "tests/test_last.py": TEST_LAST},
    ),
)


@pytest.fixture(autouse=True)
def _caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Wheels without a network, and images that are not the user's."""
    require("namespace")
    program()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run_folder.cache_clear()
    yield
    run_folder.cache_clear()


@pytest.mark.slow
def test_a_commit_becomes_a_verified_task_folder(tmp_path: Path) -> None:
    projects.write_history(tmp_path / "clone", *HISTORY)
    projects.write_wheels(["pytest"], "{}.{}".format(*host_python()))
    config = tmp_path / "run.toml"
    config.write_text(f'name = "r"\nworkers = 1\n[[swe.repositories]]\npath = "{tmp_path}/clone"\npackage = "sums"\n')
    assert main(["pipeline", str(config), "--runs", str(tmp_path / "runs")]) == 0
    stages = _yields(tmp_path / "runs" / "r")
    assert stages["candidate"]["rejected"] == {"no parent": 1, "source unchanged": 1}
    assert stages["write"]["num_passed"] == 1
    (folder,), rejected = read_folders(tmp_path / "runs" / "r" / "tasks")
    assert rejected == []
    record = folder_record(folder)
    assert record["FAIL_TO_PASS"] == ["tests/test_last.py::test_last", "tests/test_sums.py::test_total_of_all_numbers"]
    assert record["PASS_TO_PASS"] == ["tests/test_sums.py::test_first"]
    assert "Let total count the first number too" in folder.instruction()
    assert "- `last`" in folder.instruction()
    assert "#12" not in folder.instruction()
    visible = (folder.path / "environment" / "testbed" / "tests" / "test_sums.py").read_text()
    assert "test_total" not in visible


def host_python() -> tuple[int, int]:
    """The version that the image `host` has."""
    program = "import sys; print(*sys.version_info[:2])"
    major, minor = subprocess.run(["/usr/bin/python3", "-c", program], capture_output=True, text=True).stdout.split()
    return int(major), int(minor)


def _yields(run_dir: Path) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in json.loads((run_dir / "yields.json").read_text())["stages"]}
