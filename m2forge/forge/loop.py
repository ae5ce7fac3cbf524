"""The RL loop: keeps the queue filled, the agents busy, the sampler on the newest weights, and the processes alive.

    curriculum → pool → agents → gateway → sampler
                  ↓                           ↑ weights
               trainer ───────────────────────┘

Everything that must outlive it is on disk: the pool, the journals, the weights, the checkpoints. If it is killed, the
other processes and the agents die with it; after a restart, in-flight attempts restart with new API keys, and the old
keys are refused. Pass rates recorded since the last tasks were queued are lost.
"""

import asyncio
import contextlib
import json
import logging
import signal
import threading
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import httpx2

from m2forge.errors import EngineError
from m2forge.forge.attempts import Agents, Attempts
from m2forge.forge.child import Child
from m2forge.forge.concurrency import cancel_all
from m2forge.forge.config import ForgeConfig
from m2forge.forge.deployed import OWN_NAME, DeployedEpisodes, write_door
from m2forge.forge.evaluation import Evaluations
from m2forge.forge.gateway_admin import GatewayAdmin
from m2forge.forge.layout import Layout
from m2forge.forge.process import MODULE
from m2forge.forge.servers import Server, make_servers
from m2forge.forge.slots import Slots
from m2forge.forge.supply import Supply
from m2forge.forge.view import View
from m2forge.forge.worker import Workers
from m2forge.gateway.closed_journal import journal_ids
from m2forge.model.config_file import CONFIG_FILE as WEIGHTS_CONFIG
from m2forge.model.config_file import read_config
from m2forge.pool.pool import Pool
from m2forge.pool.state import StateError
from m2forge.pool.stored import Lease
from m2forge.pool.writer import PoolWriter
from m2forge.records import PolicyVersion, Task
from m2forge.reward.judge import Judge
from m2forge.tasks.curriculum import Curriculum, Draw
from m2forge.tasks.runner import TaskRunner
from m2forge.text.format import make_format
from m2forge.text.tokenizer import load_tokenizer
from m2forge.train.checkpoint import CheckpointStore, read_position

WORKER = "loop"
"""Name under which the loop holds leases; a run has one loop."""
POLL_S = 0.02
FAILED = 503
"""HTTP status of a sampler whose engine has failed."""
DRY_S = 0.2
"""How long to wait before asking again for leases from a queue that had fewer than there were free slots."""

_log = logging.getLogger(__name__)


