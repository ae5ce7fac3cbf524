"""Families' code under limits: whatever a verifier does, the caller gets one of the outcomes of the rule, in time."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from m2forge.config import build
from m2forge.errors import DataError, EngineError
from m2forge.records import Submission
from m2forge.tasks.catalog import find_family
from m2forge.tasks.config import CurriculumConfig, FamilyConfig, VerifyConfig
from m2forge.tasks.curriculum import Curriculum
from m2forge.tasks.family import Verdict, VerdictReason
from m2forge.tasks.runner import BrokenVerifierError, LimitError, TaskRunner
from m2forge.tasks.task_set import TaskSet
from tests.tasks.hostile_worker import LOADS, NAME, STARVED_CPU, Hostile
from tests.tasks.stall import MAX_STALL_S, watched_stalls
from tests.tasks.stream import distinct, draw_here
from tests.tasks.test_curriculum import make

T = TypeVar("T")
HOG = f"import os\nos.sched_setaffinity(0, {{{STARVED_CPU}}})\nprint(flush=True)\nwhile True: pass"
TASK = Hostile().draw(1, 0)
COMMAND = (sys.executable, "-m", "tests.tasks.hostile_worker")
TIMEOUT_S = 0.5
NUM_PLAYS = 3
MAX_PASSED_S = 60.0
"""Two tries at a request take 1 s, up to five times as long where they wait for a processor, and a try that waits
longer is repeated. Without a limit an answer would take for ever."""
RAISING = "reasoning-gym:prime_factorization"
"""Its scorer raises at an answer that is no number."""


class LiveRunner:
    """A runner that serves the scenes of several tests, one after another."""

    def __init__(self, loop: asyncio.Runner, runner: TaskRunner) -> None:
        self._loop, self._runner = loop, runner

    def play(self, scene: Callable[[TaskRunner], Awaitable[T]]) -> T:
        """What `scene` gives; the event loop must not stall each time that it is played. It stalls on a busy machine
        too: the process that starts another waits until that one gets a processor."""

        async def watched() -> tuple[T, float]:
            async with watched_stalls() as stalls:
                found = await scene(self._runner)
            return found, max(stalls)

        for _ in range(NUM_PLAYS):
            found, stall_s = self._loop.run(watched())
            if stall_s < MAX_STALL_S:
                return found
        raise AssertionError(f"the event loop stalled for {stall_s:.2f} s")


@contextlib.contextmanager
def live_runner(runner: TaskRunner) -> Iterator[LiveRunner]:
    with asyncio.Runner() as loop:
        loop.run(runner.__aenter__())
        try:
            yield LiveRunner(loop, runner)
        finally:
            loop.run(runner.__aexit__(None, None, None))


@contextlib.contextmanager
def hostile_runner(folder: Path, timeout_s: float = TIMEOUT_S) -> Iterator[LiveRunner]:
    config = VerifyConfig(timeout_s=timeout_s, draw_timeout_s=0.5)
    with live_runner(TaskRunner(config, folder, (NAME,), COMMAND)) as live:
        yield live


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveRunner]:
    """One worker for all tests: what a test does to it, the next one must not notice."""
    with hostile_runner(tmp_path_factory.mktemp("hostile")) as live:
        yield live


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveRunner]:
    """A worker whose limit is no test's subject."""
    with hostile_runner(tmp_path_factory.mktemp("patient"), timeout_s=3.0) as live:
        yield live


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveRunner]:
    """One worker that imports reasoning-gym, with the default of `on_raise`."""
    runner = TaskRunner(VerifyConfig(timeout_s=TIMEOUT_S), tmp_path_factory.mktemp("library"), (RAISING,))
    with live_runner(runner) as live:
        yield live


def compute(seconds: float) -> None:
    until_s = time.thread_time() + seconds
    while time.thread_time() < until_s:
        pass


