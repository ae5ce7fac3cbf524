"""`m2forge pipeline` with the pipeline `swe`, from a git history to a verified task folder."""

import asyncio
import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from m2forge.cli import main
from m2forge.pipelines.swe.source import Clone
from m2forge.sandbox.channel import program
from m2forge.sandbox.config import SandboxConfig
from m2forge.sandbox.namespace import run_folder
from m2forge.tasks.folders.folder import TaskFolder, read_folders
from m2forge.tasks.folders.swe_bench import folder_record
from m2forge.tasks.folders.trial import run_trials
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


@pytest.mark.slow
def test_a_pull_request_of_github_becomes_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = (("Begin", projects.OLD), ("Merge pull request #2 from ada/total", projects.NEW))
    (folder,) = folders_of(states, tmp_path, monkeypatch, is_github=True)
    assert "Resolve this issue:\n\ntotal is too small" in folder.instruction()
    assert folder_record(folder)["FAIL_TO_PASS"] == ["tests/test_sums.py::test_total_of_all_numbers"]
    assert _yields(tmp_path / "runs" / "r")["source"]["rejected"] == {"not merged": 1}


def folders_of(
    states: Sequence[tuple[str, Mapping[str, str]]],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_github: bool = False,
) -> list[TaskFolder]:
    """Run the pipeline without a model on a history, or on GitHub's record of its last commit."""
    require("namespace")
    program()
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    run_folder.cache_clear()
    projects.write_history(folder / "clone", *states)
    projects.write_wheels(["pytest"], "{}.{}".format(*host_python()))
    lines = ['name = "r"', "workers = 1", "[[swe.repositories]]", f'path = "{folder}/clone"', 'package = "sums"']
    if is_github:
        (commit, *_) = Clone(folder / "clone", "sums").commits(1)
        merged = {
            "number": 2,
            "title": "Fix total",
            "body": "Fixes #1",
            "merged_at": "2026",
            "merge_commit_sha": commit,
        }
        (folder / "pulls.json").write_text(json.dumps([merged, {**merged, "number": 3, "merged_at": None}]))
        (folder / "issues.json").write_text(json.dumps([{"number": 1, "title": "total is too small", "body": ""}]))
        lines += [f'pull_requests = "{folder}/pulls.json"', f'issues = "{folder}/issues.json"']
    (folder / "run.toml").write_text("\n".join(lines) + "\n")
    assert main(["pipeline", str(folder / "run.toml"), "--runs", str(folder / "runs")]) == 0
    run_folder.cache_clear()
    found, rejected = read_folders(folder / "runs" / "r" / "tasks")
    assert rejected == []
    return found


QUADRATIC = (
    "\n\ndef uniques(numbers):\n    found = []\n    for number in numbers:\n        if number not in found:\n"
    "            found.append(number)\n    return found\n"
)
LINEAR = "\n\ndef uniques(numbers):\n    return list(dict.fromkeys(numbers))\n"
TEST_UNIQUES = (
    "from sums import uniques\n\n\ndef test_uniques():\n    assert uniques([3, 1, 3]) == [3, 1]\n"
    "    assert len(uniques(list(range(6000)))) == 6000\n"
)


@pytest.mark.long
def test_a_quadratic_loop_becomes_a_task_of_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = {**projects.OLD, "sums.py": projects.SOURCE + QUADRATIC, "tests/test_uniques.py": TEST_UNIQUES}
    more = {
        "sums.py": projects.SOURCE + LINEAR,
        "tests/test_uniques.py": TEST_UNIQUES + "    assert uniques([]) == []\n",
    }
    states = (("Begin", begin), ("uniques takes quadratic time; make it faster", more))
    # The pipeline has run the solution, which has perf 1, and nothing, which has perf 0.
    (folder,) = folders_of(states, tmp_path, monkeypatch)
    assert "at most 80% of the CPU time" in folder.instruction()
    assert folder_record(folder)["FAIL_TO_PASS"] == []
    cheats = {
        "emptied test": "printf 'def test_uniques():\\n    pass\\n' > tests/test_uniques.py",
        "exit where nothing is reported": "printf 'import os, sys\\n%s' "
        "'any(\"junit\" in one for one in sys.argv) or os._exit(0)' | cat - sums.py > new.py; mv new.py sums.py",
        "plugin": "printf 'def pytest_runtest_call(item):\\n    item.obj = lambda: None\\n' > conftest.py",
        "tests that always pass": "printf '%s\\n' 'import _pytest.python as p' "
        "'p.Function.runtest = lambda self: None' | cat - sums.py > new.py; mv new.py sums.py",
    }
    trials, _ = asyncio.run(
        run_trials([folder.path], list(cheats.values()), SandboxConfig(backend="namespace"), base_image="host")
    )
    perfs = [None if trial.verdict is None else trial.verdict.perf for trial in trials]
    assert dict(zip(cheats, perfs, strict=True)) == dict.fromkeys(cheats, 0)


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
