"""Programs that live across attempts: many jobs at once, whatever else they print, and whenever they die."""

import asyncio
import sys
from pathlib import Path

import pytest

from m2forge.agents.attempt import Job, JobError, StuckError, WorkerDiedError
from m2forge.agents.config import WorkerConfig
from m2forge.agents.program import from_here
from m2forge.agents.worker_pool import WorkerPool
from m2forge.agents.workspace import Workspace
from m2forge.protocols import Endpoint, Outcome
from m2forge.records import Domain, Task
from m2forge.sandbox.command_worker import ProcessWorker

PROGRAM = """
import json, os, sys
print("hello, this is no answer")
for line in sys.stdin:
    job = json.loads(line)
    if "cancel" in job:
        print(json.dumps({"id": job["id"], "cancelled": True}), flush=True)
        continue
    what = job["task"]["instruction"]
    if what == "die":
        os._exit(3)
    if what == "hang":
        continue
    if what == "complain":
        told = {"error": "I cannot"}
    else:
        told = {"answer": f"{what} by {os.getpid()} at {job['base_url']} with {job['api_key']}"}
    print("[1, 2]\\n" + json.dumps({"id": "somebody else's", "answer": "x"}))
    print(json.dumps({"id": job["id"]} | told), flush=True)
"""
# Does one job after another, and reads nothing meanwhile.
SLEEPING = """
import json, sys, time
for line in sys.stdin:
    job = json.loads(line)
    if "task" in job:
        if job["task"]["instruction"] == "hang":
            time.sleep(60)
        print(json.dumps({"id": job["id"], "answer": job["task"]["instruction"]}), flush=True)
"""
EXITING = """
import sys
sys.stdin.readline()
sys.exit(3)
"""
MALFORMED = """
import json, sys
for line in sys.stdin:
    print("[" * 60_000)
    print('{"id": ' * 500)
    print('{"answer": NaN}')
    sys.stdout.buffer.write(bytes([123, 255, 10]))
    print(json.dumps({"id": json.loads(line)["id"], "answer": "whole"}), flush=True)
"""
ENDPOINT = Endpoint("http://127.0.0.1:1", "key")


def make_task(instruction: str) -> Task:
    return Task("t", Domain.AGENT, instruction)


def make_workers(tmp_path: Path, program: str = PROGRAM, **fields: object) -> WorkerPool:
    config = WorkerConfig(command=(sys.executable, "-c", program), **fields)  # type: ignore[arg-type]  # checked there
    return WorkerPool(config, tmp_path)


async def ask(workers: WorkerPool, id: str, task: Task, endpoint: Endpoint, *, is_exclusive: bool = False) -> str:
    workspace = Workspace(Path(workers._sandboxes[0].workspace).parent / f"attempt-{id}")
    workspace.folder.mkdir(exist_ok=True)
    job = Job(id, task, endpoint, (), workspace)
    return (await workers.attempt(job, is_exclusive=is_exclusive)).text


def test_jobs_are_answered_each_with_its_own_answer(tmp_path: Path) -> None:
    async def scene() -> list[str]:
        async with make_workers(tmp_path, num_workers=2) as workers:
            return await asyncio.gather(*(ask(workers, str(n), make_task(f"job {n}"), ENDPOINT) for n in range(20)))

    answers = asyncio.run(scene())
    assert [answer.partition(" by ")[0] for answer in answers] == [f"job {n}" for n in range(20)]
    assert all(answer.endswith("at http://127.0.0.1:1/v1 with key") for answer in answers)
    assert len({answer.split()[3] for answer in answers}) == 2


@pytest.mark.slow
def test_a_worker_that_dies_fails_its_jobs_and_is_started_again(tmp_path: Path) -> None:
    async def scene() -> str:
        async with make_workers(tmp_path) as workers:
            hanging = asyncio.create_task(ask(workers, "0", make_task("hang"), ENDPOINT))
            await ask(workers, "1", make_task("job"), ENDPOINT)
            with pytest.raises(JobError, match="status 3"):
                await ask(workers, "2", make_task("die"), ENDPOINT)
            with pytest.raises(JobError, match="status 3"):
                await hanging
            return await ask(workers, "3", make_task("again"), ENDPOINT)

    assert asyncio.run(scene()).startswith("again by")