@contextlib.contextmanager
def hog(seconds: float) -> Iterator[None]:
    """A process that keeps `STARVED_CPU` busy."""
    with subprocess.Popen([sys.executable, "-c", HOG], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        alarm = threading.Timer(seconds, process.kill)
        alarm.start()
        try:
            yield
        finally:
            alarm.cancel()
            process.kill()


@pytest.mark.parametrize("block", [lambda: time.sleep(0.15), lambda: compute(0.15)])
def test_a_verifier_on_the_event_loop_would_be_seen(block: Callable[[], object]) -> None:
    async def scene() -> float:
        async with watched_stalls() as stalls:
            await asyncio.sleep(0.02)
            block()
        return max(stalls)

    assert asyncio.run(scene()) > MAX_STALL_S


@pytest.mark.parametrize("answer", ["loop", "power", "sleep", "grow", "drip", "flood"])
def test_a_verifier_over_a_limit_has_perf_0_and_a_live_worker(hostile: LiveRunner, answer: str) -> None:
    async def scene(runner: TaskRunner) -> tuple[Verdict, float, Verdict, int]:
        await runner.verify(TASK, Submission("fine"))
        started_s = time.monotonic()
        verdict = await runner.verify(TASK, Submission(answer))
        passed_s = time.monotonic() - started_s
        return verdict, passed_s, await runner.verify(TASK, Submission("fine")), runner.max_memory_bytes

    verdict, passed_s, fine, memory = hostile.play(scene)
    assert (verdict.perf, verdict.reason, verdict.evidence["reason"]) == (0.0, VerdictReason.LIMIT, "limit")
    assert passed_s < MAX_PASSED_S
    assert memory < 512 << 20
    assert (fine.perf, fine.reason) == (1.0, VerdictReason.JUDGED)


@pytest.mark.parametrize("answer", ["raise", "exit", "crash", "evidence", "forge"])
def test_a_verifier_that_raises_twice_has_perf_0_and_a_traceback(hostile: LiveRunner, answer: str) -> None:
    verdict = hostile.play(lambda runner: runner.verify(TASK, Submission(answer)))
    assert (verdict.perf, verdict.reason) == (0.0, VerdictReason.VERIFIER_ERROR)
    expected = {
        "raise": "KeyError: 'what the policy wrote'",
        "exit": "SystemExit",
        "crash": "status -11",
        "forge": "for a reply",
    }
    assert expected.get(answer, "xxx") in str(verdict.evidence["traceback"])
    assert len(str(verdict.evidence)) < 10_000


@pytest.mark.parametrize("answer", ["raise", "crash", "sleep", "die", "grow"])
def test_what_fails_once_is_tried_again(patient: LiveRunner, answer: str) -> None:
    async def scene(runner: TaskRunner) -> Verdict:
        await runner.verify(TASK, Submission("fine"))  # so that the worker is not fresh
        return await runner.verify(TASK, Submission(f"{answer} once"))

    assert patient.play(scene).perf == 1.0


def test_a_verifier_that_waits_for_a_processor_is_given_the_time(hostile: LiveRunner) -> None:
    """It needs two thirds of its limit, and shares its processor for thrice its limit."""

    hostile.play(lambda runner: runner.verify(TASK, Submission("fine")))
    with hog(seconds=1.5):
        verdict = hostile.play(lambda runner: runner.verify(TASK, Submission("starve")))
    assert verdict.perf == 1.0


def test_a_verifier_without_cpu_is_retried_and_gives_no_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("m2forge.tasks.runner.MAX_LOST", 2)

    async def scene(runner: TaskRunner) -> None:
        with pytest.raises(EngineError, match=r"2 task workers were lost at one request.*starved"):
            await runner.verify(TASK, Submission("stop"))

    with hostile_runner(tmp_path, timeout_s=0.2) as own:
        own.play(scene)


@pytest.mark.parametrize("difficulty", LOADS)
def test_a_task_that_cannot_be_loaded_is_no_verdict(hostile: LiveRunner, difficulty: int) -> None:
    async def scene(runner: TaskRunner) -> None:
        with pytest.raises(DataError, match="hostile: the data of the task cannot be loaded"):
            await runner.verify(Hostile().draw(difficulty, 0), Submission("fine"))

    hostile.play(scene)


def test_what_a_verifier_prints_is_no_reply(hostile: LiveRunner) -> None:
    assert hostile.play(lambda runner: runner.verify(TASK, Submission("print"))).evidence["pid"] != os.getpid()


def test_a_lost_worker_is_retried_and_never_a_verdict(hostile: LiveRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("m2forge.tasks.runner.MAX_LOST", 3)

    async def scene(runner: TaskRunner) -> None:
        with pytest.raises(EngineError, match="3 task workers were lost"):
            await runner.verify(TASK, Submission("die"))
        pid = (await runner.verify(TASK, Submission("fine"))).evidence["pid"]
        assert isinstance(pid, int)
        # The executor's parent is the worker; both may be killed from outside.
        worker = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        for victim in (pid, worker):
            os.kill(victim, signal.SIGKILL)
            assert (await runner.verify(TASK, Submission("fine"))).perf == 1.0

    hostile.play(scene)


def test_a_verifier_that_raises_for_over_5_percent_ends_the_run(tmp_path: Path) -> None:
    async def scene(runner: TaskRunner) -> None:
        for _ in range(195):
            await runner.verify(TASK, Submission("fine"))
        for _ in range(10):
            assert (await runner.verify(TASK, Submission("raise"))).reason is VerdictReason.VERIFIER_ERROR
        with pytest.raises(BrokenVerifierError, match=r"(?s)11 of the last 200 answers.*what the policy wrote"):
            await runner.verify(TASK, Submission("raise"))

    with hostile_runner(tmp_path) as own:
        own.play(scene)


def test_calls_of_tools_and_draws_are_limited_too(hostile: LiveRunner) -> None:
    async def scene(runner: TaskRunner) -> tuple[str, str, str]:
        with pytest.raises(LimitError, match="hostile: next: no result after"):
            await runner.next_task(NAME, "train", 0, 0, 2, 2)
        with pytest.raises(DataError, match="unknown task family"):
            await runner.next_task("no_such", "train", 0, 0, 1, 1)
        with pytest.raises(LimitError, match="hostile: tools: no result after"):
            await runner.tools(Hostile().draw(3, 0))
        slow, raising = await runner.call(TASK, "loop", {}), await runner.call(TASK, "raise", {})
        return slow.content, raising.content, (await runner.call(TASK, "fine", {})).content

    found = hostile.play(scene)
    assert found == ("error: loop exceeded its limits of time or memory", "error: raise failed", "1.0")


def test_what_a_runner_gives_is_what_the_family_gives(hostile: LiveRunner) -> None:
    family = find_family("copies")

    async def scene(runner: TaskRunner) -> None:
        tasks = await runner.distinct("copies", "held_out", 3, 12, 0, 4)
        assert tasks == distinct(TaskSet(family, "held_out", 3), 12, 0, 4)
        for task in tasks[:4]:
            assert await runner.tools(task) == family.tools(task)
            for name, arguments in (("look", {"key": "3G"}), ("recall", {"key": "3G"}), ("look", {}), ("x", None)):
                called = await runner.call(task, name, arguments)
                assert called.content == family.call(task, name, arguments)
            for answer in ("3G", str(family.verify(task, Submission("")).evidence["expected"]), "\udcff\n"):
                assert await runner.verify(task, Submission(answer)) == family.verify(task, Submission(answer))

    hostile.play(scene)


def test_a_runner_draws_the_batch_of_the_curriculum(hostile: LiveRunner) -> None:
    config: CurriculumConfig = make()

    async def scene(runner: TaskRunner) -> None:
        here, there = Curriculum(config), Curriculum(config)
        for _ in range(5):
            assert await there.draw_batch(runner.next_task) == await here.draw_batch(draw_here)
            assert there.state() == here.state()

    hostile.play(scene)


async def verify_raising(runner: TaskRunner) -> Verdict:
    task = await runner.next_task(RAISING, "train", 0, 0, 0, 0)
    return await runner.verify(task, Submission("I don't know"))


def test_a_raising_library_scorer_is_a_verifier_error_by_default(library: LiveRunner) -> None:
    verdict = library.play(verify_raising)
    assert (verdict.perf, verdict.reason) == (0.0, VerdictReason.VERIFIER_ERROR)
    assert "ValueError" in str(verdict.evidence["traceback"])


def test_a_raising_library_scorer_is_wrong_where_configured(tmp_path: Path) -> None:
    family = {"source": RAISING, "difficulty": [0, 0], "on_raise": "wrong"}
    domain = {"ratio": 1.0, "context": 512, "families": [family]}
    data = {"batch_groups": 1, "stages": [{"name": "only", "domains": {"reasoning": domain}}]}
    config = build(CurriculumConfig, data, origin="test")  # type: ignore[arg-type]  # checked there
    with live_runner(TaskRunner(VerifyConfig(), tmp_path, (RAISING,), wrong_on_raise=config.wrong_on_raise)) as live:
        verdict = live.play(verify_raising)
    assert (verdict.perf, verdict.reason) == (0.0, VerdictReason.JUDGED)
    assert "ValueError" in str(verdict.evidence["error"])


def test_only_library_families_accept_a_raising_verifier() -> None:
    with pytest.raises(ValueError, match="is for families reasoning-gym"):
        FamilyConfig(source="chain", difficulty=(1, 2), on_raise="wrong")


@pytest.mark.parametrize(("dataset", "answer"), [("rush_hour", "A+99999999999"), ("coin_flip", "1e99999999")])
def test_hostile_answers_to_the_librarys_scorers_end_in_time(library: LiveRunner, dataset: str, answer: str) -> None:
    async def scene(runner: TaskRunner) -> tuple[Verdict, float]:
        task = await runner.next_task(f"reasoning-gym:{dataset}", "train", 0, 0, 0, 0)
        started_s = time.monotonic()
        return await runner.verify(task, Submission(answer)), time.monotonic() - started_s

    verdict, passed_s = library.play(scene)
    assert (verdict.perf, verdict.reason) == (0.0, VerdictReason.LIMIT)
    assert passed_s < MAX_PASSED_S
