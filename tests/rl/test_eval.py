"""Evaluations beside training: their share of the slots, the versions they saw, and what a death leaves of them."""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from m2forge.agents.attempt import AttemptResult, AttemptRunner
from m2forge.files import append_line
from m2forge.pool.pool import PoolWriter
from m2forge.pool.stored import Lease
from m2forge.records import Call, FinishReason, PolicyVersion, Task, Verdict
from m2forge.rl.attempts import Attempts
from m2forge.rl.config import RLConfig
from m2forge.rl.eval import EvalResult, make_attempt, read_attempts, read_results, write_attempts, write_result
from m2forge.rl.layout import Layout, begin_branch
from m2forge.rl.loop import Loop, is_complete
from m2forge.tasks.catalog import find_family
from m2forge.tasks.runner import TaskRunner
from m2forge.tasks.task_set import FamilyInfo, Split, TaskSet, describe
from m2forge.tree.token_tree import TokenTree
from tests.rl.scene import make_config, make_model
from tests.tasks.stream import distinct, draw_here

NUM_JOBS, NUM_TASKS = 8, 24


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("scene"))


def make_run(model: Path, **settings: object) -> RLConfig:
    agent = {"command": ["true"], "jobs_per_worker": NUM_JOBS}
    return make_config(model, agent=agent, eval={"num_tasks": NUM_TASKS, "every_steps": 2, **settings})


