"""Harbor itself runs our task folders in our sandboxes, with our verdicts; its models take our trajectories.

`make test-harbor` installs Harbor into an environment of its own and names its Python in M2FORGE_HARBOR.
"""

import asyncio
import json
import os
import subprocess
from itertools import islice
from pathlib import Path

import pytest

from examples.table_tasks import questions, write_folders
from m2forge import cli
from m2forge.pipelines.terminal.task_folder import instructions, task_files
from m2forge.sandbox.config import SandboxConfig
from m2forge.sandbox.image import ImageStore
from m2forge.tasks.config import VerifyConfig
from m2forge.tasks.folders.export import export
from m2forge.tasks.folders.folder import find_folders, write_folder
from m2forge.tasks.folders.trial import NOP, ORACLE, run_trials
from tests.page.scene import Scene, make_chat_format
from tests.pipelines.terminal.test_solver import TASK
from tests.tasks.folders import machine_image

PYTHON = os.environ.get("M2FORGE_HARBOR", "")
ROOT = Path(__file__).parent.parent.parent
FAMILIES = ("counters", "stack", "chain", "words", "raises")
NUM_TASKS = 3
ENVIRONMENT = "m2forge.tasks.folders.harbor_environment:SandboxEnvironment"
BASES = ("python:3.12-slim", "python:3.12-bookworm")

pytestmark = [
    pytest.mark.harbor,
    pytest.mark.skipif(not PYTHON, reason="make test-harbor installs Harbor, for Python 3.12 or later"),
]


@pytest.fixture(scope="module")
def images(own_images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache folder with images for the bases that the folders name."""
    store = ImageStore()
    store.build(BASES[0], [str(machine_image.build(tmp_path_factory.mktemp("machine") / "root"))])
    for name in BASES[1:]:
        store.build(name, [BASES[0]])
    return own_images


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """15 exported folders, and links to the five written by hand."""
    root = tmp_path_factory.mktemp("folders")
    for family in FAMILIES:
        config = VerifyConfig(num_workers=1)
        asyncio.run(export(family, root / f"exported-{family}", config, NUM_TASKS, None, 0))
    for path in (ROOT / "examples" / "folders").iterdir():
        subprocess.run(["cp", "-R", str(path), str(root / path.name)], check=True)
    return root


def harbor_rewards(folders: Path, agent: str, cache: Path, jobs: Path) -> dict[str, float | None]:
    """The reward of each task by its name; None if a trial failed."""
    names = sorted({path.parent for path in find_folders(folders)} | {folders})
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(ROOT), "HARBOR_TELEMETRY": "0"}
    rewards: dict[str, float | None] = {}
    for index, dataset in enumerate(names):
        if not any((path / "task.toml").is_file() for path in dataset.iterdir()):
            continue
        command = [str(Path(PYTHON).with_name("harbor")), "run", "-p", str(dataset), "-a", agent, "-e", ENVIRONMENT]
        command += ["-o", str(jobs), "--job-name", f"{agent}-{index}", "-n", "2", "-y", "-q"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=jobs)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    for result in jobs.glob(f"{agent}-*/*/result.json"):
        trial = json.loads(result.read_text())
        verified = (trial.get("verifier_result") or {}).get("rewards") or {}
        rewards[trial["task_name"].rpartition("/")[2]] = verified.get("reward")
    return rewards


@pytest.mark.parametrize(("agent", "wanted"), [(ORACLE, 1.0), (NOP, 0.0)])
def test_harbor_reaches_our_verdicts(agent: str, wanted: float, folders: Path, images: Path, tmp_path: Path) -> None:
    config = SandboxConfig(backend="namespace")
    trials, rejected = asyncio.run(run_trials([folders], [agent], config, num_concurrent=2))
    assert not rejected
    ours = {trial.folder.name: None if trial.verdict is None else trial.verdict.perf for trial in trials}
    assert len(ours) == len(FAMILIES) * NUM_TASKS + 5
    assert set(ours.values()) == {wanted}, [trial.problem for trial in trials if trial.is_wrong]
    assert harbor_rewards(folders, agent, images, tmp_path) == ours


def test_harbors_lint_finds_nothing_in_what_pipelines_write(tmp_path: Path) -> None:
    """All rules; `benchmarks/folder_lint.py` lints whole runs."""
    write_folders(tmp_path / "tables", [(question, "train") for question in islice(questions(5, 1)[1], 5)], 5)
    for hints, text in enumerate(instructions(TASK)):
        write_folder(tmp_path / f"terminal-{hints}", task_files(TASK.adding(instruction=text, hints=hints)))
    paths = sorted(find_folders(tmp_path))
    assert len(paths) == 5 + 4
    command = [str(Path(PYTHON).with_name("harbor")), "lint", "--select", "ALL", "--json"]
    done = subprocess.run([*command, *map(str, paths)], capture_output=True, text=True)
    assert json.loads(done.stdout) == []
    (paths[0] / "task.toml").write_text('schema_version = "1.4"\nunknown = 1\n')
    done = subprocess.run([*command, str(paths[0])], capture_output=True, text=True)
    assert "unknown-config-field" in {finding["rule"] for finding in json.loads(done.stdout)}


def test_harbor_takes_every_trajectory(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "run", make_chat_format(), group_size=2, queue=6)
    scene.fill()
    scene.play()
    assert cli.main(["atif", str(scene.run_dir), str(tmp_path / "atif")]) == 0
    files = sorted(map(str, (tmp_path / "atif").iterdir()))
    assert files
    program = (
        "import sys\nfrom harbor.models.trajectories.trajectory import Trajectory\n"
        "for path in sys.argv[1:]:\n    Trajectory.model_validate_json(open(path).read())\n"
    )
    subprocess.run([PYTHON, "-c", program, *files], check=True)
