"""The RL stage: a model folder and a configuration in, a trained model folder out; opens or resumes the run.

`train_rl` and `run_rl` start a `Loop`. It keeps the queue filled, the agents busy, the sampler on the newest weights,
and the processes alive:

    curriculum → pool → agents → gateway → sampler
                  ↓                           ↑ weights
               trainer ───────────────────────┘

Everything that must outlive the loop is on disk: the pool, the journals, the weights, the checkpoints. If it is killed,
the other processes and the agents die with it; after a restart, in-flight attempts restart with new API keys, and the
old keys are refused. Pass rates recorded since the last tasks were queued are lost.

With `cluster.agent_hosts` the training attempts run in agent hosts (`rl/host.py`). They, gateway and sampler belong to
a keeper (`cluster/keeper.py`) and keep running without the loop; a resumed one finds them and rewards what they stored.

`Supply` draws a batch of tasks from the curriculum whenever the queue has room for one. It replaces a group that is
dropped before training (no signal, too many failed attempts, too stale, too slow) by another task of the same stage and
domain. So training takes exactly the number of units that were drawn for a stage, and both change the stage after the
same batch. The curriculum's state is stored in one transaction with the tasks that it drew, so that none is skipped or
drawn twice.

`View` shows progress in the terminal: steps, queue and window, tokens/s, rewards, staleness, trainer utilization.
"""

# Reading path: rl. An RL step in the loop's process; an attempt's completions are the path `chat`.
# The files that run, in reading order; dev/paths.py compares this list with a trace:
#     rl/loop.py                        the loop: queue, attempts, weights, progress
#     tasks/curriculum.py               which tasks come next
#     tasks/runner.py                   draws and verifies tasks in worker processes
#     tasks/family.py                   a family's tasks and verdicts
#     pool/queue.py                     groups queued and leased
#     pool/lifecycle.py                 states of episodes and units
#     rl/attempts.py                    attempts, from lease to reward
#     agents/attempt.py                 one attempt: workspace, episode, agent, verdict
#     agents/workspace.py               its folders
#     rl/gateway_admin.py               keys and records of attempts
#     agents/worker_pool.py             agents in worker processes, and the sockets of their sandboxes
#     sandbox/stream.py                 a worker's standard streams
#     tree/codec.py                     the tree that the gateway sends
#     reward/judge.py                   rewards of a group
#     reward/rule.py                    process reward of a step
#     rl/weight_updates.py              the newest version to the samplers
#     weights/store.py                  published policy versions
#     pool/batch.py                     which lineage the sampler serves, after a weight update

import asyncio
import contextlib
import json
import logging
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

from m2forge.agents.attempt import AttemptRunner
from m2forge.agents.workspace import SandboxCounts, Workspaces
from m2forge.cluster.launcher import Launched, Launcher, Role
from m2forge.config import Setting, build, load, to_overrides
from m2forge.files import write_atomic
from m2forge.gateway.format import load_format
from m2forge.loop_thread import run_anywhere
from m2forge.model.config_file import read_config
from m2forge.model.hub import find_folder, pinned
from m2forge.observe.metrics import FILE_NAME, StepMetrics, read_last_step
from m2forge.observe.progress import progress
from m2forge.observe.tracker import require_writers
from m2forge.pool.lifecycle import StateError, UnitState
from m2forge.pool.pool import Pool, PoolWriter
from m2forge.pool.stored import Lease, Queued
from m2forge.records import PolicyVersion, Task
from m2forge.reward.judge import Judge
from m2forge.rl.attempts import (
    AttemptCounts,
    Attempts,
    JudgedAttempts,
    Leasing,
    Slots,
    add_counts,
    attempt_sandbox,
    cancel_all,
    counts_path,
    open_agent,
    renew_leases,
    require_agent,
)
from m2forge.rl.child_main import MODULE
from m2forge.rl.config import RLConfig
from m2forge.rl.deployed import DeployedEpisodes, keep_address
from m2forge.rl.eval import EvalResult, Evaluations, read_results
from m2forge.rl.gateway_admin import Gateways, home_of
from m2forge.rl.host import delete_ended, open_gateways, open_tasks
from m2forge.rl.layout import Layout, host_names, read_lineage
from m2forge.rl.preflight import require_start
from m2forge.rl.servers import Server, Servers, launch_trainer, make_servers, open_launchers, require_cluster
from m2forge.rl.weight_updates import WeightUpdates
from m2forge.tasks.curriculum import Curriculum, Draw, Families
from m2forge.tasks.survey import survey
from m2forge.tasks.task_set import FamilyInfo
from m2forge.text.format import make_format
from m2forge.text.tokenizer import load_tokenizer
from m2forge.train.position import begun_phase, newest_checkpoint, read_position
from m2forge.train.run_dir import CONFIG_FILE, hold_run, open_run