class Policy:
    """In place of agents, gateway and trainer: attempts take a moment, and sample from the version that is served."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.gateway = self.tasks = self
        self.num_running = self.most_running = self.num_trained = 0
        self.most_evaluating = self.num_evaluated = 0
        self.step = 0
        self.on_attempt: Callable[[], Awaitable[None]] | None = None

    def serve(self, step: int, branch: str = "") -> None:
        self.step = step
        self.loop.note_served(PolicyVersion("run", step, branch))

    async def push(self, step: int) -> None:
        async with self.loop.evaluations.pin:
            self.serve(step)

    async def attempt(self, *args: object, **kwargs: object) -> AttemptResult:
        """At a held-out task."""
        self.most_evaluating = max(self.most_evaluating, self.loop.slots.num_evaluating)
        await self._work()
        if self.on_attempt is not None:
            await self.on_attempt()
        tree, versions = TokenTree(300), np.full(2, self.step, np.int32)
        ids, logprobs = np.arange(2, dtype=np.int32), np.full(2, -1.0, np.float32)
        tree.add(Call(ids, ids, logprobs, versions, FinishReason.STOP, 0.0, 1.0), "s")
        self.num_evaluated += 1
        return AttemptResult("?", tree, None, Verdict(0.0))

    def delete_soon(self, name: str) -> None:
        pass

    async def describe(self, family: str) -> FamilyInfo:
        return describe(find_family(family))

    async def distinct(self, family: str, split: Split, seed: int, num: int, lowest: int, highest: int) -> list[Task]:
        return distinct(TaskSet(find_family(family), split, seed), num, lowest, highest)

    async def run(self, lease: Lease) -> None:
        """An attempt of training; its group stays unfinished."""
        await self._work()
        self.num_trained += 1
        self.loop.pool.interrupt(lease, "again")

    async def _work(self) -> None:
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        await asyncio.sleep(0.01)
        self.num_running -= 1


def play(config: RLConfig, run_dir: Path, scene: Callable[[Loop, Policy], Awaitable[None]]) -> Policy:
    """`scene` runs beside training."""
    loop = Loop(Layout(run_dir), config)
    policy = Policy(loop)
    policy.serve(0)

    async def run() -> None:
        async with PoolWriter(loop.pool) as writer:
            await loop.evaluations.first(cast(AttemptRunner[TaskRunner], policy))
            background = [
                asyncio.create_task(loop._feed(writer, cast(Attempts, policy), draw_here)),
                asyncio.create_task(loop.evaluations.run_scheduled(cast(AttemptRunner[TaskRunner], policy))),
            ]
            try:
                await scene(loop, policy)
            finally:
                for task in (*background, *loop._running):
                    task.cancel()
                await asyncio.gather(*background, *loop._running, return_exceptions=True)
        loop.pool.close()

    asyncio.run(asyncio.wait_for(run(), 60))
    return policy


async def wait_for(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def test_an_evaluation_shares_slots_and_reports_versions(model: Path, tmp_path: Path) -> None:
    path = Layout(tmp_path).evaluations

    async def scene(loop: Loop, policy: Policy) -> None:
        assert policy.most_evaluating == NUM_JOBS, "before training, all slots are the evaluation's"
        policy.most_evaluating = 0
        await wait_for(lambda: policy.num_trained > NUM_JOBS)
        await policy.push(2)
        await wait_for(lambda: policy.most_evaluating > 0)
        before = policy.num_trained
        await asyncio.sleep(0.05)
        await policy.push(3)
        await wait_for(lambda: len(read_results(path)) == 2)
        assert policy.num_trained > before + NUM_JOBS, "training goes on"

    policy = play(make_run(model), tmp_path, scene)
    assert policy.most_evaluating == 2, "a quarter of eight"
    assert policy.most_running <= NUM_JOBS
    first, second = read_results(path)
    assert (first.step, first.versions) == (0, {"0": 1.0})
    for family, levels in first.by_level.items():
        num_solved = sum(level["num_tasks"] * level["success"] for level in levels.values())
        num_tasks = sum(level["num_tasks"] for level in levels.values())
        assert num_solved / num_tasks == pytest.approx(first.by_family[family])
    assert first.by_level.keys() == first.by_family.keys() != set()
    assert sum(row["num_tasks"] for levels in first.by_level.values() for row in levels.values()) == first.num_tasks
    assert second.step == 2
    assert set(second.versions) == {"2", "3"}
    assert sum(second.versions.values()) == pytest.approx(1.0)


def test_a_pinned_evaluation_sees_one_version(model: Path, tmp_path: Path) -> None:
    path = Layout(tmp_path).evaluations

    async def scene(loop: Loop, policy: Policy) -> None:
        async def goes_on() -> None:
            """No held-out attempt ends before training has gone on."""
            await wait_for(lambda: policy.num_trained > before)

        before, policy.on_attempt = policy.num_trained, goes_on
        await policy.push(2)
        await wait_for(lambda: loop.slots.num_evaluating > 0)
        before = policy.num_trained
        await policy.push(3)
        assert policy.num_evaluated == 2 * NUM_TASKS, "the weight update waits until every attempt is over"
        await wait_for(lambda: len(read_results(path)) == 2)

    play(make_run(model, pin=True), tmp_path, scene)
    assert [(result.step, result.versions) for result in read_results(path)] == [(0, {"0": 1.0}), (2, {"2": 1.0})]


def test_a_pinned_evaluation_repeats_if_a_version_changes(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = Layout(tmp_path).evaluations

    async def scene(loop: Loop, policy: Policy) -> None:
        num_attempts = 0

        async def restart() -> None:
            nonlocal num_attempts
            num_attempts += 1
            if num_attempts == 5:
                policy.serve(3)

        policy.on_attempt = restart
        await policy.push(2)
        await wait_for(lambda: len(read_results(path)) == 2)

    play(make_run(model, pin=True), tmp_path, scene)
    assert [(result.step, result.versions) for result in read_results(path)] == [(0, {"0": 1.0}), (3, {"3": 1.0})]
    assert "a pinned evaluation sampled from versions 2, 3; it is repeated" in caplog.text


def test_a_pinned_evaluation_repeats_if_its_step_changes_branch(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The trainer went back and reached the step again; the sampler that was restarted serves its version of it."""
    path = Layout(tmp_path).evaluations

    async def scene(loop: Loop, policy: Policy) -> None:
        async def restart() -> None:
            if policy.num_evaluated == NUM_TASKS + 5:
                policy.serve(2, "bb")

        policy.on_attempt = restart
        policy.serve(2, "aa")
        await wait_for(lambda: len(read_results(path)) == 2)

    play(make_run(model, pin=True), tmp_path, scene)
    last = read_results(path)[-1]
    assert (last.step, last.branch, last.versions, last.branches) == (2, "bb", {"2": 1.0}, {"2": ["bb"]})
    assert "a pinned evaluation sampled from versions 2-aa, 2-bb; it is repeated" in caplog.text


