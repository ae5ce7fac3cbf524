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


def run(folder: Path, scene: Callable[[TaskRunner], Awaitable[T]], **fields: object) -> T:
    """What `scene` gives; the event loop must not have stalled."""
    config = VerifyConfig(**{"timeout_s": 0.5, **fields})  # type: ignore[arg-type]  # checked there

    async def watched() -> T:
        async with TaskRunner(config, folder, (NAME,), COMMAND) as runner, watched_stalls() as stalls:
            found = await scene(runner)
        assert max(stalls) < MAX_STALL_S
        return found

    return asyncio.run(watched())


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


@pytest.mark.parametrize("block", [lambda: time.sleep(0.15), lambda: sum(range(30_000_000))])
def test_a_verifier_on_the_event_loop_would_be_seen(block: Callable[[], object]) -> None:
    async def scene() -> float:
        async with watched_stalls() as stalls:
            await asyncio.sleep(0.02)
            block()
        return max(stalls)

    assert asyncio.run(scene()) > MAX_STALL_S


@pytest.mark.parametrize("answer", ["loop", "power", "sleep", "grow", "drip", "flood"])
def test_a_verifier_over_a_limit_has_perf_0_and_a_live_worker(tmp_path: Path, answer: str) -> None:
    async def scene(runner: TaskRunner) -> tuple[Verdict, float, Verdict, int]:
        await runner.verify(TASK, Submission("fine"))
        started_s = time.monotonic()
        verdict = await runner.verify(TASK, Submission(answer))
        passed_s = time.monotonic() - started_s
        return verdict, passed_s, await runner.verify(TASK, Submission("fine")), runner.max_memory_bytes

    verdict, passed_s, fine, memory = run(tmp_path, scene)
    assert (verdict.perf, verdict.reason, verdict.evidence["reason"]) == (0.0, VerdictReason.LIMIT, "limit")
    assert passed_s < 2.0
    assert memory < 512 << 20
    assert (fine.perf, fine.reason) == (1.0, VerdictReason.JUDGED)


@pytest.mark.parametrize("answer", ["raise", "exit", "crash", "evidence", "forge"])
def test_a_verifier_that_raises_twice_has_perf_0_and_a_traceback(tmp_path: Path, answer: str) -> None:
    verdict = run(tmp_path, lambda runner: runner.verify(TASK, Submission(answer)))
    assert (verdict.perf, verdict.reason) == (0.0, VerdictReason.VERIFIER_ERROR)
    expected = {
        "raise": "KeyError: 'what the policy wrote'",
        "exit": "SystemExit",
        "crash": "status -11",
        "forge": "for a reply",
    }
    assert expected.get(answer, "xxx") in str(verdict.evidence["traceback"])
    assert len(str(verdict.evidence)) < 10_000


@pytest.mark.parametrize("answer", ["raise once", "crash once", "sleep once", "die once", "grow once"])
def test_what_fails_once_is_tried_again(tmp_path: Path, answer: str) -> None:
    async def scene(runner: TaskRunner) -> Verdict:
        await runner.verify(TASK, Submission("fine"))  # so that the worker is not fresh
        return await runner.verify(TASK, Submission(answer))

    assert run(tmp_path, scene).perf == 1.0


def test_a_verifier_that_waits_for_a_processor_is_given_the_time(tmp_path: Path) -> None:
    """It needs two thirds of its limit, and shares its processor for thrice its limit."""

    async def scene(runner: TaskRunner) -> Verdict:
        await runner.verify(TASK, Submission("fine"))
        with hog(seconds=1.5):
            return await runner.verify(TASK, Submission("starve"))

    assert run(tmp_path, scene).perf == 1.0


def test_a_verifier_without_cpu_is_retried_and_gives_no_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("m2forge.tasks.runner.MAX_LOST", 2)

    async def scene(runner: TaskRunner) -> None:
        with pytest.raises(EngineError, match=r"2 task workers were lost at one request.*starved"):
            await runner.verify(TASK, Submission("stop"))

    run(tmp_path, scene, timeout_s=0.2)


@pytest.mark.parametrize("difficulty", LOADS)
def test_a_task_that_cannot_be_loaded_is_no_verdict(tmp_path: Path, difficulty: int) -> None:
    async def scene(runner: TaskRunner) -> None:
        with pytest.raises(DataError, match="hostile: the data of the task cannot be loaded"):
            await runner.verify(Hostile().draw(difficulty, 0), Submission("fine"))

    run(tmp_path, scene, draw_timeout_s=0.5)