def test_what_an_agent_cannot_do_is_told(tmp_path: Path) -> None:
    async def scene() -> None:
        async with make_workers(tmp_path) as workers:
            with pytest.raises(JobError, match="I cannot"):
                await ask(workers, "0", make_task("complain"), ENDPOINT)

    asyncio.run(scene())


@pytest.mark.slow
def test_an_attempt_ends_with_its_time(tmp_path: Path) -> None:
    async def scene() -> str:
        async with make_workers(tmp_path, timeout_s=3.0) as workers:
            with pytest.raises(TimeoutError):
                await ask(workers, "0", make_task("hang"), ENDPOINT)
            return await ask(workers, "0", make_task("again"), ENDPOINT)

    assert asyncio.run(scene()).startswith("again by")


@pytest.mark.slow
@pytest.mark.parametrize(("num_jobs", "late_s"), [(1, 1.0), (3, 1.0), (3, 0.1)])
def test_healthy_attempts_succeed_behind_one_that_hangs(tmp_path: Path, num_jobs: int, late_s: float) -> None:
    """Also those that were sent with it, whose time runs out with its own."""

    async def scene() -> list[str | BaseException]:
        async with make_workers(tmp_path, SLEEPING, jobs_per_worker=num_jobs, timeout_s=2.0, cancel_s=0.3) as workers:
            hanging = asyncio.create_task(ask(workers, "hanging", make_task("hang"), ENDPOINT))
            await asyncio.sleep(late_s)
            return await asyncio.gather(hanging, *(again(workers, n) for n in range(6)), return_exceptions=True)

    async def again(workers: WorkerPool, n: int) -> str:
        """Jobs that the stuck worker had begin again, as the loop's do."""
        while True:
            try:
                return await ask(workers, f"{n}", make_task(f"job {n}"), ENDPOINT)
            except WorkerDiedError:
                continue

    hung, *answers = asyncio.run(scene())
    # Only of a worker without other jobs is it known which job it is stuck in.
    assert isinstance(hung, StuckError if num_jobs == 1 else WorkerDiedError)
    assert answers == [f"job {n}" for n in range(6)]


@pytest.mark.slow
def test_a_slot_is_free_only_when_the_cancel_is_confirmed(tmp_path: Path) -> None:
    """A worker that confirms keeps its other jobs, and its process."""

    async def scene() -> tuple[str, str]:
        async with make_workers(tmp_path, timeout_s=3.0, jobs_per_worker=1) as workers:
            first = await ask(workers, "0", make_task("job"), ENDPOINT)
            with pytest.raises(TimeoutError) as caught:
                await ask(workers, "1", make_task("hang"), ENDPOINT)
            assert not isinstance(caught.value, StuckError)
            given_up = asyncio.create_task(ask(workers, "2", make_task("hang"), ENDPOINT))
            await asyncio.sleep(0.1)
            given_up.cancel()
            return first, await ask(workers, "3", make_task("job"), ENDPOINT)

    first, last = asyncio.run(scene())
    assert first == last, "the same process answered"


