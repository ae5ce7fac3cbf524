"""The verifiers of task files: what each accepts, and that none raises at what a policy writes."""

import os
import time
from pathlib import Path

import pytest

from m2forge.errors import M2ForgeError, RecordError
from m2forge.protocols import Command, Sandbox
from m2forge.records import Domain, JsonValue, Submission, Task, Verdict
from m2forge.sandbox.config import SandboxConfig
from m2forge.tasks.family import TimeLimitError
from m2forge.tasks.task_file import read_verifier, run_inside, verify
from m2forge.tasks.user_code import call_reward
from tests.sandbox.places import problem as missing
from tests.sandbox.places import require, use

TASK = Task("t-1", Domain.GENERAL, "Do it.")
CODE = """
from m2forge import Verdict

def verdict(task, submission):
    return Verdict(0.5, {"steps": len(submission.steps)}, criteria={"short": 1.0})

def perf(task, submission):
    return submission.answer == task.instruction

def nothing(task, submission):
    pass

def text(task, submission):
    return "1"

def per_step(task, submission, verdict):
    return [verdict.perf * index for index, _ in enumerate(submission.steps)]

def per_episode(task, submission, verdict):
    return -1

def one_too_few(task, submission, verdict):
    return [0.0] * (len(submission.steps) - 1)

def not_finite(task, submission, verdict):
    return float("nan")
"""


def judge_inside(spec: JsonValue, workspace: Path, before: str = "true") -> Verdict:
    """The verdict of a command in a sandbox that holds the files of `workspace`, after the agent ran `before`."""

    async def act(sandbox: Sandbox) -> Verdict:
        await sandbox.upload(workspace, sandbox.workspace)
        await sandbox.run(Command(("sh", "-c", before)))
        return await run_inside(read_verifier(spec, "here"), TASK, sandbox)

    return use(SandboxConfig(), act)


def judge(spec: JsonValue, answer: str = "", folder: Path = Path(), workspace: Path | None = None) -> Verdict:
    submission = Submission(answer, None if workspace is None else str(workspace), steps=({}, {}))
    return verify(read_verifier(spec, "here"), TASK, submission, folder)


@pytest.mark.parametrize(
    ("spec", "answer", "perf"),
    [
        ({"exact": "7G"}, " 7G.\n", 1),
        ({"exact": "7G"}, "7g", 0),
        ({"exact": ["yes", "Yes"]}, "Yes", 1),
        ({"numeric": 1234.5}, "First 3, then 1,234.5.", 1),
        ({"numeric": -3}, "x = -3", 1),
        ({"numeric": 3.14, "tolerance": 0.01}, "about 3.145", 1),
        ({"numeric": 3.14, "tolerance": 0.01}, "about 3.2", 0),
        ({"numeric": 1e3}, "1E3", 1),
        ({"numeric": 2}, "none", 0),
        ({"numeric": 2}, "9" * 5000, 0),
        ({"regex": "(?i)\\bparis\\b"}, "It is PARIS!", 1),
        ({"regex": "^paris$"}, "It is paris", 0),
        ({"choice": "B"}, "Not A. The answer is (B).", 1),
        ({"choice": "B"}, "B, no: C", 0),
        ({"choice": "B"}, "ABBA", 0),
        ({"choice": "yes", "options": ["yes", "no"]}, "no ... yes", 1),
        ({"choice": "A+", "options": ["A", "A+"]}, "Grade A+", 1),
        ({"exact": "x"}, "\udcff", 0),
        ({"choice": "A"}, "\udcff", 0),
    ],
)
def test_answers_are_verified(spec: JsonValue, answer: str, perf: float) -> None:
    assert judge(spec, answer).perf == perf


def test_a_python_function_gives_a_verdict_or_a_perf(tmp_path: Path) -> None:
    (tmp_path / "my_v.py").write_text(CODE)
    verdict = judge({"python": "my_v.py:verdict"}, folder=tmp_path)
    assert (verdict.perf, verdict.evidence, verdict.criteria) == (0.5, {"steps": 2}, {"short": 1.0})
    assert judge({"python": "my_v.py:perf"}, "Do it.", tmp_path).perf == 1
    with pytest.raises(
        RecordError, match=r"my_v.py:nothing: expected a Verdict or a number from 0 to 1, received nothing"
    ):
        judge({"python": "my_v.py:nothing"}, folder=tmp_path)
    with pytest.raises(RecordError, match="received '1'"):
        judge({"python": "my_v.py:text"}, folder=tmp_path)


