"""Task folders in a run: attempts get sandboxes of their images, and their tests give the verdicts."""

import asyncio
import shutil
from pathlib import Path

import pytest

from m2forge.errors import DataError, RunError
from m2forge.protocols import Command
from m2forge.records import Submission, Task, Verdict
from m2forge.sandbox.backend import open_sandbox
from m2forge.sandbox.config import SandboxConfig
from m2forge.tasks.config import VerifyConfig
from m2forge.tasks.folders.folder_family import FolderFamily
from m2forge.tasks.runner import TaskRunner
from tests.tasks.folders.scene import IMAGE, write

CONFIG = SandboxConfig(backend="namespace", timeout_s=20, grace_s=0.0)

pytestmark = pytest.mark.usefixtures("own_images")


def task_of(path: Path) -> Task:
    docker = f"FROM {IMAGE}\nCOPY --chown=1000:1000 files/ /workspace/\nENV GREETING=hello\nWORKDIR /workspace\n"
    write(path, environment__Dockerfile=docker, environment__files__given_dot_txt="2 3\n")
    return FolderFamily(path).tasks[0]


async def attempt(runner: TaskRunner, task: Task, script: str | None, config: SandboxConfig = CONFIG) -> Verdict:
    inside, env = await runner.sandbox(task, config)
    if script is None:
        return await runner.verify(task, Submission(""), None)
    sandbox = await open_sandbox(inside, env=env)
    outcome = await sandbox.run(Command(("sh", "-ec", script)))
    assert outcome.is_success, outcome.stderr.text()
    return await runner.verify(task, Submission(""), sandbox)


def test_attempts_work_in_the_image_and_tests_decide(tmp_path: Path) -> None:
    task = task_of(tmp_path / "sum")
    solve = '[ "$GREETING" = hello ]; [ "$(id -u)" = 1000 ]; read -r a b < given.txt; echo $((a + b)) > answer.txt'

    async def act() -> list[Verdict]:
        async with TaskRunner(VerifyConfig(base_image="host"), tmp_path / "workers") as runner:
            scripts = (solve, "echo 6 > answer.txt", None)
            return list(await asyncio.gather(*(attempt(runner, task, script) for script in scripts)))

    verdicts = asyncio.run(act())
    assert [verdict.perf for verdict in verdicts] == [1.0, 0.0, 0.0]
    assert "stdout" in verdicts[0].evidence


def test_an_agent_inside_reaches_the_gateway_alone(tmp_path: Path) -> None:
    task = task_of(tmp_path / "sum")

    async def networks() -> list[str]:
        found: list[str] = []
        for network in ("none", "gateway", "public"):
            async with TaskRunner(VerifyConfig(base_image="host"), tmp_path / "workers") as runner:
                inside, _ = await runner.sandbox(task, CONFIG.model_copy(update={"network": network}))
                found.append(inside.network)
        return found

    assert asyncio.run(networks()) == ["none", "gateway", "none"]


@pytest.mark.parametrize(
    ("config", "verify", "problem"),
    [
        (CONFIG, VerifyConfig(), "python:3.12-slim@sha256.* is not in the store"),
        (SandboxConfig(backend="process"), VerifyConfig(base_image="host"), "task folders bring their own files"),
    ],
    ids=["no image", "no namespaces"],
)
def test_what_would_fail_every_attempt_ends_the_run(
    tmp_path: Path, config: SandboxConfig, verify: VerifyConfig, problem: str
) -> None:
    task = task_of(tmp_path / "sum")

    async def act() -> None:
        async with TaskRunner(verify, tmp_path / "workers") as runner:
            await runner.sandbox(task, config)

    with pytest.raises(RunError, match=problem):
        asyncio.run(act())


def test_a_folder_that_vanished_fails_its_attempts_alone(tmp_path: Path) -> None:
    task = task_of(tmp_path / "sum")
    shutil.rmtree(tmp_path / "sum")

    async def act() -> None:
        async with TaskRunner(VerifyConfig(base_image="host"), tmp_path / "workers") as runner:
            await runner.sandbox(task, CONFIG)

    with pytest.raises(DataError, match="was the folder removed during the run"):
        asyncio.run(act())
