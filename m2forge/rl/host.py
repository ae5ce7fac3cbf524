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
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from m2forge.agents.attempt import AttemptRunner
from m2forge.agents.workspace import Workspaces
from m2forge.cluster.config import ClusterConfig
from m2forge.cluster.launcher import end_with_error
from m2forge.cluster.process_record import RoleUrl, record_size
from m2forge.errors import M2ForgeError, RunError
from m2forge.files import write_atomic
from m2forge.gateway.episodes.closed_journal import journal_ids
from m2forge.model.config_file import read_config
from m2forge.model.hub import find_folder
from m2forge.pool.pool import HOST_NICENESS, Pool, PoolWriter
from m2forge.rl.attempts import (
    Attempts,
    Leasing,
    Slots,
    attempt_sandbox,
    cancel_all,
    counts_path,
    open_agent,
    renew_leases,
    summed,
)
from m2forge.rl.config import RLConfig
from m2forge.rl.gateway_admin import LOOP_EPISODE_ID, GatewayAdmin, Gateways, home_of
from m2forge.rl.layout import Layout, gateway_names, sampler_names
from m2forge.tasks.runner import TaskRunner
from m2forge.text.format import make_format
from m2forge.text.tokenizer import load_tokenizer

POLL_S = 0.02
COUNTS_S = 1.0
EVALUATION_PREFIX = "check-"


def run_host(layout: Layout, config: RLConfig, name: str, keys: Sequence[str]) -> None:
    """Run attempts until SIGTERM. A failure that every retry would repeat ends the run. `keys`: of the gateways."""
    try:
        asyncio.run(_run(layout, config, name, keys))
    except RunError as error:
        end_with_error(error)


async def _run(layout: Layout, config: RLConfig, name: str, keys: Sequence[str]) -> None:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    folder = find_folder(config.model, config.revision)
    format = make_format(config.gateway.format, load_tokenizer(folder))
    try:
        vocab_size = read_config(folder).vocab_size
        urls = [RoleUrl(layout.processes, gateway) for gateway in gateway_names(config.cluster)]
        with Pool(layout.pool(config.pool), vocab_size, wait_s=config.pool.reconnect_s) as pool:
            async with (
                open_gateways(config, urls, keys) as gateways,
                open_agent(config.agent, layout.agents / name, format) as agent,
                open_tasks(config, layout.run_dir / "verify" / name) as tasks,
                PoolWriter(pool, HOST_NICENESS) as writer,
            ):
                await writer.run(pool.release, name)
                journals = layout.journals(config.cluster)
                await delete_ended(journals, pool, writer, gateways, with_evaluations=False)
                workspaces = Workspaces(layout.workspaces / name, attempt_sandbox(config.agent))
                starts = partial(server_starts, layout, config.cluster)
                runner = AttemptRunner(agent, gateways, tasks, workspaces, starts)
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
            text = json.dumps(summed(attempts.counts) | {"sandboxes": asdict(runner.workspaces.counts)})
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


def open_gateways(config: RLConfig, urls: Sequence[Callable[[], str]], keys: Sequence[str]) -> Gateways:
    budget, sampling = config.agent.budget, config.agent.sampling.record()
    pairs = zip(urls, keys, strict=True)
    return Gateways([GatewayAdmin(url, key, budget=budget, sampling=sampling) for url, key in pairs])


def open_tasks(config: RLConfig, folder: Path) -> TaskRunner:
    """`folder`: working directory of the workers."""
    return TaskRunner(
        config.verify,
        folder,
        config.curriculum.family_keys,
        wrong_on_raise=config.curriculum.wrong_on_raise,
        reward=config.reward.function,
    )


def server_starts(layout: Layout, config: ClusterConfig, attempt: str) -> tuple[int, ...]:
    """The index of the attempt's gateway, and numbers that change whenever this gateway or a sampler starts or ends,
    before a restarted one can answer. Which sampler has the attempt only its gateway knows."""
    gateways = gateway_names(config)
    home = home_of(attempt, len(gateways))
    return home, *(record_size(layout.processes, name) for name in (gateways[home], *sampler_names(config)))


async def delete_ended(
    journals: Sequence[Path], pool: Pool, writer: PoolWriter, gateways: Gateways, *, with_evaluations: bool
) -> None:
    """Delete the gateways' copies of attempts that are no longer in flight, whose keys they then refuse: of attempts
    that died with their process, and of stored ones whose deletion was lost. `journals`: of each gateway; a run that
    had another number of them left journals where no attempt of their names would be now. `with_evaluations`: also
    those of evaluations, which die with their loop."""
    found = [[name for name in journal_ids(journal) if LOOP_EPISODE_ID.fullmatch(name)] for journal in journals]
    # Read after the names: an attempt is in flight before its episode is opened.
    running = await writer.run(pool.running)
    for admin, names in zip(gateways.admins, found, strict=True):
        await admin.delete(
            name
            for name in names
            if name not in running and (with_evaluations or not name.startswith(EVALUATION_PREFIX))
        )


# -- counts of all hosts, for the loop's view --------------------------------------------------------------------------
