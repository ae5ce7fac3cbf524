"""The folders written by hand: without findings, solved by their solutions, not solved untouched."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from m2forge.tasks.folders.folder import TaskFolder, read_folders
from m2forge.tasks.folders.lint import lint

FOLDERS = read_folders(Path(__file__).parents[3] / "examples" / "folders")[0]
PLACES = re.compile(r"(?<![\w.])/(?:workspace|tests|logs|solution|tmp)(?=[/\"\s]|$)")


def reward(folder: TaskFolder, root: Path, *, is_solved: bool) -> float:
    """The reward of a folder's tests on this machine, its places moved to `root`."""
    root.mkdir()
    for name in ("tests", "solution"):
        shutil.copytree(folder.path / name, root / name)
    (root / "tmp").mkdir()
    if (folder.environment / "files").is_dir():
        shutil.copytree(folder.environment / "files", root / "workspace")
    else:
        shutil.copyfile(folder.environment / "setup.sh", root / "tmp" / "setup.sh")
    scripts = [*root.glob("tests/*.sh"), *root.glob("tests/*.py"), *root.glob("*/solve.sh"), *root.glob("tmp/*.sh")]
    for path in scripts:
        path.write_text(PLACES.sub(lambda match: f"{root}{match[0]}", path.read_text()))
    (root / "bin").mkdir()
    (root / "bin" / "python3").symlink_to(sys.executable)
    env = os.environ | {"PATH": f"{root}/bin:{os.environ['PATH']}", "HOME": str(root)}
    steps = ["tmp/setup.sh"] if (root / "tmp" / "setup.sh").exists() else []
    for step in [*steps, *(["solution/solve.sh"] if is_solved else []), "tests/test.sh"]:
        done = subprocess.run(["sh", str(root / step)], env=env, cwd=root, capture_output=True, text=True)
        assert step == "tests/test.sh" or done.returncode == 0, done.stderr
    return float((root / "logs/verifier/reward.txt").read_text())


def test_there_are_five() -> None:
    assert len(FOLDERS) == 5


@pytest.mark.parametrize("folder", FOLDERS, ids=[folder.name for folder in FOLDERS])
def test_a_folder_is_solved_by_its_solution_alone(tmp_path: Path, folder: TaskFolder) -> None:
    assert lint(folder.path) == []
    assert reward(folder, tmp_path / "solved", is_solved=True) == 1
    assert reward(folder, tmp_path / "untouched", is_solved=False) == 0