@pytest.mark.parametrize(
    ("script", "perf"),
    [
        ("exit 0", 1.0),
        ("exit 3", 0.0),
        ("echo working; echo 0.25", 0.25),
        ("echo 1.0; exit 1", 0.0),
        ("echo 42", 1.0),
        ("test -f made.txt", 1.0),
    ],
)
def test_a_command_is_judged_by_its_status_and_last_line(tmp_path: Path, script: str, perf: float) -> None:
    (tmp_path / "made.txt").touch()
    verdict = judge({"command": ["sh", "-c", script], "timeout_s": 10}, workspace=tmp_path)
    assert verdict.perf == perf
    assert isinstance(verdict.evidence["status"], int)
    if missing("namespace") is None:
        assert judge_inside({"command": ["sh", "-c", script], "timeout_s": 10}, tmp_path) == verdict


def test_a_command_in_a_sandbox_cannot_be_led_astray(tmp_path: Path) -> None:
    require("namespace")
    spec: JsonValue = {"command": ["sh", "tests/test.sh"], "files": {"tests/test.sh": "pwd; exit 4"}, "timeout_s": 10}
    verdict = judge_inside(spec, tmp_path, before="ln -s /tmp tests; echo exit 0 > /tmp/test.sh")
    assert verdict == Verdict(0.0, {"status": 4, "output": "/workspace\n"})
    verdict = judge_inside(spec, tmp_path, before="chmod 555 .")
    assert (verdict.perf, "cannot be written" in str(verdict.evidence["error"])) == (0.0, True)
    with pytest.raises(TimeLimitError, match=r"sleep: over a limit \(timeout\)"):
        judge_inside({"command": ["sleep", "60"], "timeout_s": 0.2}, tmp_path)
    with pytest.raises(RecordError, match="command no-such-program: cannot be run: No such file"):
        judge_inside({"command": ["no-such-program"]}, tmp_path)
    assert judge_inside({"command": ["sh", "-c", "kill -9 $$"]}, tmp_path).perf == 0.0, "no failure of the sandbox"


def test_a_commands_files_replace_what_the_agent_left(tmp_path: Path) -> None:
    outside, workspace = tmp_path / "outside", tmp_path / "workspace"
    outside.mkdir()
    workspace.mkdir()
    (outside / "test.sh").write_text("mine")
    (workspace / "tests").symlink_to(outside)
    spec: JsonValue = {"command": ["sh", "tests/test.sh"], "files": {"tests/test.sh": "exit 4"}, "timeout_s": 10}
    assert judge(spec, workspace=workspace).evidence["status"] == 4
    assert (outside / "test.sh").read_text() == "mine"


def test_a_command_sees_no_secret_and_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("M2FORGE_JUDGE_KEY", "secret")
    spec: JsonValue = {"command": ["sh", "-c", "env; sleep 60 & echo $! > pid"], "timeout_s": 50}
    started_s = time.monotonic()
    assert "JUDGE_KEY" not in str(judge(spec, workspace=tmp_path).evidence["output"])
    assert time.monotonic() - started_s < 40
    pid = int((tmp_path / "pid").read_text())
    until_s = time.monotonic() + 40
    while _is_running(pid) and time.monotonic() < until_s:
        time.sleep(0.01)
    assert not _is_running(pid)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_command_over_its_time_is_a_limit_and_ends(tmp_path: Path) -> None:
    with pytest.raises(TimeLimitError, match=r"sh: no result after 0.2 s"):
        judge({"command": ["sh", "-c", "echo $$ > pid; sleep 60"], "timeout_s": 0.2}, workspace=tmp_path)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_command_that_cannot_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="command 'no-such-program' cannot be run: No such file"):
        judge({"command": ["no-such-program"]}, workspace=tmp_path)
    with pytest.raises(RecordError, match="a command needs a workspace"):
        judge({"command": ["true"]})


def test_a_reward_function_pays_an_episode_or_each_step(tmp_path: Path) -> None:
    path = tmp_path / "my_r.py"
    path.write_text(CODE)
    submission = Submission("x", steps=({}, {}, {}))
    assert call_reward(f"{path}:per_step", TASK, submission, Verdict(0.5)) == (0.0, 0.5, 1.0)
    assert call_reward(f"{path}:per_episode", TASK, submission, Verdict(0.5)) == -1.0
    for name, problem in (
        ("one_too_few", "expected one reward for each of 3 steps, received 2"),
        ("not_finite", "expected a finite number, or one for each step, received nan"),
        ("gone", "it has no 'gone'"),
    ):
        with pytest.raises(M2ForgeError, match=problem):
            call_reward(f"{path}:{name}", TASK, submission, Verdict(0.5))
