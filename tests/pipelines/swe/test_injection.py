"""Injected bugs: which faults count, and what the agent sees of the tests."""

import ast
import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest

from m2forge.pipelines.swe import injection
from m2forge.pipelines.swe.environment import MutantLimit, Runner
from m2forge.pipelines.swe.injection import Sound, broken_tests, inject, restricted, without_functions, without_tests
from m2forge.pipelines.swe.mutation import mutant_key
from m2forge.pipelines.swe.pipeline import _packed_mutants, _packed_runs, _unpacked_mutants, _unpacked_runs
from m2forge.pipelines.swe.task import NUM_RUNS, Observation, observe
from m2forge.pipelines.swe.toolchains.python import Python
from m2forge.pipelines.swe.toolchains.toolchain import Coverage, Environment, Outcomes, TestRun, Toolchain
from m2forge.tasks.folders.task_image import TaskImage
from tests.pipelines.swe import projects

P, F = Outcomes.PASSED, Outcomes.FAILED
FIRST, TOTAL = "tests/test_sums.py::test_first", "tests/test_sums.py::test_total_of_all_numbers"


@pytest.mark.parametrize(
    ("run", "broken"),
    [
        (TestRun({"a": F, "b": P, "c": P, "d": P}), ["a"]),
        (TestRun({"a": P, "b": P, "c": P, "d": P}), None),
        (TestRun({"a": F, "b": F, "c": F, "d": P}), None),
        (TestRun({"a": F, "b": P, "c": P}), None),
        (TestRun({"a": F, "b": P, "c": P, "d": P}, problem="unfinished: timeout"), None),
    ],
)
def test_a_fault_breaks_some_tests_and_not_most(run: TestRun, broken: list[str] | None) -> None:
    assert broken_tests(("a", "b", "c", "d"), run) == broken


def test_failing_functions_are_taken_out_of_visible_tests() -> None:
    source = (
        "import x\n\n@mark\n@other(\n    1\n)\ndef test_a():\n    pass\n\ndef test_b():\n    pass\n\n"
        "class TestC:\n    def test_a(self):\n        pass\n"
    )
    pruned = without_functions(source, {"test_a"})
    ast.parse(pruned)
    assert "test_a" not in pruned
    assert "@mark" not in pruned
    assert "test_b" in pruned
    assert without_functions(source, {"none"}) == source
    assert without_functions("def test_a(", {"test_a"}) == "def test_a("


GO_TESTS = """package p

import (
\t"fmt"
\tstrs "strings"
\t"testing"
)

func TestA(t *testing.T) {
\tfmt.Println(strs.ToUpper("a"))
}

func TestB(t *testing.T) {
\tfmt.Println("b")
}
"""


def test_failing_tests_of_go_leave_with_their_imports() -> None:
    pruned = without_tests("a_test.go", GO_TESTS, {"TestA"})
    assert pruned is not None
    assert "TestA" not in pruned
    assert "strings" not in pruned
    assert '"fmt"' in pruned
    assert "TestB" in pruned
    bare = without_tests("a_test.go", 'package p\n\nimport "testing"\n\nfunc TestA(t *testing.T) {}\n', {"TestA"})
    assert bare is not None
    assert bare.split() == ["package", "p"]
    assert without_tests("a_test.go", GO_TESTS, {"TestC"}) is None


def test_failing_tests_of_rust_leave_with_their_attributes() -> None:
    source = "use a::b;\n\n#[test]\n#[ignore]\nfn one() { b(); }\n\n#[test]\nfn two() {}\n"
    pruned = without_tests("tests/a.rs", source, {"one"})
    assert pruned is not None
    assert pruned.split() == ["use", "a::b;", "#[test]", "fn", "two()", "{}"]
    assert without_tests("tests/a.rs", source, {"three"}) is None


def test_failing_cases_of_javascript_leave_or_all_do() -> None:
    source = "const t = require('t');\nt.test('one', f);\ndescribe('x', () => { it('two', f); it('one', f); });\n"
    expected = "const t = require('t');\n\ndescribe('x', () => { it('two', f);  });\n"
    assert without_tests("test/a.js", source, {"one"}) == expected
    assert without_tests("test/a.js", source, {"made by a loop"}) == ""


