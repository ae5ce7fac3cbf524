"""Bugs in functions of packages: what is taken, what a bug is, what tests accept, and what the agent sends."""

import asyncio
import json
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from examples.bug_agent import CODE, TOOLS, edit
from examples.bug_tasks import BUGS, Bug, Function, Lab, demonstrate, find_examples, functions, make_bugs, split
from m2forge.agents.attempt import Job
from m2forge.agents.worker_pool import WorkerPool
from m2forge.agents.workspace import Workspaces
from m2forge.config import load
from m2forge.pipelines.swe.tree import Release
from m2forge.protocols import Endpoint
from m2forge.records import Submission
from m2forge.rl.config import RLConfig, WorkerAgentConfig
from m2forge.tasks.folders.folder import FolderFile
from m2forge.tasks.task_file import JsonlFamily
from m2forge.text.message import message_from_openai, tool_from_openai
from tests.gateway.dialogue import chatml
from tests.gateway.live import live
from tests.sandbox.places import require

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "configs/rl/smollm2-bugs.toml"
MODULE = '''"""A module."""
import math
import os

LIMIT = 10


def clamp(x: int, low: int, high: int) -> int:
    """Bounds a number."""
    if x < low:  # too small
        return low
    if x > high:
        return high
    return x


def area(r: float) -> float:
    value = min(r, LIMIT)
    value = math.pi * value ** 2
    return value


def remove(path: str) -> None:
    if path:
        os.remove(path)
    return None


def show(x: int) -> int:
    y = x + 1
    print(y)
    return y


def calls(x: int) -> int:
    y = clamp(x, 0, 5)
    z = y + 1
    return z


def short(x: int) -> int:
    return x
'''


def module_functions() -> dict[str, Function]:
    release = Release({"pack/core.py": FolderFile(MODULE.encode()), "tests/test_a.py": FolderFile(MODULE.encode())})
    return {function.name: function for function in functions("pack", release)}


def bugs_of(*names: str) -> list[Bug]:
    require("namespace")
    found, lab = module_functions(), Lab(1)
    with ThreadPoolExecutor(1) as pool:
        return make_bugs(find_examples([found[name] for name in names], lab, 0), lab, pool, random.Random(0))


