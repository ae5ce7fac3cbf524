"""Verification of task folders in sandboxes: what is 0, what is no verdict, and trials by `m2forge tasks run`."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from m2forge import cli
from m2forge.errors import DataError, EngineError, NotFoundError
from m2forge.protocols import Command, Sandbox
from m2forge.records import Verdict, VerdictReason
from m2forge.sandbox.backend import open_sandbox
from m2forge.sandbox.channel import program
from m2forge.sandbox.config import SandboxConfig
from m2forge.sandbox.image import ImageStore
from m2forge.tasks.folders import artifact, verification
from m2forge.tasks.folders.environment import prepare, resolved
from m2forge.tasks.folders.folder import TaskFolder
from m2forge.tasks.folders.trial import attempt
from m2forge.tasks.folders.verification import read_report, read_rewards, verify_attempt
from tests.sandbox.places import require
from tests.tasks.folders import machine_image, scene, written
from tests.tasks.test_cheat import commit_solution

ROOT = Path(__file__).parents[3]
CONFIG = SandboxConfig(backend="namespace", timeout_s=20, grace_s=0.0)
SOLVE = "echo 5 > answer.txt"

pytestmark = pytest.mark.usefixtures("own_images")


def verdict_of(folder: TaskFolder, agent: str = SOLVE) -> Verdict:
    async def act() -> Verdict:
        return await attempt(await prepare(folder, CONFIG, "host"), agent)

    return asyncio.run(act())


def test_an_answer_is_verified_in_a_fresh_sandbox(tmp_path: Path) -> None:
    folder = scene.write(tmp_path / "task", tests__test_dot_sh=scene_test("ls -A /workspace; id -u"))
    verdict = verdict_of(folder, f"{SOLVE}; echo 6 > other.txt")
    assert (verdict.perf, verdict.reason) == (1, VerdictReason.JUDGED)
    assert verdict.evidence["stdout"] == "answer.txt\n1000\n"
    assert verdict.evidence["artifacts"] == {"num_files": 1, "num_bytes": 2}
    assert verdict_of(folder, "echo 6 > answer.txt").perf == 0


def scene_test(before: str) -> str:
    return f"#!/bin/sh\n{before}\ngrep -qx 5 /workspace/answer.txt\n{written.BY_STATUS}"


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("exit 0", "without"),
        ("kill -9 $$", "without"),
        ("echo nan > /logs/verifier/reward.txt", "from 0 to 1"),
        ("echo 7 > /logs/verifier/reward.txt", "from 0 to 1"),
        ('echo \'{"reward": "1"}\' > /logs/verifier/reward.json', "from 0 to 1"),
        ("echo '{' > /logs/verifier/reward.json; echo 1 > /logs/verifier/reward.txt", "cannot be read"),
        ("ln -s /etc/hostname /logs/verifier/reward.txt", "without"),
        ("head -c 5000000 /dev/zero > /logs/verifier/reward.txt", "bytes"),
        ("echo 1 > /logs/verifier/reward.txt; sleep 60", "longer than 0.5 s"),
    ],
)
def test_tests_without_a_valid_reward_are_0(script: str, problem: str, tmp_path: Path) -> None:
    table = scene.table(verifier={"environment_mode": "separate", "timeout_sec": 0.5})
    verdict = verdict_of(scene.write(tmp_path / "task", table, tests__test_dot_sh=f"#!/bin/sh\n{script}\n"))
    assert verdict.perf == 0
    assert problem in str(verdict.evidence["problem"])
    assert verdict.reason is (VerdictReason.LIMIT if "longer" in problem else VerdictReason.JUDGED)


@pytest.mark.parametrize(
    ("last", "problem"), [("exit 3", "exited with 3"), ("sleep 60 >/dev/null 2>&1 &", "1 processes running")]
)
def test_a_score_that_may_be_forged_is_0(last: str, problem: str, tmp_path: Path) -> None:
    script = f"#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n{last}\n"
    verdict = verdict_of(scene.write(tmp_path / "ours", tests__test_dot_sh=script))
    assert verdict.perf == 0
    assert problem in str(verdict.evidence["problem"])
    foreign = scene.write(tmp_path / "foreign", scene.table(metadata={}), tests__test_dot_sh=script)
    assert verdict_of(foreign).perf == 1  # Most scripts of others do not care.


# In the folders of these two tests no other protection applies: they are not ours, and have no test that can be turned
# into a failing one.


def test_files_that_steer_the_runner_do_not_arrive(tmp_path: Path) -> None:
    script = "#!/bin/sh\ncd /workspace && PYTHONPATH=. python3 -c 'print(1 / 0)'\n" + written.BY_STATUS
    table = scene.table(metadata={}, artifacts=["/workspace"])
    folder = scene.write(tmp_path / "task", table, tests__test_dot_sh=script)
    verdict = verdict_of(folder, "echo 'import os; os._exit(0)' > sitecustomize.py")
    assert verdict.perf == 0, verdict.evidence
    assert '"dropped": ["/workspace/sitecustomize.py"]' in json.dumps(verdict.evidence["artifacts"])


@pytest.mark.parametrize("mode", ["separate", "shared"])
def test_rewards_and_tests_never_come_from_an_attempt(mode: str, tmp_path: Path) -> None:
    table = scene.table(
        metadata={},
        artifacts=["/logs", "/tests"] if mode == "separate" else [],
        agent={"user": 0},
        verifier={"environment_mode": mode, "timeout_sec": 30.0},
    )
    script = "#!/bin/sh\n[ ! -e /tests/extra.sh ] || . /tests/extra.sh\n"
    folder = scene.write(tmp_path / "task", table, tests__test_dot_sh=script)
    reward = "echo 1 > /logs/verifier/reward.txt"
    for cheat in (f"mkdir -p /logs/verifier; {reward}", f"mkdir -p /tests; echo '{reward}' > /tests/extra.sh"):
        verdict = verdict_of(folder, cheat)
        assert verdict.perf == 0, verdict.evidence


def test_a_failed_sandbox_is_retried_and_never_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, num_failures = scene.write(tmp_path / "task"), 0

    async def fail(*arguments: object, **options: object) -> Sandbox:
        nonlocal num_failures
        if num_failures:
            num_failures -= 1
            raise EngineError("a sandbox could not start")
        return await open_sandbox(*arguments, **options)  # type: ignore[arg-type]  # passed on

    monkeypatch.setattr(verification, "open_sandbox", fail)
    num_failures = verification.NUM_TRIES - 1
    assert verdict_of(folder).perf == 1
    num_failures = verification.NUM_TRIES
    with pytest.raises(EngineError, match="verification failed 3 times"):
        verdict_of(folder)


def test_too_many_artifacts_are_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = scene.write(tmp_path / "task", scene.table(artifacts=["/workspace"]))
    monkeypatch.setattr(artifact, "MAX_BYTES", 1000)
    verdict = verdict_of(folder, f"{SOLVE}; head -c 1001 /dev/zero > large")
    assert verdict.perf == 0
    assert "declare what tests need" in str(verdict.evidence["problem"])


def test_a_forked_sandbox_is_verified_whole(tmp_path: Path) -> None:
    folder = scene.write(tmp_path / "task", scene.table(artifacts=["/workspace"]))

    async def act() -> Verdict:
        environment = await prepare(folder, CONFIG, "host")
        first = await environment.open()
        await first.run(Command(("sh", "-c", "echo 6 > answer.txt; echo x > other.txt")))
        frozen = await first.snapshot()
        second = await first.fork(frozen)
        await first.close()
        await second.run(Command(("sh", "-c", SOLVE)))
        try:
            return await verify_attempt(environment, second)
        finally:
            await frozen.remove()

    verdict = asyncio.run(act())
    assert verdict.perf == 1
    assert verdict.evidence["artifacts"] == {"num_files": 5, "num_bytes": 6}


def test_a_report_gives_criteria_and_must_agree(tmp_path: Path) -> None:
    def script(*tests: tuple[str, str]) -> str:
        report = {"results": {"tests": [{"name": name, "status": status} for name, status in tests]}}
        logs = "/logs/verifier"
        return f"#!/bin/sh\necho '{json.dumps(report)}' > {logs}/ctrf.json\necho 1 > {logs}/reward.txt\n"

    folder = scene.write(tmp_path / "a", tests__test_dot_sh=script(("test_x.py::test_a", "passed"), ("b", "passed")))
    assert verdict_of(folder).criteria == {"test_x.py::test_a": 1, "b": 1}
    source = "def test_a():\n    pass\ndef test_b():\n    pass\n"
    for tests, problem in (
        ((("t.py::test_a", "passed"), ("t.py::test_b[1]", "skipped")), "a full score, but test_b did not pass"),
        ((("t.py::test_a", "passed"),), "a full score, but test_b did not run"),
    ):
        folder = scene.write(tmp_path / str(len(tests)), tests__test_dot_sh=script(*tests), tests__t_dot_py=source)
        verdict = verdict_of(folder)
        assert (verdict.perf, verdict.evidence["problem"]) == (0, problem)


def test_reports_of_junit_are_read(tmp_path: Path) -> None:
    case = '<testcase classname="t.T" name="{}">{}</testcase>'
    cases = case.format("a[1]", "") + case.format("b", "<failure/>") + case.format("c", "<skipped/>")
    (tmp_path / "junit.xml").write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    assert read_report(tmp_path) == {"t.T::a[1]": True, "t.T::b": False, "t.T::c": False}
    (tmp_path / "junit.xml").write_text("<!DOCTYPE x [<!ENTITY a 'b'>]><testsuites/>")
    assert read_report(tmp_path) == {}


def test_rewards_are_read_as_harbor_does(tmp_path: Path) -> None:
    (tmp_path / "reward.txt").write_text(" 0.5\n")
    assert read_rewards(tmp_path) == {"reward": 0.5}
    (tmp_path / "reward.json").write_text('{"a": 1, "b": 0.25}')
    assert read_rewards(tmp_path) == {"a": 1, "b": 0.25}


# -- images -----------------------------------------------------------------------------------------------------------


def test_a_dockerfile_is_built_once_in_a_sandbox(tmp_path: Path) -> None:
    dockerfile = (
        f"FROM {scene.IMAGE}\nENV WORD=five\nWORKDIR /workspace\nCOPY --chown=1000:1000 given/ /workspace/\n"
        "COPY given/a.txt /opt/b.txt\nRUN cat /opt/b.txt a.txt > /opt/both.txt && echo $WORD >> /opt/both.txt\n"
    )
    test = scene_test("cat /opt/both.txt; stat -c '%u %n' /workspace /workspace/a.txt /opt/b.txt")
    folder = scene.write(
        tmp_path / "task",
        environment__Dockerfile=dockerfile,
        environment__given__a_dot_txt="A\n",
        tests__test_dot_sh=test,
    )
    store = ImageStore()
    before = len(store.images())
    verdict = verdict_of(folder)
    assert verdict.evidence["stdout"] == "A\nA\nfive\n1000 /workspace\n1000 /workspace/a.txt\n0 /opt/b.txt\n"
    assert verdict.perf == 1
    assert verdict_of(folder).perf == 1
    assert len(store.images()) == before + 1


def test_podman_builds_what_a_sandbox_cannot(tmp_path: Path) -> None:
    require("podman")
    label = f"test={tmp_path}"
    folder = scene.write(
        tmp_path / "task",
        environment__Dockerfile=f"FROM scratch AS machine\nLABEL {label}\nCOPY root/ /\nFROM machine\nENV WORD=five\n"
        "WORKDIR /workspace\nCOPY --from=machine /etc/passwd /opt/copied\nCOPY --chown=1000:1000 repository /app\n",
        environment__repository__calc_dot_py="pass\n",
        tests__test_dot_sh=scene_test("echo $WORD; grep -c root /opt/copied; git -C /app log --all --format=%s"),
    )
    machine_image.build_small(folder.path / "environment" / "root", "sh cat rm dirname grep find stat git")
    commit_solution(folder.path / "environment" / "repository")
    before = {image.name for image in ImageStore().images()}
    for _ in range(2):
        verdict = verdict_of(folder)
        assert (verdict.perf, verdict.evidence["stdout"]) == (1, "five\n1\nbug\n"), verdict.evidence
    added = {image.name.partition("-")[0] for image in ImageStore().images() if image.name not in before}
    assert added == {"podman", "task"}
    prune = ["podman", "image", "prune", "--force", "--filter", f"label={label}"]
    assert subprocess.run(prune, check=True, capture_output=True).stdout  # Podman caches what it builds.


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("COPY missing /x", "no such file"),
        ("COPY ../x /x", "inside"),
        ("RUN echo why; exit 3", "exited 3: why"),
        ("COPY Dockerfile /usr/local/bin/x", "read-only"),
    ],
)
def test_an_image_that_cannot_be_built_is_named(line: str, problem: str, tmp_path: Path) -> None:
    folder = scene.write(tmp_path / "task", environment__Dockerfile=f"FROM {scene.IMAGE}\n{line}\n")
    with pytest.raises(DataError, match=problem):
        verdict_of(folder)


def test_a_repository_that_cannot_be_pruned_is_refused(tmp_path: Path) -> None:
    (tmp_path / "root" / "app" / ".git").mkdir(parents=True)
    ImageStore().build("bare", [str(tmp_path / "root")])
    table = scene.table(environment={"docker_image": "bare", "network_mode": "no-network"})
    folder = scene.write(tmp_path / "task", table, environment__Dockerfile="")
    with pytest.raises(DataError, match="repositories cannot be listed without sh"):
        verdict_of(folder)


def test_an_unknown_image_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")  # No podman, which would try to pull it.
    with pytest.raises(NotFoundError, match=r"m2forge image build python:3.12-slim SOURCE.*--image"):
        asyncio.run(prepare(scene.write(tmp_path / "task"), CONFIG))


def test_no_variable_of_this_machine_enters(tmp_path: Path) -> None:
    folder = scene.write(tmp_path / "task")
    assert resolved({"A": "${KEY:-none}", "B": "b"}, folder) == {"A": "none", "B": "b"}
    with pytest.raises(DataError, match="no key enters"):
        resolved({"A": "${KEY}"}, folder)


# -- m2forge tasks run ------------------------------------------------------------------------------------------------


def test_folders_written_by_hand_are_sound(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = written.write_all(tmp_path / "tasks")
    assert cli.main(["tasks", "run", str(tmp_path / "tasks"), "--image", "host", "--json"]) == 0
    trials = json.loads(capsys.readouterr().out)
    assert [(trial["agent"], trial["perf"]) for trial in trials] == [("oracle", 1), ("nop", 0)] * len(folders)


ORDINARY = """
import asyncio, concurrent.futures.thread, json, os, sys
from pathlib import Path
from m2forge.sandbox.config import SandboxConfig
from m2forge.sandbox.container import ContainerSandbox
from m2forge.tasks.folders.trial import run_trials
from tests.tasks.folders import written
os.setresgid(54321, 54321, 54321)
os.setresuid(54321, 54321, 54321)
root = Path(sys.argv[1], "tasks")
written.write_all(root)
paths = [root / name for name in ("repair-module", "rename-files")]
config = SandboxConfig(backend="namespace")
trials, rejected = asyncio.run(run_trials(paths, ["oracle", "nop"], config, base_image="host"))
print(json.dumps([trial.problem if trial.verdict is None else trial.verdict.perf for trial in trials]))
"""


def test_an_ordinary_user_runs_trials_too() -> None:
    if os.geteuid() != 0:
        pytest.skip("all trials of this file are an ordinary user's")
    with tempfile.TemporaryDirectory() as scratch:  # pytest's own folders are root's alone
        (Path(scratch) / "m2forge").mkdir()
        Path(shutil.copy(program(), Path(scratch) / "m2forge")).chmod(0o755)
        for path in (Path(scratch), Path(scratch) / "m2forge"):
            os.chown(path, 54321, 54321)
        env = os.environ | {"XDG_CACHE_HOME": scratch, "TMPDIR": scratch, "HOME": scratch}
        command = [sys.executable, "-c", ORDINARY, scratch]
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    if "kernel refused the namespaces" in done.stderr + done.stdout:
        pytest.skip("user namespaces are not allowed here")
    assert done.stdout, done.stderr
    assert json.loads(done.stdout) == [1, 0, 1, 0], done.stderr


def test_an_agent_with_a_model_is_sent_to_eval(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tasks", "run", str(tmp_path), "--agent", "claude-code"]) == 2
    assert '`m2forge eval` with trials.agent.preset = "claude-code"' in capsys.readouterr().err


def test_a_wrong_folder_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scene.write(tmp_path / "free", tests__test_dot_sh="#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n")
    scene.write(tmp_path / "unsolved", solution__solve_dot_sh="#!/bin/sh\n")
    scene.write_raw(tmp_path / "broken", "schema_version = 7\n")
    command = ["tasks", "run", str(tmp_path), "--image", "host", "--trials", "2"]
    assert cli.main(command) == 2
    shown = capsys.readouterr()
    assert "3 of 3 folders" in shown.err
    said = "".join(shown.out.split())  # Lines are as long as the terminal is wide.
    for text in ("free:nop", "unsolved:oracle", "broken"):
        assert text in said
    assert cli.main([*command, "--agent", SOLVE]) == 2  # The broken folder alone.