def test_a_failing_program_of_c_stays_and_tests_nothing() -> None:
    stub = without_tests("tests/a.c", '#include "b.h"\nint main(void) { return f() != 1; }\n', {"a"})
    assert stub == "int main(void)\n{\n    return 0;\n}\n"
    assert without_tests("tests/part.c", "void f(void) {}\n", {"f"}) is None
    assert without_tests("tests/a.sh", "exit 1\n", {"a"}) is None


@dataclass
class Scripted:
    """A runner whose tests pass where the golden patch is applied."""

    num_runs: int = 0

    async def run(
        self, toolchain: Toolchain, image: TaskImage, patches: Sequence[str], targets: Sequence[str]
    ) -> TestRun:
        self.num_runs += 1
        is_fixed = not patches or len(patches) == 2
        return TestRun({TOTAL: P if is_fixed else F, FIRST: P}, cpu_s=0.5)


def test_known_runs_decide_as_new_ones_do() -> None:
    runner, image = Scripted(), TaskImage("host")
    candidate = projects.candidate()
    plain = asyncio.run(observe(candidate, image, cast("Runner", runner)))
    assert isinstance(plain, Observation)
    assert (runner.num_runs, plain.pass_to_pass) == (2 * NUM_RUNS, (FIRST,))
    after = [asyncio.run(runner.run(candidate.toolchain, image, (), candidate.targets)) for _ in range(NUM_RUNS)]
    before = asyncio.run(runner.run(candidate.toolchain, image, (candidate.test_patch,), candidate.targets))
    runner.num_runs = 0
    known = (_unpacked_runs(_packed_runs([before])), _unpacked_runs(_packed_runs(after)))
    assert asyncio.run(observe(candidate, image, cast("Runner", runner), *known)) == plain
    assert runner.num_runs == NUM_RUNS - 1


def test_a_run_of_more_targets_serves_for_fewer() -> None:
    other = "tests/test_other.py::test_first"
    run = TestRun({FIRST: P, other: F}, cpu_s=0.5)
    assert restricted(run, ("tests/test_sums.py",)) == TestRun({FIRST: P}, cpu_s=0.5)


class Kept:
    """A sandbox that holds one file."""

    text = projects.FIXED

    async def write(self, path: str, content: bytes) -> None:
        self.text = content.decode()


class Executing(Scripted):
    """A runner that calls the functions of the file."""

    async def coverage(self, toolchain: Toolchain, image: TaskImage, target: str) -> Coverage | None:
        return None

    @asynccontextmanager
    async def opened(self, image: TaskImage) -> AsyncIterator[Kept]:
        yield Kept()

    async def run_in(self, toolchain: Toolchain, sandbox: Kept, targets: Sequence[str], limit: MutantLimit) -> TestRun:
        module: dict[str, Any] = {}
        exec(sandbox.text, module)
        outcomes = {}
        for id, name, numbers, wanted in ((FIRST, "first", [4, 5], 4), (TOTAL, "total", [1, 2, 3], 6)):
            await asyncio.sleep(0.001 if "None" in sandbox.text else 0)
            try:
                outcomes[id] = P if module[name](numbers) == wanted else F
            except (TypeError, IndexError):
                outcomes[id] = F
        return TestRun(outcomes)


@pytest.mark.parametrize("num", [1, 2])
def test_bugs_do_not_depend_on_how_many_are_tried_at_once(num: int, monkeypatch: pytest.MonkeyPatch) -> None:
    release = projects.release({**projects.NEW, "setup.py": ""}, "1.1")
    environment = Environment("python", (), (), "3.11")
    runs = (TestRun({FIRST: P, TOTAL: P}),) * NUM_RUNS
    sound = Sound("sums", release, "MIT", Python(), environment, TaskImage("host"), runs)
    found = []
    for num_sandboxes in (1, 2, 5):
        monkeypatch.setattr(injection, "NUM_SANDBOXES", num_sandboxes)
        bugs = asyncio.run(inject(sound, num, cast("Runner", Executing()), random.Random(1)))
        found.append([bug.candidate.id for bug in bugs])
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == num


class Compiled(Python):
    is_compiled = True


