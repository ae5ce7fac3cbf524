"""`m2forge pipeline` with all kinds of tasks, from one git history to verified task folders."""

import asyncio
import json
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from m2forge.cli import main
from m2forge.sandbox.channel import program
from m2forge.sandbox.config import SandboxConfig
from m2forge.sandbox.namespace import run_folder
from m2forge.tasks.folders.folder import CONFIG_NAME, TaskFolder, read_folders
from m2forge.tasks.folders.trial import run_trials
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
CLAMP = "\n\ndef clamp(number, low, high):\n    if number < low:\n        return low\n    return min(number, high)\n"
TEST_LIMITS = (
    "import sums\n\n\ndef test_limits():\n    assert sums.clamp(1, 3, 5) == 3\n    assert sums.clamp(9, 3, 5) == 5\n"
    "    assert sums.clamp(4, 3, 5) == 4\n"
)
HISTORY = (
    ("Begin", {**projects.OLD, "sums.py": projects.SOURCE + CLAMP + TWICE, "tests/test_twice.py": TEST_TWICE}),
    (
        "Let total count the first number too, as its name says",
        {**projects.NEW, "sums.py": projects.FIXED + CLAMP + TWICE},
    ),
    ("Refactor mean and double, which repeat a loop", {"sums.py": projects.FIXED + CLAMP + SHARED}),
    ("Test clamp at its limits", {"tests/test_limits.py": TEST_LIMITS}),
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


@pytest.mark.long
def test_one_history_becomes_tasks_of_all_kinds(tmp_path: Path) -> None:
    run_dir = run(tmp_path, 'transforms = ["test", "review"]')
    found = folders(run_dir)
    assert {kind: len(some) for kind, some in found.items()} == {"bug": 1, "refactor": 1, "review": 1, "test": 2}
    check_refactoring(found["refactor"][0])
    fix, alone = sorted(found["test"], key=lambda folder: "clamp" in folder.instruction())
    check_tests_of_a_fix(fix)
    check_tests_alone(alone)
    check_review(found["review"][0])
    check_written_tests(fix)


def check_refactoring(folder: TaskFolder) -> None:
    assert "`sums.py` has a `add`, which `mean` calls, and `mean` is shorter than it is now." in folder.instruction()
    assert "sum(numbers)" not in folder.instruction()


def check_tests_of_a_fix(folder: TaskFolder) -> None:
    assert "Let total count the first number too" in folder.instruction()
    assert "at least one must fail" in folder.instruction()
    assert "sum(numbers)" not in folder.instruction()
    assert hidden_in(folder, "sum(numbers)") == ["tests/instance.json"]
    instance = json.loads((folder.path / "tests" / "instance.json").read_text())
    assert instance["num_needed"] >= 1
    assert [len(instance[key]) for key in ("right", "wrong")] == [3, 1]


def check_review(folder: TaskFolder) -> None:
    diff = (folder.path / "environment" / "testbed" / "change.diff").read_text()
    assert diff.startswith("--- a/sums.py\n+++ b/sums.py\n")
    assert "Let total count" not in folder.instruction() + diff
    fault = json.loads((folder.path / "tests" / "fault.json").read_text())
    answer = json.loads((folder.path / "solution" / "review.json").read_text())
    assert answer["fault"] is (fault is not None)
    assert hidden_in(folder, "test_total_of_all_numbers") == []


def check_tests_alone(folder: TaskFolder) -> None:
    assert "- `clamp`" in folder.instruction()
    assert "at least one must fail" not in folder.instruction()
    assert hidden_in(folder, "sums.clamp(9, 3, 5)") == ["solution/patch.diff"]


def hidden_in(folder: TaskFolder, text: str) -> list[str]:
    """Files of a task folder that contain a text."""
    files = (path for path in folder.path.rglob("*") if path.is_file())
    return sorted(str(path.relative_to(folder.path)) for path in files if text.encode() in path.read_bytes())


GOOD = "import sums\n\n\ndef test_total():\n    assert sums.total([5, 7]) == 12\n    assert sums.total([5]) == 5\n"
CHEATS = {
    "passes everywhere": {"tests/test_more.py": "import sums\n\n\ndef test_it():\n    assert sums.first([4]) == 4\n"},
    "fails everywhere": {"tests/test_more.py": GOOD.replace("== 12", "== 13")},
    "reads the fix as text": {
        "tests/test_more.py": "def test_it():\n    assert 'return sum(numbers)\\n' in open('sums.py').read()\n"
    },
    "knows the base as text": {
        "tests/test_more.py": "def test_it():\n    assert 'numbers[1:]' not in open('sums.py').read()\n"
    },
    "forges outcomes in conftest.py": {
        "tests/test_more.py": "def test_it():\n    assert True\n",
        "tests/conftest.py": "def pytest_runtest_call(item):\n    assert 'numbers[1:]' not in open('sums.py').read()\n",
    },
    "takes the first tree for right": {
        "tests/test_more.py": (
            "import pathlib\n\n\ndef test_it():\n    text = pathlib.Path('sums.py').read_text()\n"
            "    if 'numbers[1:]' in text:\n        assert False\n    if '[numbers][0]' in text:\n        return\n"
            "    seen = pathlib.Path('/var/tmp/seen')\n    seen.exists() or seen.write_text(text)\n"
            "    assert seen.read_text() == text\n"
        )
    },
    "changes source at run time": {
        "tests/test_more.py": GOOD.replace("import sums\n", "import sums\nopen('sums.py', 'a').write('#')\n")
    },
    "writes the reward": {
        "tests/test_more.py": (
            "import os\n\n\ndef test_it():\n    os.makedirs('/logs/verifier', exist_ok=True)\n"
            "    open('/logs/verifier/reward.json', 'w').write('1')\n"
        )
    },
    "leaves a process that writes the reward": {
        "tests/test_more.py": (
            "import subprocess\n\n\ndef test_it():\n    subprocess.Popen(['sh', '-c', 'while :; do '\n"
            "        'echo 1 > /logs/verifier/reward.txt; sleep 0.1; done'], start_new_session=True)\n"
        )
    },
    "reads what is hidden": {
        "tests/test_more.py": (
            "import glob, json, os\n\n\ndef test_it():\n    hidden = ''\n"
            "    for path in [*glob.glob('/tests/*'), *glob.glob('/proc/*/mem'), *glob.glob('/proc/*/environ')]:\n"
            "        try:\n            hidden += open(path, errors='replace').read()\n"
            "        except OSError:\n            pass\n    assert 'sum(numbers)' in hidden\n"
        )
    },
}


def check_written_tests(folder: TaskFolder) -> None:
    """Tests of an attempt have the reward that they earn, by this project's own verification."""
    honest = {"tests/test_more.py": GOOD}
    # Changes of source are undone: with the agent's fix in it, no test would fail where one must.
    fixed = {**honest, "sums.py": projects.FIXED + CLAMP + TWICE}
    attempts = {"honest": honest, "with the fix": fixed, **CHEATS}
    agents = {name: "; ".join(map(write, files, files.values())) for name, files in attempts.items()}
    trials, rejected = asyncio.run(
        run_trials([folder.path], list(agents.values()), SandboxConfig(backend="namespace"), base_image="host")
    )
    assert rejected == []
    perfs = {
        name: None if trial.verdict is None else trial.verdict.perf for name, trial in zip(agents, trials, strict=True)
    }
    assert perfs == {name: float(name in ("honest", "with the fix")) for name in agents}


def write(path: str, text: str) -> str:
    return f"printf %s {shlex.quote(text)} > {path}"