class Loop:
    def __init__(self, layout: Layout, config: ForgeConfig) -> None:
        self.config, self.layout = config, layout
        folder = Path(config.model)
        self.pool = Pool(self.layout.pool(config.pool), read_config(folder).vocab_size)
        self._refuse_lost_commits()
        self.weights = self.layout.weight_store(config)
        state = json.loads(self.pool.note() or "{}")
        self.curriculum = Curriculum(config.curriculum, state=state.get("curriculum"))
        self.judge = Judge(config.reward, base_times=state.get("base_times"))
        self.format = make_format(config.gateway.format, load_tokenizer(folder))
        self._served: list[PolicyVersion] = []
        self.slots = Slots(config.agent.num_jobs, config.check.share)
        self.evaluations = Evaluations(config, layout, self.slots, self._served)
        self._running: dict[asyncio.Task[None], Lease] = {}
        command = (MODULE, "trainer", str(self.layout.run_dir))
        self.trainer = Child("trainer", command, self.layout.log, is_done=lambda: is_trained(layout, config))

    @property
    def served(self) -> PolicyVersion | None:
        """The last version that the sampler is known to serve."""
        return self._served[-1] if self._served else None

    def note_served(self, version: PolicyVersion) -> None:
        if version != self.served:
            self._served.append(version)

    def _refuse_lost_commits(self) -> None:
        newest = CheckpointStore(self.layout.checkpoints, self.config.train.checkpoint).newest()
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
        servers = make_servers(self.layout, self.config.gateway.host, self.config.gateway_port)
        try:
            with _terminated_as_interrupted():
                training = self._keep(background, self.trainer.keep())
                await self._while_alive(background, self._wait_for_weights())
                self._keep(background, servers.sampler.child.keep())
                self._keep(background, servers.gateway.child.keep())
                if self.config.pool.admit_deployed:
                    write_door(self.layout.gateway, servers.gateway)
                async with (
                    GatewayAdmin(servers.gateway.url, servers.gateway.key) as admin,
                    Workers(self.config.agent, self.layout.run_dir / "agents") as workers,
                    TaskRunner(
                        self.config.verify,
                        self.layout.run_dir / "verify",
                        self.config.curriculum.family_names,
                        wrong_on_raise=self.config.curriculum.wrong_on_raise,
                    ) as runner,
                    PoolWriter(self.pool) as writer,
                ):
                    agents = Agents(self.config.agent, admin, workers, runner, lambda: servers.num_starts)
                    async with Attempts(
                        agents, self.pool, writer, self.judge, self.format, self._note_group
                    ) as attempts:
                        try:
                            await self._roll_out(background, training, servers.sampler, attempts, writer)
                        finally:
                            # Before the resources that they use are closed.
                            await cancel_all(background | set(self._running))
        finally:
            await cancel_all(background)
            children = (self.trainer, servers.gateway.child, servers.sampler.child)
            await asyncio.gather(*(child.stop() for child in children))
            servers.close()
            self.layout.gateway.unlink(missing_ok=True)
            self.pool.close()

    async def _roll_out(
        self,
        background: set[asyncio.Task[None]],
        training: asyncio.Task[None],
        sampler: Server,
        attempts: Attempts,
        writer: PoolWriter,
    ) -> None:
        agents = attempts.agents
        self._keep(background, agents.workers.watch())
        await self._while_alive(background, agents.gateway.wait_until_up())
        await self._take_over(writer, agents.gateway)
        await attempts.judge_whole()
        self._keep(background, self._push_weights(sampler, writer))
        await self._while_alive(background, self.evaluations.first(agents))
        self._keep(background, self._renew(writer))
        self._keep(background, View(self.layout, self.config, self.pool, attempts.counts).show(writer))
        self._keep(background, attempts.judge_ended())
        feeding = {self._keep(background, self._feed(writer, attempts, agents.runner.next_task))}
        if self.config.pool.admit_deployed:
            deployed = DeployedEpisodes(self.config, self.layout.journal, agents.gateway, self.pool, writer)
            feeding.add(self._keep(background, deployed.watch()))
        self._keep(background, self.evaluations.keep(agents))
        await self._while_alive(background - {training}, training)
        await cancel_all(feeding | set(self._running))
        self.slots.end_training()
        last = self.evaluations.last(agents, self._serves_newest)
        await self._while_alive(background - {training, *feeding}, last)

    def _keep(self, background: set[asyncio.Task[None]], work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
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

    # -- background tasks ----------------------------------------------------------------------------------------------

    async def _feed(self, writer: PoolWriter, attempts: Attempts, draw: Draw) -> None:
        """Fill the queue and start attempts on every free slot."""
        look_at_s = 0.0
        supply = Supply(self.config, self.pool, writer, self.curriculum, draw, self._note)
        self.slots.is_training = True
        while True:
            is_filled = await supply.fill()
            if is_filled or time.monotonic() >= look_at_s:
                num_free, num_leased = self.slots.take(self.config.agent.num_jobs), 0
                try:
                    leases = await writer.run(self.pool.lease, WORKER, num_free) if num_free else []
                    num_leased = len(leases)
                finally:
                    self.slots.give_back(num_free - num_leased)
                for lease in leases:
                    task = asyncio.create_task(attempts.run(lease))
                    task.add_done_callback(lambda _: self.slots.give_back())
                    self._running[task] = lease
                # An empty queue gets work when it is filled, or when an attempt fails, which is rare.
                look_at_s = time.monotonic() + (DRY_S if num_leased < num_free else 0.0)
            for task in [task for task in self._running if task.done()]:
                del self._running[task]
                if not task.cancelled():
                    task.result()
            await asyncio.sleep(POLL_S)

    def _note(self) -> str:
        base_times = self.judge.base_times() if self.config.reward.beta else {}
        return json.dumps({"curriculum": self.curriculum.state(), "base_times": base_times})

    async def _renew(self, writer: PoolWriter) -> None:
        while True:
            await asyncio.sleep(self.config.pool.lease_s / 4)
            lost = await writer.run(self.pool.renew, list(self._running.values()))
            names = {lease.name for lease in lost}
            for task, lease in self._running.items():
                if lease.name in names:
                    task.cancel()
            await writer.run(self.pool.requeue_expired)
            while await writer.run(self.pool.sweep):
                await asyncio.sleep(0)

    async def _push_weights(self, sampler: Server, writer: PoolWriter) -> None:
        """Send the newest published version to the sampler whenever it changes. A restarted sampler loads the newest
        itself, so it is asked for its version first. A sampler whose engine has failed is about to exit; the version
        goes to its successor."""
        headers, process = {"Authorization": f"Bearer {sampler.key}"}, sampler.child
        num_starts = process.num_starts
        async with httpx2.AsyncClient(
            base_url=sampler.url, headers=headers, timeout=600.0, trust_env=False, verify=False
        ) as http:
            while True:
                starts = process.num_starts
                is_asked = starts == num_starts or await self._ask_version(http)
                if is_asked and (starts != num_starts or not self._serves_newest()):
                    # A pinned evaluation holds this lock, so look up the version after acquiring it.
                    async with self.evaluations.pin:
                        # Read before the version: versions published under an earlier epoch may be lost.
                        epoch = await writer.run(self.pool.epoch)
                        newest = self.weights.newest()
                        if newest is not None and await self._push(http, *newest):
                            self.note_served(newest[0])
                            num_starts = starts
                            await writer.run(self.pool.rejoin, epoch)
                await asyncio.sleep(POLL_S)

    async def _ask_version(self, http: httpx2.AsyncClient) -> bool:
        """Ask a restarted sampler which version it serves; returns whether it responded."""
        try:
            response = await http.get("/health")
        except httpx2.TransportError:
            return False
        if response.is_success:
            self.note_served(PolicyVersion(**response.json()["version"]))
        return response.is_success

    async def _push(self, http: httpx2.AsyncClient, version: PolicyVersion, folder: Path) -> bool:
        """Send a version to the sampler; returns whether it loaded it."""
        body = {"folder": str(folder.absolute()), "version": version.to_dict()}
        try:
            response = await http.post("/weights", json=body)
        except httpx2.TransportError:
            return False
        # When the trainer removes a version, it deletes its config first; the newest version is sent next.
        if not response.is_success and response.status_code != FAILED and (folder / WEIGHTS_CONFIG).exists():
            raise EngineError(
                f"the sampler refused version {version.step} in {folder} with status {response.status_code}: "
                f"{response.text[:500]}. See {self.layout.log / 'sampler.log'}, repair the cause, then start the run "
                "again"
            )
        return response.is_success

    # -- on demand -----------------------------------------------------------------------------------------------------

    async def _wait_for_weights(self) -> None:
        while self.weights.newest() is None:
            await asyncio.sleep(POLL_S)

    async def _take_over(self, writer: PoolWriter, admin: GatewayAdmin) -> None:
        """Release the leases of a loop that died, so that its attempts restart, and delete its episodes at the gateway,
        including those already stored in the pool; their keys are then refused."""
        await writer.run(self.pool.release, WORKER)
        left = journal_ids(self.layout.journal)
        await admin.forget(name for name in left if OWN_NAME.fullmatch(name))

    def _note_group(self, task: Task, pass_rate: float) -> None:
        self.curriculum.record(task, pass_rate)

    def _serves_newest(self) -> bool:
        # Compare the whole version: the sampler may still serve a lost version with the same step.
        newest = self.weights.newest()
        return newest is not None and newest[0] == self.served


def is_trained(layout: Layout, config: ForgeConfig) -> bool:
    """Whether the trainer has made the run's last step: the finished model is written, and the newest checkpoint is of
    that step if the run keeps checkpoints."""
    if not layout.model.is_dir():
        return False
    newest = CheckpointStore(layout.checkpoints, config.train.checkpoint).newest()
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