class Timed(Executing):
    """A runner that takes less CPU time in the image of trials."""

    @asynccontextmanager
    async def opened(self, image: TaskImage) -> AsyncIterator[Kept]:
        self.image = image.base
        yield Kept()

    async def run_in(
        self, toolchain: Toolchain, sandbox: Kept, targets: Sequence[str], limit: MutantLimit | None
    ) -> TestRun:
        cpu_s = 0.5 if self.image == "trials" else 20.0
        run = await super().run_in(toolchain, sandbox, targets, cast("MutantLimit", limit))
        return replace(run, cpu_s=cpu_s)


def test_limits_go_by_the_image_of_the_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(injection, "NUM_SANDBOXES", 1)
    release = projects.release({**projects.NEW, "setup.py": ""}, "1.1")
    runs, environment = (TestRun({FIRST: P, TOTAL: P}, cpu_s=0.1),) * NUM_RUNS, Environment("python", (), (), "3.11")
    images = TaskImage("release"), runs, TaskImage("trials")
    sound = Sound("sums", release, "MIT", Compiled(), environment, *images)
    runner = Timed()
    (bug,) = asyncio.run(inject(sound, 1, cast("Runner", runner), random.Random(1)))
    assert runner.image == "trials"
    assert [run.cpu_s for run in (*bug.before, *bug.after)] == [20.0, 0.1, 0.1, 0.1]


def test_faults_of_one_line_are_known_mutants_of_each_other() -> None:
    source = "def total(numbers):\n    return sum(numbers)\n\n\ndef first(numbers):\n    return numbers[0] + 0 * 2\n"
    release = projects.release({**projects.NEW, "sums.py": source, "setup.py": ""}, "1.1")
    runs = (TestRun({FIRST: P, TOTAL: P}),) * NUM_RUNS
    sound = Sound("sums", release, "MIT", Python(), Environment("python", (), (), "3.11"), TaskImage("host"), runs)
    bugs = asyncio.run(inject(sound, 20, cast("Runner", Executing()), random.Random(1)))
    faulty = {bug.candidate.id: bug.candidate.base["sums.py"].content.decode() for bug in bugs}
    keys = {id: mutant_key("sums.py", text) for id, text in faulty.items()}
    lines = {bug.candidate.id: bug.candidate.origin["line"] for bug in bugs}
    assert len(set(lines.values())) > 1
    for bug in bugs:
        others = {id for id in keys if id != bug.candidate.id and lines[id] == lines[bug.candidate.id]}
        assert {keys[id] for id in others} <= set(bug.mutants)
        assert keys[bug.candidate.id] not in bug.mutants
        assert not {keys[id] for id in keys if lines[id] != lines[bug.candidate.id]} & set(bug.mutants)
        assert _unpacked_mutants(_packed_mutants(bug.mutants)).keys() == bug.mutants.keys()


class Covering(Executing):
    """A runner that knows what a second target executes: nothing of the source."""

    other = "tests/test_other.py"

    def __init__(self, is_reached: bool) -> None:
        super().__init__()
        self.is_reached, self.targets = is_reached, set[tuple[str, ...]]()

    async def coverage(self, toolchain: Toolchain, image: TaskImage, target: str) -> Coverage | None:
        is_executed = self.is_reached and target != self.other
        return None if is_executed else Coverage({"sums.py": [[(0, len(projects.FIXED), 0)]]}, 0.1)

    async def run_in(self, toolchain: Toolchain, sandbox: Kept, targets: Sequence[str], limit: MutantLimit) -> TestRun:
        self.targets.add(tuple(targets))
        return await super().run_in(toolchain, sandbox, targets, limit)


@pytest.mark.parametrize("is_reached", [True, False])
def test_a_fault_runs_in_targets_that_execute_it(is_reached: bool) -> None:
    release = projects.release({**projects.NEW, "setup.py": ""}, "1.1")
    runs = (TestRun({FIRST: P, TOTAL: P, f"{Covering.other}::test_first": P}),) * NUM_RUNS
    environment = Environment("python", (), (), "3.11")
    sound = Sound("sums", release, "MIT", Python(), environment, TaskImage("host"), runs)
    runner = Covering(is_reached)
    bugs = asyncio.run(inject(sound, 1, cast("Runner", runner), random.Random(1)))
    assert len(bugs) == int(is_reached)
    assert runner.targets == ({("tests/test_sums.py",)} if is_reached else set())
