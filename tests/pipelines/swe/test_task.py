"""Gates of tasks: F2P and P2P, routes, and mutants of changed lines."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import cast

import pytest

from m2forge.pipelines.stage import Rejection
from m2forge.pipelines.swe.candidate import Text
from m2forge.pipelines.swe.environment import MutantLimit, Runner
from m2forge.pipelines.swe.mutation import mutant_key, mutations
from m2forge.pipelines.swe.task import (
    MAX_MUTANTS,
    Mutants,
    Observation,
    Route,
    added_lines,
    choose_mutants,
    compare,
    is_killed,
    is_uncompiled,
    observe,
    route,
    run_mutants,
)
from m2forge.pipelines.swe.toolchains.go import Go
from m2forge.pipelines.swe.toolchains.python import Python
from m2forge.pipelines.swe.toolchains.toolchain import Outcomes, TestRun, Toolchain
from m2forge.protocols import Captured, Command, Outcome, OutcomeReason
from m2forge.tasks.folders.folder import FolderFile
from m2forge.tasks.folders.task_image import TaskImage
from tests.pipelines.swe import projects

P, F, S = Outcomes.PASSED, Outcomes.FAILED, Outcomes.SKIPPED


def runs(*tests: dict[str, Outcomes]) -> list[TestRun]:
    return [TestRun(one) for one in tests]


def observed(before: list[TestRun], after: list[TestRun]) -> Observation:
    found = compare(before, after)
    assert isinstance(found, Observation)
    return found


def test_tests_that_fail_or_are_missing_before_must_pass_after() -> None:
    before = {"new": None, "red": F, "green": P, "skips": S, "breaks": P, "skipped_after": F}
    after = {"new": P, "red": P, "green": P, "skips": P, "breaks": F, "skipped_after": S}
    found = observed(runs(*[{id: one for id, one in before.items() if one is not None}] * 3), runs(*[dict(after)] * 3))
    assert found.fail_to_pass == ("new", "red")
    assert found.pass_to_pass == ("green",)
    assert (found.quarantined, found.num_failing) == ((), 1)


def test_tests_that_differ_in_three_runs_are_quarantined() -> None:
    stable = {"red": F, "green": P}
    before = runs({**stable, "flaky": P}, {**stable, "flaky": F}, {**stable, "flaky": P})
    after = runs(*[{"red": P, "green": P, "flaky": P, "rare": P}] * 2, {"red": P, "green": P, "flaky": P})
    found = observed(before, after)
    assert found.quarantined == ("flaky", "rare")
    assert (found.fail_to_pass, found.pass_to_pass) == (("red",), ("green",))


def test_without_f2p_or_p2p_there_is_no_task() -> None:
    green, red = runs(*[{"a": P}] * 3), runs(*[{"a": F}] * 3)
    for before, after, reason in ((green, green, "no F2P"), (red, green, "no P2P"), (green, red, "no F2P")):
        found = compare(before, after)
        assert isinstance(found, Rejection)
        assert found.reason == reason


def test_routes_follow_errors_names_and_words() -> None:
    candidate = projects.candidate()
    wrong = Observation(("t",), ("p",), (), {"t": "assert 5 == 6"}, 0)
    absent = Observation(("t",), ("p",), (), {"t": "AttributeError: module 'sums' has no attribute 'x'"}, 0)
    assert route(candidate, wrong) is Route.BUG
    assert route(candidate, absent) is Route.FEATURE
    unchanged = Observation((), ("p",), (), {}, 0)
    said = {text: replace(candidate, texts=(Text("commit", text),)) for text in ("Speed up total", "Refactor total")}
    assert [route(one, unchanged) for one in said.values()] == [Route.PERF, Route.REFACTOR]
    # What tests see comes before what is said.
    assert {route(one, wrong) for one in said.values()} == {Route.BUG}
    assert route(replace(candidate, patch=""), unchanged) is Route.TEST
    assert route(replace(candidate, patch=""), wrong) is Route.TEST


class Reporting:
    """A runner whose runs, three after the golden patch and three before it, report this."""

    def __init__(self, *runs: TestRun) -> None:
        self._runs = list(runs)

    async def run(self, *_: object) -> TestRun:
        return self._runs.pop(0)


@pytest.mark.parametrize("number", range(6))
def test_one_run_that_is_cut_by_time_decides_nothing(number: int) -> None:
    old, new = "tests/test_sums.py::test_first", "tests/test_sums.py::test_total_of_all_numbers"
    whole = [TestRun({old: P, new: P})] * 3 + [TestRun({old: P, new: F}, {new: "assert 5 == 6"})] * 3

    def observe_all(runs: Sequence[TestRun]) -> Observation | Rejection:
        runner = cast("Runner", Reporting(*runs))
        return asyncio.run(observe(projects.candidate(), TaskImage("host"), runner))

    assert isinstance(observe_all(whole), Observation)
    whole[number] = TestRun(problem="unfinished: longer than 300 s")
    found = observe_all(whole)
    assert isinstance(found, Rejection)
    assert found.reason == "unfinished"


def test_added_lines_are_those_after_the_patch() -> None:
    patch = projects.candidate().patch
    assert added_lines(patch)["sums.py"] == {2}
    assert added_lines("--- /dev/null\n+++ b/a.py\n@@ -0,0 +1,2 @@\n+x\n+y\n") == {"a.py": {1, 2}}


def test_mutants_are_spread_over_lines_and_repeatable() -> None:
    source = "x = 1 + 2 + 3 + 4 + 5\n" * 3 + "y = 1\n" * 20
    sources, lines = {"a.py": source}, {"a.py": set(range(1, 24))}
    chosen = choose_mutants(sources, lines, "seed")
    assert len(chosen) == MAX_MUTANTS == len({mutation.line for _, mutation in chosen})
    assert chosen == choose_mutants(sources, lines, "seed") != choose_mutants(sources, lines, "other")
    assert len(choose_mutants({"a.py": "x = 1 + 2\n"}, {"a.py": {1}}, "seed")) == len(mutations("a.py", "x = 1 + 2\n"))


def test_a_mutant_dies_by_a_listed_test_alone() -> None:
    listed = Observation(("tests/test_a.py::t",), ("tests/test_a.py::p",), (), {}, 1)
    other = TestRun({"tests/test_a.py::t": P, "tests/test_a.py::old": F}, {"tests/test_a.py::old": "assert 0"})
    assert not is_killed(other, listed)
    assert is_killed(TestRun({"tests/test_a.py::t": F}, {"tests/test_a.py::t": "assert 0"}), listed)
    assert is_killed(TestRun({"tests/test_b.py::x": P}, {"tests.test_a": "collection failure"}), listed)
    assert is_killed(TestRun(problem="no report"), listed)


def test_a_mutant_that_a_compiler_refuses_decides_nothing() -> None:
    listed = Observation(("example.com/a::TestA",), ("example.com/a::TestB",), (), {}, 0)
    refused = TestRun({}, {"example.com/a": "cannot use nil as int"}, problem="no test was reported")
    assert is_uncompiled(refused, listed, Go())
    assert not is_uncompiled(refused, listed, Python())
    assert not is_uncompiled(TestRun({"example.com/a::TestA": F}, {"example.com/a::TestA": "no"}), listed, Go())
    assert not is_uncompiled(TestRun({"example.com/a::TestA": P}), listed, Go())


def test_three_of_five_mutants_must_die() -> None:
    assert Mutants(3, ("a", "b"), 7).is_enough
    assert not Mutants(1, ("a",), 0).is_enough
    assert Mutants(0, (), 2).is_enough


@pytest.mark.parametrize(
    ("killed", "survived", "left", "is_decided"),
    [(2, 0, 1, True), (1, 0, 1, False), (0, 2, 2, True), (0, 2, 3, False), (0, 0, 1, False), (3, 2, 0, True)],
)
def test_mutants_that_change_nothing_are_not_run(killed: int, survived: int, left: int, is_decided: bool) -> None:
    found = Mutants(killed, ("a",) * survived, 0, left)
    assert found.is_decided is is_decided
    # Each of the others may die, survive or decide nothing.
    ends = {
        Mutants(killed + dead, ("a",) * (survived + alive), 0).is_enough
        for dead in range(left + 1)
        for alive in range(left + 1 - dead)
    }
    assert (len(ends) == 1) is is_decided


class Patched:
    """A sandbox with the tree that the golden patch makes."""

    async def run(self, command: Command) -> Outcome:
        return Outcome(OutcomeReason.EXITED, 0, Captured(), Captured(), 0.0, 0.0)

    async def read(self, path: str, max_bytes: int) -> bytes:
        return projects.FIXED.encode()

    async def write(self, path: str, content: bytes) -> None:
        self.text = content.decode()


class Surviving:
    """A runner that records the mutants whose tests it runs; none dies."""

    def __init__(self) -> None:
        self.mutants = list[str]()

    @asynccontextmanager
    async def opened(self, image: TaskImage) -> AsyncIterator[Patched]:
        yield Patched()

    async def run_in(
        self, toolchain: Toolchain, sandbox: Patched, targets: Sequence[str], *, max_failures: int, limit: MutantLimit
    ) -> TestRun:
        self.mutants.append(sandbox.text)
        return TestRun({"tests/test_sums.py::t": P})


@pytest.mark.parametrize("is_alone", [True, False])
def test_the_mutant_that_undoes_the_patch_has_run_before(is_alone: bool) -> None:
    base = projects.FIXED.replace("return sum(numbers)", "return None")
    candidate = projects.candidate()
    change = "-    return None\n+    return sum(numbers)\n"
    patch = f"--- a/sums.py\n+++ b/sums.py\n@@ -1,2 +1,2 @@\n def total(numbers):\n{change}"
    other = "" if is_alone else patch.replace("sums.py", "more.py")
    candidate = replace(candidate, base={**candidate.base, "sums.py": FolderFile(base.encode())}, patch=patch + other)
    failed = {"tests/test_sums.py::t": "assert None == 6"}
    observation = Observation(("tests/test_sums.py::t",), ("tests/test_sums.py::p",), (), failed, 0)
    runner = Surviving()
    mutants = asyncio.run(run_mutants(candidate, observation, TaskImage("host"), cast("Runner", runner)))
    assert (base in runner.mutants) is not is_alone
    assert mutants.killed == int(is_alone)
    assert len(mutants.survived) == len(runner.mutants)


class Total(Patched):
    text = "def total(numbers):\n    return 1 + 2 + 3 + 4\n"

    async def read(self, path: str, max_bytes: int) -> bytes:
        return self.text.encode()


class Counting(Surviving):
    @asynccontextmanager
    async def opened(self, image: TaskImage) -> AsyncIterator[Patched]:
        yield Total()


@pytest.mark.parametrize("num_known", [0, 4, 6, 8])
def test_a_known_run_of_a_mutant_is_not_repeated(num_known: int) -> None:
    change = "-    return 0\n+    return 1 + 2 + 3 + 4\n"
    patch = f"--- a/sums.py\n+++ b/sums.py\n@@ -1,2 +1,2 @@\n def total(numbers):\n{change}"
    candidate = replace(projects.candidate(), patch=patch)
    observation = Observation(("tests/test_sums.py::t",), ("tests/test_sums.py::p",), (), {}, 0)
    chosen = choose_mutants({"sums.py": Total.text}, {"sums.py": {2}}, candidate.id)
    texts = [mutation.apply(Total.text) for _, mutation in chosen]
    assert len(texts) == 8
    died = TestRun({"tests/test_sums.py::t": F}, {"tests/test_sums.py::t": "no"})
    known = {mutant_key("sums.py", text): died for text in texts[8 - num_known :]}
    runner = Counting()
    mutants = asyncio.run(run_mutants(candidate, observation, TaskImage("host"), cast("Runner", runner), known))
    # Five of eight must die.
    assert mutants.is_enough is (num_known > 4)
    assert mutants.killed == min(num_known, 5)
    assert runner.mutants == texts[: {0: 4, 4: 4, 6: 0, 8: 0}[num_known]]
    assert mutants.killed + len(mutants.survived) + mutants.not_run == len(texts)