def test_evaluations_of_lost_weights_are_repeated(model: Path, tmp_path: Path) -> None:
    """Also the last one; and a lost version that is still served is not evaluated."""
    layout = Layout(tmp_path)
    begin_branch(layout.lineage, "aa", 0)

    async def scene(loop: Loop, policy: Policy) -> None:
        async with asyncio.timeout(20):
            policy.serve(2, "aa")
            await wait_for(lambda: len(read_results(layout.evaluations)) == 2)
            begin_branch(layout.lineage, "bb", 1)
            policy.serve(4, "aa")
            await asyncio.sleep(0.1)
            policy.serve(1, "aa")
            policy.serve(2, "bb")
            await wait_for(lambda: len(read_results(layout.evaluations)) == 3)
            policy.serve(4, "bb")
            await wait_for(lambda: len(read_results(layout.evaluations)) == 4)
            begin_branch(layout.lineage, "cc", 3)
            policy.serve(4, "cc")
            for task in loop._running:
                task.cancel()
            loop.slots.end_training()
            await loop.evaluations.last(cast(AttemptRunner[TaskRunner], policy), lambda: True)

    play(make_run(model), tmp_path, scene)
    result = [(result.step, result.branch) for result in read_results(layout.evaluations)]
    assert result == [(0, ""), (2, "aa"), (2, "bb"), (4, "bb"), (4, "cc")]


def test_a_run_is_complete_once_its_last_weights_are_evaluated(model: Path, tmp_path: Path) -> None:
    config, layout = make_run(model), Layout(tmp_path)
    layout.model.mkdir()
    assert not is_complete(layout, config)
    of_before = {"step": 4, "num_tasks": 4, "success": 0.5, "margin": 0.1, "by_family": {}, "num_broken": 0}
    append_line(layout.evaluations, json.dumps(of_before | {"seconds": 1.0}))
    assert is_complete(layout, config), "a line without a branch, of a run that noted none"
    begin_branch(layout.lineage, "aa", 3)
    assert not is_complete(layout, config), "the trainer went back"
    write_result(layout.evaluations, EvalResult(4, 4, 0.5, 0.1, {}, 0, 1.0, branch="aa"))
    assert is_complete(layout, config)


def test_held_out_trajectories_are_encoded_off_the_event_loop(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: dict[str, set[str]] = {}

    def watched(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            threads.setdefault(name, set()).add(threading.current_thread().name)
            return work(*args)

        return run

    monkeypatch.setattr("m2forge.rl.eval.make_attempt", watched("encode", make_attempt))
    monkeypatch.setattr("m2forge.rl.eval.write_attempts", watched("write", write_attempts))

    async def scene(loop: Loop, policy: Policy) -> None:
        assert read_attempts(Layout(tmp_path).eval_attempts)

    play(make_run(model), tmp_path, scene)
    assert set(threads) == {"encode", "write"}
    assert threading.current_thread().name not in threads["encode"] | threads["write"]


def test_an_evaluation_that_was_cut_short_is_made_again(model: Path, tmp_path: Path) -> None:
    path = Layout(tmp_path).evaluations

    async def die(loop: Loop, policy: Policy) -> None:
        policy.serve(2)
        await wait_for(lambda: loop.slots.num_evaluating > 0)

    async def go_on(loop: Loop, policy: Policy) -> None:
        policy.serve(3)
        await wait_for(lambda: len(read_results(path)) == 2)

    play(make_run(model), tmp_path, die)
    assert [result.step for result in read_results(path)] == [0]
    play(make_run(model), tmp_path, go_on)
    assert [result.step for result in read_results(path)] == [0, 3]


def test_the_last_evaluation_waits_and_takes_all_slots(model: Path, tmp_path: Path) -> None:
    path = Layout(tmp_path).evaluations

    async def scene(loop: Loop, policy: Policy) -> None:
        policy.serve(2)
        await wait_for(lambda: loop.slots.num_evaluating > 0)
        policy.serve(4)
        for task in loop._running:
            task.cancel()
        loop.slots.end_training()
        policy.most_evaluating = 0
        await loop.evaluations.last(cast(AttemptRunner[TaskRunner], policy), lambda: True)

    policy = play(make_run(model), tmp_path, scene)
    assert [result.step for result in read_results(path)] == [0, 2, 4]
    assert policy.most_running <= NUM_JOBS
    assert policy.most_evaluating > 2