@pytest.mark.slow
def test_a_job_is_over_only_when_nothing_is_left_of_its_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time runs out while what is left of the worker, which died before, is being ended: it died, and did not
    confirm a cancel."""
    is_ended, stop = False, ProcessWorker.stop

    async def stop_slowly(worker: ProcessWorker) -> Outcome:
        nonlocal is_ended
        await asyncio.sleep(4.0)
        outcome = await stop(worker)
        is_ended = True
        return outcome

    monkeypatch.setattr(ProcessWorker, "stop", stop_slowly)

    async def scene() -> None:
        async with make_workers(tmp_path, EXITING, timeout_s=2.0) as workers:
            with pytest.raises(WorkerDiedError):
                await ask(workers, "0", make_task("job"), ENDPOINT)
            assert is_ended

    asyncio.run(scene())


@pytest.mark.slow
def test_a_stuck_worker_takes_no_job_until_it_is_restarted(tmp_path: Path) -> None:
    async def scene() -> str:
        async with make_workers(tmp_path, SLEEPING, timeout_s=4.0, cancel_s=0.5, jobs_per_worker=1) as workers:
            given_up = asyncio.create_task(ask(workers, "0", make_task("hang"), ENDPOINT))
            await asyncio.sleep(0.5)
            given_up.cancel()
            await asyncio.sleep(0)
            return await ask(workers, "1", make_task("job"), ENDPOINT)

    assert asyncio.run(scene()) == "job"


def test_malformed_lines_are_dropped_with_a_counted_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scene() -> list[str]:
        async with make_workers(tmp_path, MALFORMED) as workers:
            return [await ask(workers, str(n), make_task("job"), ENDPOINT) for n in range(4)]

    assert asyncio.run(scene()) == ["whole"] * 4
    assert [record.getMessage().rpartition("; ")[2] for record in caplog.records] == ["1 so far", "10 so far"]


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [1, 3])
def test_a_program_that_cannot_start_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, num_workers: int
) -> None:
    monkeypatch.setattr("m2forge.agents.worker_pool.RESTART_S", 0.0)

    async def scene() -> None:
        async with make_workers(tmp_path, "import no_such_module", num_workers=num_workers) as workers:
            with pytest.raises(
                JobError, match=f"{10 * num_workers} times .* No module named 'no_such_module'; make sure"
            ):
                await workers.watch()
            with pytest.raises(JobError, match="no_such_module"):
                await ask(workers, "1", make_task("job"), ENDPOINT)

    asyncio.run(scene())
    assert len(caplog.records) == 1, "what it says each time is told once"


def test_a_program_that_answers_now_and_then_is_not_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("m2forge.agents.worker_pool.RESTART_S", 0.0)
    monkeypatch.setattr("m2forge.agents.worker_pool.MAX_DEATHS", 2)

    async def scene() -> None:
        async with make_workers(tmp_path) as workers:
            watching = asyncio.create_task(workers.watch())
            for n in range(4):
                with pytest.raises(JobError, match="status 3"):
                    await ask(workers, "0", make_task("die"), ENDPOINT)
                await ask(workers, str(n), make_task("job"), ENDPOINT)
            assert not watching.done()
            watching.cancel()

    asyncio.run(scene())
    assert len(caplog.records) == 4, "each death is told"


@pytest.mark.slow
def test_the_time_of_an_attempt_begins_when_there_is_a_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("m2forge.agents.worker_pool.RESTART_S", 3.0)

    async def scene() -> str:
        async with make_workers(tmp_path, timeout_s=3.0) as workers:
            with pytest.raises(JobError, match="status 3"):
                await ask(workers, "0", make_task("die"), ENDPOINT)
            return await ask(workers, "1", make_task("job"), ENDPOINT)

    assert asyncio.run(scene()).startswith("job by")


def test_a_path_is_taken_from_where_the_loop_was_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agents").mkdir()
    (tmp_path / "agents" / "one.py").touch()
    (tmp_path / "python").touch()
    (tmp_path / "agent.py").touch()
    words = ("python", "agents/one.py", "agent.py", "-m", "agents.one", "agents/two.py", "agents")
    assert from_here(words) == (
        "python",
        str(tmp_path / "agents" / "one.py"),
        str(tmp_path / "agent.py"),
        "-m",
        "agents.one",
        "agents/two.py",
        "agents",
    )


@pytest.mark.slow
def test_a_job_alone_shares_its_worker_with_none(tmp_path: Path) -> None:
    async def scene() -> None:
        async with make_workers(tmp_path, timeout_s=3.0) as workers:
            before = asyncio.create_task(ask(workers, "before", make_task("hang"), ENDPOINT))
            await asyncio.sleep(0.5)
            alone = asyncio.create_task(ask(workers, "alone", make_task("die"), ENDPOINT, is_exclusive=True))
            await asyncio.sleep(0)
            after = asyncio.create_task(ask(workers, "after", make_task("job"), ENDPOINT))
            with pytest.raises(TimeoutError):  # and not by the death
                await before
            with pytest.raises(WorkerDiedError, match="status 3"):
                await alone
            assert (await after).startswith("job by")

    asyncio.run(scene())
