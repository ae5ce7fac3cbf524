"""Folders of an attempt: fresh, its own, and gone afterwards, whatever a program did to them."""

from pathlib import Path

import pytest

from m2forge.agents.workspace import Workspaces, task_files
from m2forge.errors import DataError
from m2forge.records import Domain, JsonValue, Task
from m2forge.sandbox.config import SandboxConfig


def task(files: JsonValue) -> Task:
    return Task("t", Domain.AGENT, "Do it.", metadata={"files": files})


def test_a_workspace_is_fresh_and_holds_the_tasks_files(tmp_path: Path) -> None:
    workspaces = Workspaces(tmp_path / "all")
    for _ in range(2):
        workspace = workspaces.open("a", task({"x/y.txt": "ß\r\n"}))
        assert (workspace.path / "x" / "y.txt").read_bytes() == "ß\r\n".encode()
        assert [path.name for path in workspace.path.iterdir()] == ["x"]
        (workspace.path / "left").touch()
    workspaces.close(workspace)
    assert not workspace.folder.exists()


def test_a_folder_without_permissions_is_removed_too(tmp_path: Path) -> None:
    workspaces = Workspaces(tmp_path / "all")
    workspace = workspaces.open("a", task({}))
    inner = workspace.path / "locked" / "inner"
    inner.mkdir(parents=True)
    (inner / "file").touch()
    (workspace.path / "link").symlink_to(tmp_path)
    inner.chmod(0o000)
    inner.parent.chmod(0o000)
    workspaces.close(workspace)
    assert not workspace.folder.exists()
    assert tmp_path.exists()


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    left = Workspaces(tmp_path / "all").open("old", task({}))
    Workspaces(tmp_path / "all")
    assert not left.folder.exists()


@pytest.mark.parametrize("files", [{"../x": "1"}, {"/x": "1"}, {"": "1"}, {"x": 1}, ["x"], {"a/../../x": "1"}])
def test_files_outside_the_workspace_are_refused(files: JsonValue) -> None:
    with pytest.raises(DataError, match="task t: files"):
        task_files(task(files))


def test_a_task_may_bring_a_sandbox_of_its_own(tmp_path: Path) -> None:
    workspaces = Workspaces(tmp_path / "all", SandboxConfig(max_processes=9))
    assert workspaces.open("a", task({})).config == workspaces.config
    own = SandboxConfig(image="python:3.12", workspace="/app")
    workspace = workspaces.open("b", task({}), own, {"A": "1"})
    assert (workspace.inside, workspace.inside_home, workspace.locate("~/x")) == ("/app", "/tmp/home", "/tmp/home/x")
