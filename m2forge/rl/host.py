"""An agent host: leases queued episodes of the pool, runs and verifies their attempts, and stores them.

    pool: lease → agent → gateway → sampler
           ↑        ↓
           └── answer, verdict, recorded calls; the loop rewards groups once they are complete

With `cluster.agent_hosts` a run has several; then the loop runs no training attempts. A host needs no loop: it renews
its leases itself and keeps running without the loop, and a resumed loop rewards what it stored meanwhile. A host that
died is restarted under the same name: it releases the leases of the one before it, whose attempts then restart under
other keys, on any host. The death of a host never counts against an attempt.
"""

import asyncio
import json
import signal
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from pathlib import Path

from m2forge.agents.attempt import AttemptRunner
from m2forge.agents.workspace import SandboxCounts, Workspaces
from m2forge.cluster.launcher import end_with_error
from m2forge.cluster.process_record import RoleUrl, record_size
from m2forge.errors import M2ForgeError, RunError
from m2forge.files import write_atomic
from m2forge.gateway.episodes.closed_journal import journal_ids
from m2forge.model.config_file import read_config
from m2forge.model.hub import find_folder
from m2forge.pool.pool import Pool, PoolWriter
from m2forge.rl.attempts import (
    AttemptCounts,
    Attempts,
    Leasing,
    Slots,
    attempt_sandbox,
    cancel_all,
    open_agent,
    renew_leases,
)
from m2forge.rl.config import RLConfig
from m2forge.rl.gateway_admin import LOOP_EPISODE_ID, GatewayAdmin
from m2forge.rl.layout import GATEWAY, SAMPLER, Layout
from m2forge.tasks.runner import TaskRunner
from m2forge.text.format import make_format
from m2forge.text.tokenizer import load_tokenizer

SERVERS = (SAMPLER, GATEWAY)
"""Roles whose restart interrupts attempts."""
POLL_S = 0.02
COUNTS_S = 1.0
EVALUATION_PREFIX = "check-"
_SUMMED = tuple(field.name for field in fields(AttemptCounts) if field.name != "perfs")


def host_names(config: RLConfig) -> list[str]:
    return [f"host-{index}" for index in range(config.cluster.agent_hosts)]


def run_host(layout: Layout, config: RLConfig, name: str, key: str) -> None:
    """Run attempts until SIGTERM. A failure that every retry would repeat ends the run."""
    try:
        asyncio.run(_run(layout, config, name, key))
    except RunError as error:
        end_with_error(error)


async def _run(layout: Layout, config: RLConfig, name: str, key: str) -> None:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    folder = find_folder(config.model, config.revision)
    format = make_format(config.gateway.format, load_tokenizer(folder))
    try:
        vocab_size = read_config(folder).vocab_size
        with Pool(layout.pool(config.pool), vocab_size, wait_s=config.pool.reconnect_s) as pool:
            async with (
                open_admin(config, RoleUrl(layout.processes, GATEWAY), key) as admin,
                open_agent(config.agent, layout.agents / name, format) as agent,
                open_tasks(config, layout.run_dir / "verify" / name) as tasks,
                PoolWriter(pool) as writer,
            ):
                await writer.run(pool.release, name)
                await delete_ended(layout.journal, pool, writer, admin, with_evaluations=False)
                workspaces = Workspaces(layout.workspaces / name, attempt_sandbox(config.agent))
                runner = AttemptRunner(agent, admin, tasks, workspaces, lambda: server_starts(layout))
                async with Attempts(runner, pool, writer) as attempts:
                    await _attempt(layout, config, name, writer, attempts)
    except asyncio.CancelledError:
        return


async def _attempt(layout: Layout, config: RLConfig, name: str, writer: PoolWriter, attempts: Attempts) -> None:
    pool, runner = attempts.pool, attempts.runner
    leasing = Leasing(name, pool, writer, attempts, Slots(config.agent.num_jobs))

    async def fill() -> None:
        while True:
            await leasing.fill()
            await asyncio.sleep(POLL_S)

    async def renew() -> None:
        while True:
            await asyncio.sleep(config.pool.lease_s / 4)
            await renew_leases(pool, writer, leasing.running)

    async def report() -> None:
        path, written = counts_path(layout, name), ""
        while True:
            text = json.dumps(_summed(attempts.counts) | {"sandboxes": asdict(runner.workspaces.counts)})
            if text != written:
                await asyncio.to_thread(write_atomic, path, text)
                written = text
            await asyncio.sleep(COUNTS_S)

    async def watch() -> None:
        try:
            await runner.agent.watch()
        except M2ForgeError as error:
            # The agent cannot run at all, here as elsewhere.
            raise RunError(str(error)) from error

    working = [asyncio.create_task(work()) for work in (fill, renew, report, watch)]
    try:
        await asyncio.gather(*working)
    finally:
        # Before the resources that they use are closed.
        await cancel_all([*working, *leasing.running])


def open_admin(config: RLConfig, url: Callable[[], str], key: str) -> GatewayAdmin:
    return GatewayAdmin(url, key, budget=config.agent.budget, sampling=config.agent.sampling.record())


def open_tasks(config: RLConfig, folder: Path) -> TaskRunner:
    """`folder`: working directory of the workers."""
    return TaskRunner(
        config.verify,
        folder,
        config.curriculum.family_keys,
        wrong_on_raise=config.curriculum.wrong_on_raise,
        reward=config.reward.function,
    )


def server_starts(layout: Layout) -> int:
    """Changes whenever sampler or gateway starts or ends, before a restarted one can answer."""
    return sum(record_size(layout.processes, name) for name in SERVERS)


async def delete_ended(
    journal: Path, pool: Pool, writer: PoolWriter, gateway: GatewayAdmin, *, with_evaluations: bool
) -> None:
    """Delete the gateway's copies of attempts that are no longer in flight, whose keys it then refuses: of attempts
    that died with their process, and of stored ones whose deletion was lost. `with_evaluations`: also those of
    evaluations, which die with their loop."""
    names = [name for name in journal_ids(journal) if LOOP_EPISODE_ID.fullmatch(name)]
    # Read after the names: an attempt is in flight before its episode is opened.
    running = await writer.run(pool.running)
    await gateway.delete(
        name for name in names if name not in running and (with_evaluations or not name.startswith(EVALUATION_PREFIX))
    )


# -- counts of all hosts, for the loop's view --------------------------------------------------------------------------


def counts_path(layout: Layout, name: str) -> Path:
    return layout.processes / f"{name}.json"


def add_counts(
    layout: Layout, config: RLConfig, own: AttemptCounts, sandboxes: SandboxCounts
) -> tuple[AttemptCounts, SandboxCounts]:
    """The loop's own counts plus those of all hosts since each of them started."""
    total, started = _summed(own), asdict(sandboxes)
    for name in host_names(config):
        try:
            found = json.loads(counts_path(layout, name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue
        total = _add(total, found)
        started = _add(started, found["sandboxes"])
    return AttemptCounts(**total, perfs=own.perfs), SandboxCounts(**started)


def _summed(counts: AttemptCounts) -> dict[str, int]:
    return {name: getattr(counts, name) for name in _SUMMED}


def _add(own: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {name: num + other[name] for name, num in own.items()}