WORKER = "loop"
"""Name under which the loop holds leases; a run has one loop."""
POLL_S = 0.02
HOSTED_POLL_S = 0.5
"""Poll interval for room in the queue and for complete groups, if agent hosts run the attempts."""
VIEW_S = 1.0
"""Time between two updates of the terminal's progress view."""
_log = logging.getLogger(__name__)


def train_rl(
    config: str | PathLike[str] | Mapping[str, Setting] | RLConfig,
    *,
    runs: str | PathLike[str] = "runs",
    **overrides: Setting,
) -> tuple[Path, list[EvalResult]]:
    """Run `m2forge rl` from Python: `train_rl("rl.toml", num_steps=20, policy={"pack_tokens": 4096})`.

    `config`: a TOML file, its content as a mapping, or a `RLConfig`. `overrides`: config keys, as with `--set`; a
    mapping overrides keys inside a table. Returns the finished model's folder and the evaluations; a run that already
    exists in `runs` is resumed. Ctrl-C stops the run; the same call resumes it."""
    settings = list(to_overrides(overrides))
    if isinstance(config, RLConfig):
        values = config.model_dump(mode="json", exclude_unset=True, exclude_none=True)
        values["agent"]["kind"] = config.agent.kind
        resolved = build(RLConfig, values, settings, origin="train_rl")
    elif isinstance(config, Mapping):
        resolved = build(RLConfig, {}, [*to_overrides(config), *settings], origin="train_rl")
    else:
        resolved = load(RLConfig, Path(config), settings)
    return run_rl(resolved, Path(runs))


def run_rl(config: RLConfig, runs: Path) -> tuple[Path, list[EvalResult]]:
    """Start or resume the run that `config` describes; returns the finished model's folder and its evaluations."""
    require_writers(config.train.metrics)
    trainer_nodes = require_cluster(config, runs)
    run_anywhere(require_agent(config.agent))
    families = survey_tasks(config)
    run_dir = runs / config.name
    config = pinned(config, run_dir / CONFIG_FILE)
    layout, folder = Layout(run_dir), find_folder(config.model, config.revision)
    # A chat template that cannot be used is refused before anything is written.
    load_format(folder, config.gateway)
    if not (run_dir / CONFIG_FILE).exists():
        require_start(config, layout, read_config(folder), trainer_nodes)
    with hold_run(run_dir):
        open_run(run_dir, config, begun_phase(layout.checkpoints))
        if not is_complete(layout, config):
            run_anywhere(Loop(layout, config, families).run())
    return layout.model, read_results(layout.evaluations)


def survey_tasks(config: RLConfig) -> dict[str, FamilyInfo]:
    """Facts about each family of the curriculum; raises if the run could not draw its tasks."""
    found: dict[str, FamilyInfo] = {}

    async def collect() -> None:
        evaluation = config.eval
        reward = config.reward.function
        found.update(await survey(config.curriculum, config.verify, evaluation.num_tasks, evaluation.seed, reward))

    run_anywhere(collect())
    return found


def is_complete(layout: Layout, config: RLConfig) -> bool:
    """Whether the finished model is written and evaluated; an evaluation of a lost version of the last step does not
    count."""
    lineage, step = read_lineage(layout.lineage), config.num_steps
    results = read_results(layout.evaluations)
    is_evaluated = any(result.step == step and lineage.holds(step, result.branch) for result in results)
    return layout.model.is_dir() and (is_evaluated or not config.eval.num_tasks)


