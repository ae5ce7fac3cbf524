"""`m2forge pipeline` with all kinds of tasks, from one git history to verified task folders."""

import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from m2forge.cli import main
from m2forge.sandbox.channel import program
from m2forge.sandbox.namespace import run_folder
from m2forge.tasks.folders.folder import CONFIG_NAME, TaskFolder, read_folders
from tests.pipelines.swe import projects
from tests.pipelines.swe.test_pipeline import host_python
from tests.sandbox.places import require

TWICE = (
    "\n\ndef mean(numbers):\n    result = 0\n    for number in numbers:\n        result += number\n"
    "    return result / len(numbers)\n"
    "\n\ndef double(numbers):\n    result = 0\n    for number in numbers:\n        result += number\n"
    "    return 2 * result\n"
)
SHARED = (
    "\n\ndef mean(numbers):\n    return add(numbers) / len(numbers)\n"
    "\n\ndef double(numbers):\n    return 2 * add(numbers)\n"
    "\n\ndef add(numbers):\n    return sum(numbers)\n"
)
TEST_TWICE = (
    "import sums\n\n\ndef test_mean():\n    assert sums.mean([1, 2, 6]) == 3\n"
    "\n\ndef test_double():\n    assert sums.double([1, 2]) == 6\n"
)
HISTORY = (
    ("Begin", {**projects.OLD, "sums.py": projects.SOURCE + TWICE, "tests/test_twice.py": TEST_TWICE}),
    ("Let total count the first number too, as its name says", {**projects.NEW, "sums.py": projects.FIXED + TWICE}),
    ("Refactor mean and double, which repeat a loop", {"sums.py": projects.FIXED + SHARED}),
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


def run(tmp_path: Path, *settings: str) -> Path:
    """Run the pipeline on the history; returns the directory of the run."""
    projects.write_history(tmp_path / "clone", *HISTORY)
    projects.write_wheels(["pytest"], "{}.{}".format(*host_python()))
    lines = [*settings, "[[swe.repositories]]", f'path = "{tmp_path}/clone"', 'package = "sums"']
    config = tmp_path / "run.toml"
    config.write_text("\n".join(['name = "r"', "workers = 1", "[swe]", *lines]) + "\n")
    assert main(["pipeline", str(config), "--runs", str(tmp_path / "runs")]) == 0
    return tmp_path / "runs" / "r"


def folders(run_dir: Path) -> dict[str, list[TaskFolder]]:
    """Task folders by their kind."""
    found: dict[str, list[TaskFolder]] = {}
    read, rejected = read_folders(run_dir / "tasks")
    assert rejected == []
    for folder in read:
        own = tomllib.loads((folder.path / CONFIG_NAME).read_text())["metadata"]["m2forge"]
        assert own["package"] == "sums"
        found.setdefault(own["kind"], []).append(folder)
    return found


@pytest.mark.slow
def test_commits_become_tasks_of_their_kinds(tmp_path: Path) -> None:
    run_dir = run(tmp_path, 'routes = ["bug", "refactor"]')
    found = folders(run_dir)
    assert {kind: len(some) for kind, some in found.items()} == {"bug": 1, "refactor": 1}
    instruction = found["refactor"][0].instruction()
    assert "`sums.py` has a `add`, which `mean` calls, and `mean` is shorter than it is now." in instruction
    assert "sum(numbers)" not in instruction