def test_what_a_verifier_prints_is_no_reply(tmp_path: Path) -> None:
    assert run(tmp_path, lambda runner: runner.verify(TASK, Submission("print"))).evidence["pid"] != os.getpid()


def test_a_lost_worker_is_retried_and_never_a_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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

    run(tmp_path, scene)


def test_a_verifier_that_raises_for_over_5_percent_ends_the_run(tmp_path: Path) -> None:
    async def scene(runner: TaskRunner) -> None:
        for _ in range(195):
            await runner.verify(TASK, Submission("fine"))
        for _ in range(10):
            assert (await runner.verify(TASK, Submission("raise"))).reason is VerdictReason.VERIFIER_ERROR
        with pytest.raises(BrokenVerifierError, match=r"(?s)11 of the last 200 answers.*what the policy wrote"):
            await runner.verify(TASK, Submission("raise"))

    run(tmp_path, scene)


def test_calls_of_tools_and_draws_are_limited_too(tmp_path: Path) -> None:
    async def scene(runner: TaskRunner) -> tuple[str, str, str]:
        with pytest.raises(LimitError, match="hostile: next: no result after"):
            await runner.next_task(NAME, "train", 0, 0, 2, 2)
        with pytest.raises(DataError, match="unknown task family"):
            await runner.next_task("no_such", "train", 0, 0, 1, 1)
        with pytest.raises(LimitError, match="hostile: tools: no result after"):
            await runner.tools(Hostile().draw(3, 0))
        slow, raising = await runner.call(TASK, "loop", {}), await runner.call(TASK, "raise", {})
        return slow.content, raising.content, (await runner.call(TASK, "fine", {})).content

    found = run(tmp_path, scene, draw_timeout_s=1.0)
    assert found == ("error: loop exceeded its limits of time or memory", "error: raise failed", "1.0")


def test_what_a_runner_gives_is_what_the_family_gives(tmp_path: Path) -> None:
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

    run(tmp_path, scene)


def test_a_runner_draws_the_batch_of_the_curriculum(tmp_path: Path) -> None:
    config: CurriculumConfig = make()

    async def scene(runner: TaskRunner) -> None:
        here, there = Curriculum(config), Curriculum(config)
        for _ in range(5):
            assert await there.draw_batch(runner.next_task) == await here.draw_batch(draw_here)
            assert there.state() == here.state()

    run(tmp_path, scene)


@pytest.mark.parametrize("is_accepted", [False, True])
def test_a_raising_library_scorer_is_a_verifier_error_by_default(tmp_path: Path, is_accepted: bool) -> None:
    name = "reasoning-gym:prime_factorization"
    family = {"source": name, "difficulty": [0, 0], **({"on_raise": "wrong"} if is_accepted else {})}
    domain = {"ratio": 1.0, "context": 512, "families": [family]}
    data = {"batch_groups": 1, "stages": [{"name": "only", "domains": {"reasoning": domain}}]}
    config = build(CurriculumConfig, data, origin="test")  # type: ignore[arg-type]  # checked there

    async def scene() -> Verdict:
        async with TaskRunner(VerifyConfig(), tmp_path, wrong_on_raise=config.wrong_on_raise) as runner:
            task = await runner.next_task(name, "train", 0, 0, 0, 0)
            return await runner.verify(task, Submission("I don't know"))

    verdict = asyncio.run(scene())
    assert verdict.perf == 0
    assert verdict.reason is (VerdictReason.JUDGED if is_accepted else VerdictReason.VERIFIER_ERROR)
    assert "ValueError" in str(verdict.evidence["error" if is_accepted else "traceback"])


def test_only_library_families_accept_a_raising_verifier() -> None:
    with pytest.raises(ValueError, match="is for families reasoning-gym"):
        FamilyConfig(source="chain", difficulty=(1, 2), on_raise="wrong")


@pytest.mark.parametrize(("dataset", "answer"), [("rush_hour", "A+99999999999"), ("coin_flip", "1e99999999")])
def test_hostile_answers_to_the_librarys_scorers_end_in_time(tmp_path: Path, dataset: str, answer: str) -> None:
    async def scene() -> tuple[Verdict, float]:
        async with TaskRunner(VerifyConfig(timeout_s=0.5), tmp_path) as runner:
            task = await runner.next_task(f"reasoning-gym:{dataset}", "train", 0, 0, 0, 0)
            started_s = time.monotonic()
            return await runner.verify(task, Submission(answer)), time.monotonic() - started_s

    verdict, passed_s = asyncio.run(scene())
    assert (verdict.perf, verdict.reason) == (0.0, VerdictReason.LIMIT)
    assert passed_s < 2.0