class Loop:
    def __init__(self, layout: Layout, config: RLConfig, families: Families | None = None) -> None:
        """`families`: as `survey_tasks` finds them; None: all are embedded."""
        self.config, self.layout = config, layout
        folder = find_folder(config.model, config.revision)
        self.pool = Pool(self.layout.pool(config.pool), read_config(folder).vocab_size)
        self._refuse_lost_commits()
        self.weights = self.layout.weight_store(config)
        state = json.loads(self.pool.note() or "{}")
        self.curriculum = Curriculum(config.curriculum, families=families, state=state.get("curriculum"))
        self.judge = Judge(config.reward, base_times=state.get("base_times"))
        self.format = make_format(config.gateway.format, load_tokenizer(folder))
        self._served: list[PolicyVersion] = []
        self.slots = Slots(config.agent.num_jobs, config.eval.share)
        self.evaluations = Evaluations(config, layout, self.slots, self._served)
        self._poll_s = HOSTED_POLL_S if config.cluster.agent_hosts else POLL_S
        self.updates = WeightUpdates(self.weights, self.pool, self.evaluations.pin, self.note_served, layout)
        self._running: dict[asyncio.Task[None], Lease] = {}

    @property
    def served(self) -> PolicyVersion | None:
        """The last version that all samplers are known to serve."""
        return self._served[-1] if self._served else None

    def note_served(self, version: PolicyVersion) -> None:
        if version != self.served:
            self._served.append(version)

    def _refuse_lost_commits(self) -> None:
        newest = newest_checkpoint(self.layout.checkpoints)
        if newest is None:
            return
        try:
            self.pool.refuse_behind(PolicyVersion(self.config.name, read_position(newest).step))
        except StateError:
            self.pool.close()
            raise

    async def run(self) -> None:
        """Run until the trainer has made all its steps and the last evaluation is done. If interrupted, it stops
        everything that it started before it raises."""
        background: set[asyncio.Task[None]] = set()
        own, launcher = open_launchers(self.config, self.layout)
        launched: list[Launched] = []
        try:
            with _terminated_as_interrupted():
                is_done = partial(is_trained, self.layout, self.config)
                trainer, *trainer_nodes = await launch_trainer(own, self.config, self.layout, is_done)
                launched += trainer, *trainer_nodes
                servers = await make_servers(launcher, self.layout, self.config)
                launched += [server.child for server in reversed(servers.all)]
                self.layout.remove_other_journals(self.config.cluster)
                training = self._start(background, trainer.supervise())
                for node in trainer_nodes:
                    self._start(background, node.supervise())
                await self._while_alive(background, self._wait_for_weights())
                for server in servers.all:
                    self._start(background, server.child.supervise())
                if self.config.pool.admit_deployed:
                    self._start(background, keep_address(self.layout.gateway, servers.gateways[0]))
                keys = [gateway.key for gateway in servers.gateways]
                urls = [partial(_url, gateway.child) for gateway in servers.gateways]
                async with (
                    open_gateways(self.config, urls, keys) as gateways,
                    open_agent(self.config.agent, self._own(self.layout.agents), self.format) as agent,
                    open_tasks(self.config, self._own(self.layout.run_dir / "verify")) as runner,
                    PoolWriter(self.pool) as writer,
                ):
                    workspaces = Workspaces(self._own(self.layout.workspaces), attempt_sandbox(self.config.agent))
                    attempt_runner = AttemptRunner(agent, gateways, runner, workspaces, partial(count_starts, servers))
                    async with JudgedAttempts(
                        attempt_runner, self.pool, writer, self.judge, self.format, self._note_group
                    ) as attempts:
                        try:
                            hosts = await self._launch_hosts(launcher, keys)
                            await self._roll_out(
                                background, training, servers.samplers, hosts, attempts, writer, gateways
                            )
                        finally:
                            # Before the resources that they use are closed.
                            await cancel_all(background | set(self._running))
        finally:
            await cancel_all(background)
            await asyncio.gather(*(child.stop() for child in launched))
            await launcher.close()
            if own is not launcher:
                await own.close()
            self.layout.gateway.unlink(missing_ok=True)
            self.pool.close()

    def _own(self, folder: Path) -> Path:
        """The loop's part of a folder that it shares with agent hosts."""
        return folder / WORKER if self.config.cluster.agent_hosts else folder

    async def _launch_hosts(self, launcher: Launcher, keys: Sequence[str]) -> list[Launched]:
        commands = {name: (MODULE, "host", str(self.layout.run_dir), name) for name in host_names(self.config.cluster)}
        return [await launcher.launch(Role(name, command, tuple(keys))) for name, command in commands.items()]

    async def _roll_out(
        self,
        background: set[asyncio.Task[None]],
        training: asyncio.Task[None],
        samplers: Sequence[Server],
        hosts: Sequence[Launched],
        attempts: JudgedAttempts,
        writer: PoolWriter,
        gateways: Gateways,
    ) -> None:
        runner = attempts.runner
        self._start(background, runner.agent.watch())
        for admin in gateways.admins:
            await self._while_alive(background, admin.wait_until_up())
        await self._take_over(writer, gateways)
        await attempts.judge_complete()
        self._start(background, self.updates.run(samplers, writer))
        for host in hosts:
            self._start(background, host.supervise())
        await self._while_alive(background, self.evaluations.first(runner))
        self._start(background, self._renew(writer))
        view = View(self.layout, self.config, self.pool, attempts.counts, runner.workspaces.counts)
        self._start(background, view.show(writer))
        self._start(background, attempts.judge_ended(self._poll_s if hosts else None))
        feeding = {self._start(background, self._feed(writer, attempts, runner.tasks.next_task))}
        if self.config.pool.admit_deployed:
            deployed = DeployedEpisodes(self.config, self.layout.journal, gateways.admins[0], self.pool, writer)
            feeding.add(self._start(background, deployed.watch()))
        self._start(background, self.evaluations.run_scheduled(runner))
        await self._while_alive(background - {training}, training)
        await cancel_all(feeding | set(self._running))
        await self._stop_hosts(hosts, writer, gateways)
        self.slots.end_training()
        last = self.evaluations.last(runner, self._serves_newest)
        await self._while_alive(background - {training, *feeding}, last)

    async def _stop_hosts(self, hosts: Sequence[Launched], writer: PoolWriter, gateways: Gateways) -> None:
        """Stop the hosts once training is over, and delete the episodes of what they still attempted."""
        await asyncio.gather(*(host.stop() for host in hosts))
        for host in hosts:
            await writer.run(self.pool.release, host.name)
        if hosts:
            await self._delete_ended(writer, gateways, with_evaluations=False)

    async def _delete_ended(self, writer: PoolWriter, gateways: Gateways, *, with_evaluations: bool) -> None:
        journals = self.layout.journals(self.config.cluster)
        await delete_ended(journals, self.pool, writer, gateways, with_evaluations=with_evaluations)

    def _start(self, background: set[asyncio.Task[None]], work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a background task."""
        task = asyncio.create_task(work)
        background.add(task)
        return task

    async def _while_alive(
        self, background: set[asyncio.Task[None]], work: Coroutine[Any, Any, None] | asyncio.Task[None]
    ) -> None:
        """Wait for `work`; raises if a background task fails meanwhile."""
        task = work if isinstance(work, asyncio.Task) else asyncio.create_task(work)
        try:
            while not task.done():
                await asyncio.wait({task, *background}, return_when=asyncio.FIRST_COMPLETED)
                for other in [other for other in background if other.done()]:
                    background.discard(other)
                    other.result()
            task.result()
        finally:
            await cancel_all({task})

    async def _feed(self, writer: PoolWriter, attempts: Attempts, draw: Draw) -> None:
        """Fill the queue; unless agent hosts run them, start attempts on every free slot."""
        leasing = Leasing(WORKER, self.pool, writer, attempts, self.slots, self._running)
        supply = Supply(self.config, self.pool, writer, self.curriculum, draw, self._note)
        self.slots.is_training = True
        while True:
            is_filled = await supply.fill()
            if not self.config.cluster.agent_hosts:
                await leasing.fill(is_due=is_filled)
            await asyncio.sleep(self._poll_s)

    def _note(self) -> str:
        base_times = self.judge.base_times() if self.config.reward.beta else {}
        return json.dumps({"curriculum": self.curriculum.state(), "base_times": base_times})

    async def _renew(self, writer: PoolWriter) -> None:
        while True:
            await asyncio.sleep(self.config.pool.lease_s / 4)
            await renew_leases(self.pool, writer, self._running)
            await writer.run(self.pool.requeue_expired)
            while await writer.run(self.pool.sweep):
                await asyncio.sleep(0)

    async def _wait_for_weights(self) -> None:
        while self.weights.newest() is None:
            await asyncio.sleep(POLL_S)

    async def _take_over(self, writer: PoolWriter, gateways: Gateways) -> None:
        """Release the leases of a loop that died and of hosts that this run no longer has, so that their attempts
        restart, and delete their episodes at the gateways, including those already stored in the pool; their keys are
        then refused. Hosts release their own leases when they start; those that outlived the loop keep them."""
        workers = set((await writer.run(self.pool.running)).values())
        for worker in workers - {*host_names(self.config.cluster)}:
            await writer.run(self.pool.release, worker)
        await self._delete_ended(writer, gateways, with_evaluations=True)

    def _note_group(self, task: Task, pass_rate: float) -> None:
        before = self.curriculum.levels()
        self.curriculum.record(task, pass_rate)
        for name, (lowest, highest) in self.curriculum.levels().items():
            if before[name] != (lowest, highest):
                _log.info("%s: the curriculum now draws tasks of difficulty %d to %d", name, lowest, highest)

    def _serves_newest(self) -> bool:
        # Compare the whole version: the sampler may still serve a lost version with the same step.
        newest = self.weights.newest()
        return newest is not None and newest[0] == self.served


def _url(process: Launched) -> str:
    return process.url


def count_starts(servers: Servers, attempt: str) -> tuple[int, ...]:
    """The index of the attempt's gateway, and numbers that change whenever this gateway or a sampler starts."""
    home = home_of(attempt, len(servers.gateways))
    return home, *(server.child.num_starts for server in (servers.gateways[home], *servers.samplers))


def is_trained(layout: Layout, config: RLConfig) -> bool:
    """Whether the trainer has made the run's last step: the finished model is written, and the newest checkpoint is of
    that step if the run keeps checkpoints."""
    if not layout.model.is_dir():
        return False
    newest = newest_checkpoint(layout.checkpoints)
    if newest is None:
        return not config.train.checkpoint.keep
    return read_position(newest).step == config.num_steps


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Handle SIGTERM like Ctrl-C, because a shell's background jobs do not receive Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop, task, is_terminated = asyncio.get_running_loop(), asyncio.current_task(), False
    assert task is not None

    def terminate() -> None:
        nonlocal is_terminated
        is_terminated = True
        task.cancel()

    loop.add_signal_handler(signal.SIGTERM, terminate)
    try:
        yield
    except asyncio.CancelledError:
        if is_terminated:
            raise KeyboardInterrupt from None
        raise
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


class Supply:
    def __init__(
        self,
        config: RLConfig,
        pool: Pool,
        writer: PoolWriter,
        curriculum: Curriculum,
        draw: Draw,
        note: Callable[[], str],
    ) -> None:
        """`draw`: draws a task, like `TaskRunner.next_task`. `note`: returns the state to store with the tasks,
        including the curriculum's."""
        self._config, self._pool, self._writer, self._note = config, pool, writer, note
        self.curriculum, self._draw, self._batch_units = curriculum, draw, config.batch_units

    async def fill(self) -> bool:
        """Replace dropped groups and queue the batches that fit; returns whether a batch or replacement was queued."""
        is_filled = await self._replace()
        while await self._writer.run(self._pool.room) >= self._batch_units:
            before = self.curriculum.state()
            drawn = await self.curriculum.draw_batch(self._draw)
            tasks = [Queued(item.task, self._config.group_size, item.context) for item in drawn]
            try:
                await self._writer.run(self._pool.put, tasks, self._note(), drawn[0].stage)
            except StateError:
                # A trainer that resumed from a checkpoint returned units meanwhile: the batch is drawn again later.
                self.curriculum.restore(before)
                break
            is_filled = True
        return is_filled

    async def _replace(self) -> bool:
        unreplaced = await self._writer.run(self._pool.unreplaced)
        if not unreplaced:
            return False
        before = self.curriculum.state()
        is_group = self._config.pool.window.unit == "group"
        replacements: list[tuple[Task, int]] = []
        for missing in unreplaced:
            drawn = await self.curriculum.draw_task(missing.stage, missing.domain, self._draw)
            replacements.append((drawn.task, self._config.group_size if is_group else missing.num_units))
        pairs = zip(unreplaced, replacements, strict=True)
        try:
            await self._writer.run(self._pool.replace, [(missing, *item) for missing, item in pairs], self._note())
        except StateError as error:
            # The trainer may drop units while tasks are drawn; then the replacements are drawn again.
            _log.info("the groups to replace have changed, so their replacements are drawn again: %s", error)
            self.curriculum.restore(before)
            return False
        return True


class View:
    def __init__(
        self, layout: Layout, config: RLConfig, pool: Pool, counts: AttemptCounts, sandboxes: SandboxCounts
    ) -> None:
        self._layout, self._config, self._pool, self._counts = layout, config, pool, counts
        self._sandboxes, self._written = sandboxes, ""
        self._count_paths = [counts_path(layout, name) for name in host_names(config.cluster)]
        self._window_size = config.pool.window.size

    async def show(self, writer: PoolWriter) -> None:
        with progress(self._config.num_steps, self._config.name) as bar:
            shown, at_s = 0, time.monotonic()
            num_tokens = (await asyncio.to_thread(self._all_counts))[0].num_tokens
            while True:
                await asyncio.sleep(VIEW_S)
                last = read_last_step(self._layout.run_dir / FILE_NAME)
                fields = await self._queue_fields(writer)
                counts, sandboxes = await asyncio.to_thread(self._all_counts)
                if self._config.agent.sandbox.backend != "process":
                    fields |= {"sandboxes": f"{sandboxes.num_alive}"}
                    await asyncio.to_thread(self._write_sandboxes, sandboxes)
                passed_s, at_s = time.monotonic() - at_s, time.monotonic()
                # A restarted host counts from zero.
                fields["tokens/s"] = f"{max(0, counts.num_tokens - num_tokens) / passed_s:,.0f}"
                num_tokens = counts.num_tokens
                for domain, perfs in counts.perfs.items():
                    if perfs:
                        fields[domain] = f"{sum(perfs) / len(perfs):.0%}"
                        del perfs[:-256]
                fields |= _failure_fields(counts)
                if last is not None:
                    fields |= _step_fields(last)
                done = 0 if last is None else last.step
                bar.advance(max(0, done - shown), fields)
                shown = max(shown, done)

    def _all_counts(self) -> tuple[AttemptCounts, SandboxCounts]:
        return add_counts(self._count_paths, self._counts, self._sandboxes)

    def _write_sandboxes(self, counts: SandboxCounts) -> None:
        """Write the numbers for the run page, if they have changed."""
        nums = {"num_alive": counts.num_alive, "num_forked": counts.num_started, "num_failed": counts.num_failed}
        text = json.dumps({"backend": self._config.agent.sandbox.backend, **nums})
        if text != self._written:
            write_atomic(self._layout.sandboxes, text)
            self._written = text

    async def _queue_fields(self, writer: PoolWriter) -> dict[str, float | str]:
        positions = await writer.run(self._pool.queue_positions, self._config.pool.window.queue)
        inside = [state for position, state in positions if position < positions[0][0] + self._window_size]
        num_ready = sum(state == UnitState.READY for state in inside)
        return {"queue": f"{len(positions)}", "window": f"{num_ready}/{len(inside)} ready"}


def _failure_fields(counts: AttemptCounts) -> dict[str, float | str]:
    """Failed attempts since the start by failure kind, and attempts whose states were rebuilt; omits zeros."""
    nums = {
        "timeouts": counts.num_timeouts,
        "errors": counts.num_errors,
        "broken": counts.num_broken,
        "retried": counts.num_interrupted,
        "rebuilt": counts.num_rebuilt,
        "unequal": counts.num_unequal,
    }
    return {name: f"{num}" for name, num in nums.items() if num}


def _step_fields(last: StepMetrics) -> dict[str, float | str]:
    values = last.values
    busy_s = values.get("trained_s", 0.0) + values.get("published_s", 0.0)
    waited_s = values.get("waited_s", 0.0)
    return {
        "reward": values.get("reward", 0.0),
        "staleness": f"{values.get('staleness', 0.0):.0f}",
        "trainer busy": f"{busy_s / max(busy_s + waited_s, 1e-9):.0%}",
    }
