"""`m2forge pipeline` with the pipeline `swe`, from a git history to a verified task folder."""

import json
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from m2forge.cli import main
from m2forge.sandbox.channel import program
from m2forge.sandbox.namespace import run_folder
from m2forge.tasks.folders.folder import read_folders
from m2forge.tasks.folders.swe_bench import folder_record
from tests.pipelines.endpoint import Endpoint, completion, serving
from tests.pipelines.kills import check_kills
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


# Tests need a variable that no rule knows.
CONFTEST = 'import os\n\nMODE = os.environ["SUMS_MODE"]\n'
CONFIG = """name = "r"
workers = 1
[models.m]
url = "{url}"
model = "m"
[swe]
writer = "m"
judge = "m"
[swe.build_model]
model = "m"
[[swe.repositories]]
path = "{folder}/clone"
package = "sums"
"""


@dataclass(frozen=True)
class Whole:
    """A run, its configuration and the endpoint that it asked."""

    config: Path
    run_dir: Path
    endpoint: Endpoint


def respond(body: dict[str, Any], number: int) -> tuple[int, bytes]:
    """A function of the request alone."""
    text = body["messages"][0]["content"]
    if text.startswith("You repair"):
        return completion(json.dumps({"action": "set", "variable": "SUMS_MODE", "value": "plain"}))
    if text.startswith("You write"):
        # A line of the patch: the statement by rule stays.
        return completion(json.dumps({"statement": "Let total count all numbers: return sum(numbers) does it."}))
    return completion(json.dumps({"consistent": True, "solvable": True, "why": "Both are named."}))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Whole]:
    require("namespace")
    program()
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch, serving(respond) as endpoint:
        # Wheels without a network, and images that are not the user's.
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        run_folder.cache_clear()
        (message, files), *later = HISTORY
        projects.write_history(folder / "clone", (message, {**files, "tests/conftest.py": CONFTEST}), *later)
        projects.write_wheels(["pytest"], "{}.{}".format(*host_python()))
        (folder / "run.toml").write_text(CONFIG.format(folder=folder, url=endpoint.url))
        assert main(["pipeline", str(folder / "run.toml"), "--runs", str(folder / "runs")]) == 0
        yield Whole(folder / "run.toml", folder / "runs" / "r", endpoint)
    run_folder.cache_clear()


@pytest.mark.slow
def test_a_commit_becomes_a_verified_task_folder(whole: Whole) -> None:
    stages = _yields(whole.run_dir)
    assert stages["candidate"]["rejected"] == {"no parent": 1, "source unchanged": 1}
    assert stages["write"]["num_passed"] == 1
    (folder,), rejected = read_folders(whole.run_dir / "tasks")
    assert rejected == []
    record = folder_record(folder)
    assert record["FAIL_TO_PASS"] == ["tests/test_last.py::test_last", "tests/test_sums.py::test_total_of_all_numbers"]
    assert record["PASS_TO_PASS"] == ["tests/test_sums.py::test_first"]
    assert "Let total count the first number too" in folder.instruction()
    assert "- `last`" in folder.instruction()
    assert "#12" not in folder.instruction()
    visible = (folder.path / "environment" / "testbed" / "tests" / "test_sums.py").read_text()
    assert "test_total" not in visible
    assert 'ENV SUMS_MODE="plain"\n' in (folder.path / "environment" / "Dockerfile").read_text()
    assert [stages[name]["num_asked"] for name in ("repair-1", "repair-2", "rewrite", "judge")] == [1, 0, 1, 1]


@pytest.mark.long
def test_a_killed_run_resumes_to_the_same_folders(whole: Whole, tmp_path: Path) -> None:
    check_kills(whole.config, whole.run_dir, whole.endpoint, tmp_path, seed=3)


def host_python() -> tuple[int, int]:
    """The version that the image `host` has."""
    program = "import sys; print(*sys.version_info[:2])"
    major, minor = subprocess.run(["/usr/bin/python3", "-c", program], capture_output=True, text=True).stdout.split()
    return int(major), int(minor)


def _yields(run_dir: Path) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in json.loads((run_dir / "yields.json").read_text())["stages"]}