def check(folder: Path, code: str, *arguments: str) -> tuple[int, str]:
    (folder / CODE).write_text(code)
    command = [sys.executable, "-I", "-S", str(BUGS / "check.py"), "tests.json", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    return done.returncode, done.stdout


def test_functions_are_whole_with_what_they_use() -> None:
    found = module_functions()
    assert sorted(found) == ["area", "clamp"]
    assert found["area"].source.splitlines()[:3] == ["import math", "LIMIT = 10", "def area(r):"]
    assert "too small" not in found["clamp"].source
    assert '"""' not in found["clamp"].source
    assert found["clamp"].num_required == 3


def test_the_check_accepts_no_code_but_right_code(tmp_path: Path) -> None:
    (tmp_path / "tests.json").write_text(json.dumps([["f(1)", "2"], ["f(0.1)", "1.1"], ["f(3)", "4"]]))
    assert check(tmp_path, "def f(x):\n    return x + 1\n") == (0, "passed 3 tests\n")
    wrong = check(tmp_path, "def f(x):\n    return x + 1 if x < 3 else 0\n")
    assert wrong == (1, "failed: f(3)\nexpected 4\nreceived 0\n")
    for ending in (
        "raise SystemExit(0)",
        "import os; os._exit(0)",
        "while True: pass",
        "return '2'",
        "return [0] * 10**9",
    ):
        assert check(tmp_path, f"def f(x):\n    {ending}\n")[0] == 1, ending
    assert check(tmp_path, "def f(x:\n")[0] == 1


def test_code_finds_no_hidden_result(tmp_path: Path) -> None:
    code = "import json, os\ndef f(x):\n    return json.load(open('tests.json'))[0][1] == '2' and 2\n"
    for arguments, status in (((), 0), (("--once",), 1)):
        (tmp_path / "tests.json").write_text(json.dumps([["f(1)", "2"]]))
        assert check(tmp_path, code, *arguments)[0] == status


def test_results_are_the_same_in_every_process(tmp_path: Path) -> None:
    (tmp_path / "tests.json").write_text(json.dumps([["f()", "({'a', 'b', 'c'}, [0.3], {'k': (1)})"]]))
    code = "def f():\n    return set('abc'), iter([0.1 + 0.2]), {'k': (1,)}\n"
    assert {check(tmp_path, code) for _ in range(3)} == {(0, "passed 1 tests\n")}


def test_a_bug_is_one_line_that_tests_see(tmp_path: Path) -> None:
    bugs = bugs_of("clamp", "area")
    assert {bug.function.name for bug in bugs} == {"clamp", "area"}
    lines = [json.dumps(bug.task("train", (BUGS / "check.py").read_text())) + "\n" for bug in bugs]
    (tmp_path / "bugs.jsonl").write_text("".join(lines))
    family = JsonlFamily(tmp_path / "bugs.jsonl")
    workspaces = Workspaces(tmp_path / "workspaces")
    for bug, task in list(zip(bugs, family.tasks, strict=True))[:3]:
        repaired = edit(bug.source, bug.line, bug.right)
        assert repaired == bug.function.source
        workspace = workspaces.open(task.id, task)
        assert family.verify(task, Submission("", str(workspace.path))).perf == 0
        workspace.write(CODE, repaired)
        assert family.verify(task, Submission("", str(workspace.path))).perf == 1


def test_no_package_is_trained_on_and_held_out() -> None:
    def bug(package: str, number: int) -> Bug:
        function = Function(package, "f", f"def f(x):\n    return x + {number}\n", (("int",),), 1)
        return Bug(function, "constant", function.source, 2, "return x", (), ())

    bugs = [bug(f"p{package}", number) for package in range(20) for number in range(package)]
    train, held_out = split(bugs, 30, seed=1)
    assert len(held_out) == 30
    assert not {each.function.package for each in train} & {each.function.package for each in held_out}
    assert (
        max(sum(each.function.package == name for each in held_out) for name in {b.function.package for b in bugs}) <= 8
    )


def test_the_agent_sends_what_demonstrations_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy says what the demonstrator says; tests run in the attempt's sandbox."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    bug = next(bug for bug in bugs_of("clamp") if bug.kind == "logic")
    with ThreadPoolExecutor(1) as pool:
        rows = demonstrate([bug] * 8, Lab(1), pool, random.Random(0))
    row = max(rows, key=lambda row: len(row["messages"]))  # type: ignore[arg-type]
    shown = [message_from_openai(message) for message in row["messages"]]  # type: ignore[union-attr, arg-type]
    answers = [index for index, message in enumerate(shown) if message.role == "assistant"]
    assert len(answers) > 2
    (tmp_path / "bugs.jsonl").write_text(json.dumps(bug.task("train", (BUGS / "check.py").read_text())) + "\n")
    task, format = JsonlFamily(tmp_path / "bugs.jsonl").tasks[0], chatml()
    tools = [tool_from_openai(tool) for tool in TOOLS]
    agent = load(RLConfig, CONFIG).agent
    assert isinstance(agent, WorkerAgentConfig)
    command = (sys.executable, str(ROOT / "examples/bug_agent.py"))
    agent = agent.model_copy(update={"command": command, "num_workers": 1})
    workspace = Workspaces(tmp_path / "workspaces", agent.sandbox).open("attempt", task)
    with live(format, [shown[index] for index in answers], tools=tools) as gateway:
        _, key = gateway.episode()

        async def attempt() -> str:
            job = Job("attempt", task, Endpoint(gateway.url, key), (), workspace)
            async with WorkerPool(agent, tmp_path / "workers") as workers:
                try:
                    return (await workers.attempt(job)).text
                finally:
                    await workspace.stop()

        assert asyncio.run(attempt()) == "repaired"
        sent = [format.tokenizer.decode(list(ids)) for ids, _ in gateway.engine.seen()]
    rendered = [format.render(shown[:index], tools, generation=True).ids for index in answers]
    assert sent == [format.tokenizer.decode(list(ids)) for ids in rendered]


@pytest.mark.long
def test_a_run_on_bugs_trains_a_random_network(tmp_path: Path) -> None:
    """`benchmarks/bug_fix.py --quick` with tasks that need no download."""
    check_text = (BUGS / "check.py").read_text()
    bugs, tasks = bugs_of("clamp", "area"), tmp_path / "tasks"
    tasks.mkdir()
    lines = [bug.task("held_out" if bug.function.name == "area" else "train", check_text) for bug in bugs]
    (tasks / "bugs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = [sys.executable, str(ROOT / "benchmarks/bug_fix.py"), "--quick", "--tasks", str(tasks)]
    command += ["--folder", str(tmp_path / "run"), "--set", "eval.num_tasks=2"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stdout + done.stderr
