"""Two samplers get every version; one that is away holds up neither the other nor, for ever, the pool's lineage."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from sqlalchemy import select

from m2forge.cluster.launcher import Launched
from m2forge.cluster.process_record import read_versions
from m2forge.pool.batch import fork
from m2forge.pool.config import PoolConfig
from m2forge.pool.pool import Pool, PoolWriter
from m2forge.pool.tables import fork_table
from m2forge.protocols import EngineState
from m2forge.records import PolicyVersion
from m2forge.rl.layout import Layout
from m2forge.rl.servers import Server
from m2forge.rl.weight_updates import WeightUpdates
from m2forge.rollout.config import ServerConfig
from m2forge.rollout.server.app import make_app
from m2forge.testing.scripted import ScriptedEngine
from m2forge.weights.store import WeightStore
from tests.rollout.served import KEY, served

LIMIT_S, POLL_S = 20.0, 0.01
VOCAB_SIZE = 32


class Sampler(ScriptedEngine):
    """Neither loads nor answers while it is held."""

    def __init__(self, version: PolicyVersion) -> None:
        super().__init__(VOCAB_SIZE, version=version)
        self.is_free = asyncio.Event()
        self.is_free.set()

    async def load(self, folder: Path, version: PolicyVersion) -> None:
        await self.is_free.wait()
        await super().load(folder, version)

    async def state(self) -> EngineState:
        await self.is_free.wait()
        return await super().state()


@asynccontextmanager
async def scene(folder: Path) -> AsyncIterator[Any]:
    """Two samplers and their updates."""
    store = WeightStore(folder / "weights", "run")
    pool = Pool(PoolConfig(url=f"sqlite:///{folder}/pool.db"), VOCAB_SIZE)
    samplers = [Sampler(PolicyVersion("run", 0, "aa")) for _ in range(2)]
    seen: list[PolicyVersion] = []
    async with (
        served(make_app(samplers[0], ServerConfig(), KEY)) as first,
        served(make_app(samplers[1], ServerConfig(), KEY)) as second,
        PoolWriter(pool) as writer,
    ):
        children = [
            SimpleNamespace(name=f"sampler-{index}", num_starts=1, keys=(KEY,), url=url)
            for index, url in enumerate((first, second))
        ]
        updates = WeightUpdates(store, pool, asyncio.Lock(), seen.append, Layout(folder))
        running = asyncio.create_task(updates.run([Server(cast("Launched", child)) for child in children], writer))
        try:
            yield SimpleNamespace(store=store, pool=pool, samplers=samplers, children=children, seen=seen)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
    pool.close()


def publish(folder: Path, step: int) -> PolicyVersion:
    version = folder / "weights" / f"step-{step:08d}-aa"
    version.mkdir(parents=True)
    (version / "config.json").touch()
    return PolicyVersion("run", step, "aa")


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        await asyncio.sleep(POLL_S)


async def versions(samplers: list[Sampler]) -> list[int]:
    return [(await ScriptedEngine.state(sampler)).version.step for sampler in samplers]


def follows_lineage(pool: Pool) -> bool:
    with pool.database.read() as connection:
        return connection.execute(select(fork_table)).first() is None


def test_a_version_is_served_once_all_samplers_have_it(tmp_path: Path) -> None:
    async def run() -> None:
        async with scene(tmp_path) as given:
            first = publish(tmp_path, 0)
            await until(lambda: given.seen[-1:] == [first])
            given.samplers[1].is_free.clear()
            second = publish(tmp_path, 1)
            while await versions(given.samplers) != [1, 0]:
                await asyncio.sleep(POLL_S)
            assert given.seen[-1] == first, "one of them still serves it"
            await until(lambda: read_versions(Layout(tmp_path).processes) == {"sampler-0": 1, "sampler-1": 0})
            given.samplers[1].is_free.set()
            await until(lambda: given.seen[-1] == second)
            assert await versions(given.samplers) == [1, 1]
            assert read_versions(Layout(tmp_path).processes) == {"sampler-0": 1, "sampler-1": 1}

    asyncio.run(asyncio.wait_for(run(), LIMIT_S))


def test_a_sampler_that_starts_again_holds_up_no_update(tmp_path: Path) -> None:
    async def run() -> None:
        async with scene(tmp_path) as given:
            first = publish(tmp_path, 0)
            await until(lambda: given.seen[-1:] == [first])
            given.samplers[1].is_free.clear()
            with given.pool.database.write() as connection:
                fork(connection, 0)
            second = publish(tmp_path, 1)
            while await versions(given.samplers) != [1, 0]:
                await asyncio.sleep(POLL_S)
            # Its process dies in the midst of the update, and takes its time to start.
            given.samplers[1].is_free = asyncio.Event()
            given.children[1].num_starts = 2
            await until(lambda: given.seen[-1] == second)
            third = publish(tmp_path, 2)
            await until(lambda: given.seen[-1] == third)
            assert not follows_lineage(given.pool), "it may come back with a lost version"
            # It loads the newest version by itself.
            await ScriptedEngine.load(given.samplers[1], tmp_path, third)
            given.samplers[1].is_free.set()
            await until(lambda: follows_lineage(given.pool))
            assert await versions(given.samplers) == [2, 2]

    asyncio.run(asyncio.wait_for(run(), LIMIT_S))
