"""The data pool: tasks in, leases for workers out; calls, ends and rewards in; batches for the trainer out.

    with Pool(config, vocab_size) as pool:
        pool.put([(task, 8)])                      a group of eight attempts
        for lease in pool.lease("worker", 8):      queued → running
            writer = lease.writer(vocab_size)
            pool.append([Append(lease, writer.write(call))])
            pool.finish(lease, Outcome(reward=reward))
        batch = pool.claim(1, version)             the window decides
        units = pool.fetch(batch)                  trees, rewards, tasks
        pool.commit(batch, next_version)

Every method is one transaction: visible to all processes when it returns, rolled back if it raises. If the database
drops the connection, the transaction is repeated unless it has committed, for up to `reconnect_s`. Each process that
shares a pool opens it itself. Methods block; asyncio code uses `PoolWriter`.
"""

import asyncio
import gc
import logging
import os
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from types import TracebackType
from typing import Concatenate, Generic, ParamSpec, Self, TypeVar

from sqlalchemy import Connection, and_, delete, func, insert, inspect, literal_column, make_url, or_, select, text

from m2forge.errors import ConfigError, M2ForgeError
from m2forge.pool import batch as batches
from m2forge.pool import deployed_groups as deployed
from m2forge.pool import queue as queues
from m2forge.pool import record
from m2forge.pool.batch import Claim, Restored, Wanted
from m2forge.pool.config import PoolConfig, RetentionConfig
from m2forge.pool.deployed_groups import DeployedEpisode
from m2forge.pool.dialect import ChangedError, ConnectionLostError, Database, PoolError
from m2forge.pool.lifecycle import EpisodeState, LeaseLostError, UnitState, in_state
from m2forge.pool.queue import Tally, UnreplacedGroup, Watch, read_queue, read_tally
from m2forge.pool.record import Append, Ending, Rewarding
from m2forge.pool.stored import Lease, Outcome, Queued, StoredCall, StoredUnit, read_units
from m2forge.pool.tables import (
    QUEUE_ID,
    SCHEMA_VERSION,
    call_table,
    episode_table,
    fork_table,
    metadata,
    queue_table,
    unit_table,
)
from m2forge.records import PolicyVersion, Reward, Task

MAX_AT_ONCE = 512
"""Maximum calls, or attempts, per transaction, so that other transactions get their turn."""
MAX_ALONE_BYTES = 16 << 20
"""Maximum data of calls in one statement; more is copied to the server in a transaction of several."""
HOST_NICENESS = 7
"""Niceness of the thread in which an agent host stores attempts: the trainer's next batch does not wait for them."""
_EXPIRED_AT_ONCE = 256
P = ParamSpec("P")
T = TypeVar("T")
Item = TypeVar("Item")
_log = logging.getLogger(__name__)


def require_database(config: PoolConfig, vocab_size: int) -> None:
    """Raise unless the database can be reached, and holds no pool or one for this vocabulary; nothing is created."""
    path = Path(str(make_url(config.url).database))
    if config.url.startswith("sqlite") and not path.exists():
        parent = next(parent for parent in path.absolute().parents if parent.exists())
        if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
            raise PoolError(f"pool.url: {path} cannot be created in {parent}; give a path in a folder that is writable")
        return
    database = Database(config)
    try:
        with database.read() as connection:
            if connection.dialect.has_table(connection, queue_table.name):
                _refuse_other_pool(database, connection, vocab_size)
    except ConnectionLostError as error:
        reason = " ".join(str(error).split())
        raise PoolError(f"pool.url: {reason}; start the database, or give the URL of one that runs") from error
    finally:
        database.close()


def _refuse_other_pool(database: Database, connection: Connection, vocab_size: int) -> None:
    row = queues.read_queue(connection)
    for name, expected in (("schema_version", SCHEMA_VERSION), ("vocab_size", vocab_size)):
        stored = getattr(row, name)
        if stored != expected:
            raise ConfigError(f"{database.display_url}: its {name} is {stored}, expected {expected}; use another pool")


def _has_tokens(connection: Connection) -> bool:
    return any(column["name"] == "num_tokens" for column in inspect(connection).get_columns(unit_table.name))


def _repeated(
    method: Callable[Concatenate["Pool", P], T],
) -> Callable[Concatenate["Pool", P], T]:
    """A method that is one transaction, repeated while the database drops the connection before it has committed."""

    @wraps(method)
    def call(self: "Pool", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.database.outlast(lambda: method(self, *args, **kwargs))

    return call


@contextmanager
def _collecting_later() -> Iterator[None]:
    """Delay cyclic garbage collection until the block ends: a full one scans every object of the process, and others
    would wait that long for the rows that a transaction has locked."""
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.enable()


class Pool:
    def __init__(
        self,
        config: PoolConfig,
        vocab_size: int,
        *,
        wait_s: float = 0.0,
        clock: Callable[[], float] | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open the database and create missing tables. `wait_s`: how long to wait for a database that cannot be
        reached. `clock`: returns seconds since the epoch, instead of the database's clock; the same for all processes
        that share the pool. `monotonic`: this process's clock."""
        self.config, self.vocab_size = config, vocab_size
        self._clock = clock
        self._leases, self._stuck = Watch[tuple[int, int]](monotonic), Watch[int](monotonic)
        self.database = Database(config, self._restart_watches)
        try:
            self.database.outlast(self._set_up, wait_s)
        except BaseException:
            self.database.close()
            raise

    def _set_up(self) -> None:
        # Most processes find the tables, and then do not wait for the writer.
        with self.database.read() as connection:
            # A pool created by an earlier version lacks only the last table, and a column.
            is_created = all(
                connection.dialect.has_table(connection, table.name) for table in (queue_table, fork_table)
            )
            is_complete = is_created and _has_tokens(connection)
        if not is_complete:
            self._make_tables()
        with self.database.read() as connection:
            _refuse_other_pool(self.database, connection, self.vocab_size)

    def _make_tables(self) -> None:
        with self.database.write() as connection:
            self.database.lock_schema(connection)
            fork_table.create(connection, checkfirst=True)
            if connection.dialect.has_table(connection, queue_table.name):
                if not _has_tokens(connection):
                    connection.execute(text(f"ALTER TABLE {unit_table.name} ADD COLUMN num_tokens BIGINT"))
                return
            metadata.create_all(connection)
            self.database.tune(connection)
            first = {"id": QUEUE_ID, "schema_version": SCHEMA_VERSION, "vocab_size": self.vocab_size}
            first |= {"next_place": 0, "num_taken": 0, "epoch": 0, "step": 0, "durable_step": 0}
            connection.execute(insert(queue_table).values(first))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self.database.close()

    def _restart_watches(self) -> None:
        """While the database could not be reached, no worker could renew a lease."""
        self._leases.restart()
        self._stuck.restart()

    @_repeated
    def room(self) -> int:
        """Number of units that fit into the queue."""
        with self.database.read() as connection:
            return max(0, self.config.window.queue - queues.num_queued(connection))

    @_repeated
    def put(
        self, tasks: Sequence[tuple[Task, int] | Queued], note: str | None = None, stage: str | None = None
    ) -> list[str]:
        """Queue groups, each a task, its number of episodes and optionally its context limit; returns their names.
        Raises if there is no room. `note`: the caller's state for resuming after these tasks, stored with them
        atomically. `stage`: the curriculum stage; its units are labelled STAGE/DOMAIN for quotas and replaced when
        dropped. If deployed agents are admitted, their rewarded groups take the slots of tasks of their domain."""
        with self.database.write() as connection:
            return queues.put(connection, self.config, tasks, note, stage)

    @_repeated
    def unreplaced(self) -> list[UnreplacedGroup]:
        """Groups of a stage that were dropped and not yet replaced."""
        with self.database.read() as connection:
            return queues.unreplaced(connection)

    @_repeated
    def replace(self, replacements: Sequence[tuple[UnreplacedGroup, Task, int]], note: str | None = None) -> list[str]:
        """Queue a task with its number of episodes to replace each dropped group. `note`: as for `put`."""
        with self.database.write() as connection:
            return queues.replace(connection, self.config, replacements, note)

    @_repeated
    def note(self) -> str | None:
        """The last stored note."""
        with self.database.read() as connection:
            return queues.read_note(connection)

    @_repeated
    def lease(self, worker: str, num_episodes: int) -> list[Lease]:
        """Lease up to `num_episodes` queued episodes, oldest first. The worker must renew them within `lease_s`."""
        with self.database.write() as connection:
            return queues.lease(connection, self.config, worker, num_episodes, self._now_s(connection))

    @_repeated
    def leases_of(self, worker: str) -> list[Lease]:
        """Leases of a worker's running attempts."""
        with self.database.read() as connection:
            return queues.leases_of(connection, worker)

    @_repeated
    def running(self) -> dict[str, str]:
        """The attempts in flight and the worker of each."""
        with self.database.read() as connection:
            return queues.running_workers(connection)

    @_repeated
    def renew(self, leases: Sequence[Lease]) -> list[Lease]:
        """Renew leases; returns the lost ones, whose attempts the caller must cancel."""
        with self.database.write() as connection:
            return queues.renew(connection, self.config, leases, self._now_s(connection))

    @_repeated
    def requeue_expired(self) -> list[Lease]:
        """Requeue episodes whose workers have died; returns their leases. One process calls this periodically: a lease
        expires once this process has seen it unrenewed for `lease_s` by its own monotonic clock, so that setting a
        clock expires none."""
        with self.database.read() as connection:
            until_s = queues.running(connection)
            watched = self._leases.unchanged_s(until_s)
            over = [episode for (episode, _), seconds in watched.items() if seconds > self.config.lease_s]
            leases = queues.leases_on(connection, over[:_EXPIRED_AT_ONCE])
        failure = "its worker stopped renewing the lease"
        return [
            lease
            for lease in leases
            if (end_s := until_s.get((lease.episode, lease.attempt))) is not None
            and self._give_up(lease, failure, end_s)
        ]

    def release(self, worker: str) -> list[Lease]:
        """Requeue all attempts of a worker that is known to be dead, without waiting for its leases to expire."""
        return [lease for lease in self.leases_of(worker) if self._give_up(lease, "its worker died")]

    def _now_s(self, connection: Connection) -> float:
        return self.database.now_s(connection) if self._clock is None else self._clock()

    @_repeated
    def _give_up(self, lease: Lease, failure: str, until_s: float | None = None) -> bool:
        """One transaction per lease, since workers renew and finish meanwhile."""
        try:
            with self.database.write() as connection:
                state = queues.fail_attempt(connection, self.config, lease, failure, is_death=True, until_s=until_s)
        except LeaseLostError:
            return False
        if state is EpisodeState.FAILED:
            _log.warning("%s is dropped, because too many workers died during its attempts: %s", lease.group, failure)
        return True

    @_repeated
    def known(self, names: Collection[str]) -> set[str]:
        """The subset of `names` that are episodes of the pool."""
        with self.database.read() as connection:
            return deployed.known(connection, names)

    @_repeated
    def add_deployed(self, group: str, task: Task, episodes: Sequence[DeployedEpisode]) -> None:
        """Store rewarded attempts of an agent that the loop did not start. If the configuration admits it, the group
        takes the slot of a task of its domain in a later batch."""
        with self.database.write() as connection:
            deployed.add_deployed(connection, self.config, group, task, episodes, self._now_s(connection))

    @_repeated
    def append(self, appends: Sequence[Append]) -> list[M2ForgeError | None]:
        """Store calls of several attempts; returns for each None or the error that refused it."""
        if not appends:
            return []
        try:
            if self._stands_alone(item.call for item in appends):
                record.append_alone(self.database, appends)
                return [None] * len(appends)
            with self.database.write(is_idempotent=True) as connection:
                record.append_all(connection, appends)
        except record.SomeRefused:
            with self.database.write(is_idempotent=True) as connection:
                return record.append_each(connection, appends)
        return [None] * len(appends)

    def _stands_alone(self, calls: Iterable[StoredCall]) -> bool:
        """Whether one statement stores these calls; it holds a second copy of their data."""
        return not self.database.is_sqlite and sum(len(call.data) for call in calls) <= MAX_ALONE_BYTES

    @_repeated
    def finish(self, lease: Lease, outcome: Outcome) -> None:
        """End an attempt that counts, including one that hit a limit."""
        with self.database.write() as connection:
            record.finish(connection, self.config, lease, outcome, self._now_s(connection))

    @_repeated
    def end(self, endings: Sequence[Ending]) -> list[bool | M2ForgeError]:
        """Store the calls and outcomes of several attempts; returns for each whether its unit may now be complete and
        wait for a reward, or the error that refused it."""
        try:
            if self._stands_alone(call for ending in endings for call in ending.calls):
                return [*record.end_alone(self.database, endings, None if self._clock is None else self._clock())]
            with self.database.write(is_idempotent=True) as connection:
                return [*record.end_all(connection, endings, self._now_s(connection))]
        except record.SomeRefused:
            with self.database.write(is_idempotent=True) as connection:
                return record.end_each(connection, self.config, endings, self._now_s(connection))

    @_repeated
    def reward_unit(self, rewards: Sequence[Rewarding]) -> None:
        """Reward the finished attempts of one unit in one transaction."""
        with self.database.write() as connection:
            record.reward_unit(connection, self.config, rewards)

    @_repeated
    def reward(self, lease: Lease, reward: Reward, step_rewards: Sequence[float] | None = None) -> None:
        """Reward a finished attempt. `step_rewards`: one per call."""
        with self.database.write() as connection:
            record.reward(connection, self.config, lease, reward, step_rewards)

    @_repeated
    def fail(self, lease: Lease, failure: str) -> EpisodeState:
        """End an attempt that failed for a reason other than the policy: the episode is retried, or after
        `max_failures` its group is dropped."""
        with self.database.write() as connection:
            return queues.fail_attempt(connection, self.config, lease, failure)

    def interrupt(self, lease: Lease, reason: str) -> bool:
        """End an attempt because a process it depends on died: the episode is retried, up to `max_deaths`. Returns
        False if the lease is lost."""
        return self._give_up(lease, reason)

    def claim(self, num_units: int, version: PolicyVersion, quotas: Mapping[str, int] | None = None) -> Claim | None:
        """Claim a batch for weights at `version`; None while the window holds too few finished units. `quotas`: units
        per label (STAGE/DOMAIN, or DOMAIN for units without a stage), which add up to `num_units`."""
        return self._claim(Wanted(num_units, None if quotas is None else lambda _: quotas), version)

    def claim_within(
        self,
        max_tokens: int,
        max_units: int,
        version: PolicyVersion,
        quotas: Callable[[int], Mapping[str, int]] | None = None,
    ) -> Claim | None:
        """Claim as many units as fit into `max_tokens`, at least one and at most `max_units`; None while the window
        holds too few finished units to decide. A token counts once for each attempt that recorded it. `quotas`: maps
        a batch size to the units per label."""
        return self._claim(Wanted(max_units, quotas, max_tokens), version)

    @_repeated
    def _claim(self, wanted: Wanted, version: PolicyVersion) -> Claim | None:
        try:
            with _collecting_later(), self.database.write() as connection:
                now_s = partial(self._now_s, connection)
                return batches.claim(connection, self.config, wanted, version, now_s, self._stuck)
        except ChangedError:
            return None

    @_repeated
    def batch_sizes(self, lineage: str) -> list[int]:
        """Number of units of each committed batch, in step order."""
        with self.database.read() as connection:
            return batches.batch_sizes(connection, lineage)

    @_repeated
    def fetch(self, claimed: Claim) -> list[StoredUnit]:
        """The units of a batch in submission order."""
        with self.database.read() as connection:
            return read_units(connection, claimed.units, self.vocab_size)

    @_repeated
    def commit(self, claimed: Claim, version: PolicyVersion) -> None:
        """Mark a batch as trained: its step produced `version`."""
        with self.database.write() as connection:
            batches.commit(connection, self.config, claimed, version)

    @_repeated
    def flush(self) -> None:
        """Wait until every committed transaction is on disk. Call it before writing a checkpoint: if the commits of its
        steps were lost in a power loss, the trainer would train on their units twice."""
        self.database.flush()

    @_repeated
    def mark_durable(self, version: PolicyVersion) -> None:
        """Record that a checkpoint of `version` is on disk."""
        with self.database.write() as connection:
            batches.mark_durable(connection, version)

    @_repeated
    def restore(self, version: PolicyVersion) -> Restored:
        """Restore the pool to the weights of a checkpoint: units that they have not trained on return to the queue, and
        commits of batches claimed before are refused. Raises if the pool is behind the checkpoint."""
        with self.database.write() as connection:
            restored = batches.restore(connection, self.config, version)
        if restored.num_deleted:
            _log.warning(
                "%d units that version %s has not trained on are already deleted", restored.num_deleted, version
            )
        return restored

    @_repeated
    def epoch(self) -> int:
        """Number of restores so far."""
        with self.database.read() as connection:
            return int(queues.read_queue(connection).epoch)

    @_repeated
    def rejoin(self, epoch: int) -> None:
        """Record that the sampler serves a version that was read under `epoch`: unless the pool was restored since, its
        samples belong to the pool's lineage from now on."""
        with self.database.write() as connection:
            batches.rejoin(connection, epoch)

    @_repeated
    def refuse_behind(self, version: PolicyVersion) -> None:
        """Raise if the newest checkpoint is of `version` and the pool lacks commits of its steps."""
        with self.database.read() as connection:
            batches.refuse_behind(queues.read_queue(connection), version)

    @_repeated
    def unjudged(self, num_units: int) -> list[tuple[StoredUnit, list[Lease]]]:
        """Units whose episodes have all ended but lack rewards, including those that a dead loop left."""
        unit = unit_table.c
        is_over = (in_state(unit.state, UnitState.OPEN), unit.num_unfinished == literal_column("0"))
        with self.database.read() as connection:
            ids = list(connection.execute(select(unit.id).where(*is_over).order_by(unit.id).limit(num_units)).scalars())
            leases = {lease.name: lease for lease in queues.leases_in(connection, ids)}
            units = read_units(connection, ids, self.vocab_size)
        return [(stored, [leases[episode.name] for episode in stored.episodes]) for stored in units]

    @_repeated
    def counts(self) -> dict[str, int]:
        """Number of episodes in each state."""
        query = select(episode_table.c.state, func.count()).group_by(episode_table.c.state)
        with self.database.read() as connection:
            counts = {row.state: row[1] for row in connection.execute(query)}
        return {state: counts.get(state, 0) for state in EpisodeState}

    @_repeated
    def queue_positions(self, num_units: int) -> list[tuple[int, str]]:
        """Position and state of the first queued units, the head first."""
        unit = unit_table.c
        query = select(unit.place, unit.state).where(unit.is_queued).order_by(unit.place).limit(num_units)
        with self.database.read() as connection:
            return [(position, state) for position, state in connection.execute(query)]

    @_repeated
    def tally(self) -> Tally:
        """Units submitted, trained, requeued and dropped, by difficulty."""
        with self.database.read() as connection:
            return read_tally(connection)

    @_repeated
    def sweep(self) -> int:
        """Delete some of the episodes beyond the retention limits; returns how many, 0 when none are left."""
        with self.database.write() as connection:
            num_episodes = _sweep(connection, self.config.retention)
        if num_episodes:
            self.database.reclaim()
        return num_episodes


# -- retention ---------------------------------------------------------------------------------------------------------


def _sweep(connection: Connection, config: RetentionConfig) -> int:
    """Deletes trained and dropped units once they are old enough, a few episodes at a time.

    It keeps units that a restored checkpoint would need again, those of steps after the newest checkpoint, and dropped
    units that wait for a replacement.

    Delete units over the limits, oldest first; returns the number of deleted episodes, 0 when none are left.
    """
    queue = read_queue(connection)
    by_versions = 0 if config.versions is None else queue.step - config.versions + 1
    oldest_retained = max(by_versions, _oldest_retained(connection, config))
    unit = unit_table.c
    is_durable = or_(unit.state == UnitState.DROPPED, unit.step <= queue.durable_step)
    is_done = unit.state.in_((UnitState.TRAINED, UnitState.DROPPED))
    is_over = and_(is_done, unit.step < oldest_retained, is_durable, ~unit.is_owed)
    ids: list[int] = []
    num_episodes = 0
    query = select(unit.id, unit.size).where(is_over).order_by(unit.step, unit.id).limit(config.sweep_episodes)
    for row in connection.execute(query.with_for_update(skip_locked=True)).all():
        if ids and num_episodes + row.size > config.sweep_episodes:
            break
        ids.append(row.id)
        num_episodes += row.size
    if ids:
        _delete(connection, ids)
    return num_episodes


def _oldest_retained(connection: Connection, config: RetentionConfig) -> int:
    """The oldest step such that all units from it on fit into the byte limit."""
    if config.num_bytes is None:
        return 0
    unit = unit_table.c
    is_done = unit.state.in_((UnitState.TRAINED, UnitState.DROPPED))
    sizes = select(unit.step, func.sum(unit.num_bytes)).where(is_done).group_by(unit.step).order_by(unit.step.desc())
    total = 0
    for step, num_bytes in connection.execute(sizes):
        total += int(num_bytes)
        if total > config.num_bytes:
            return int(step) + 1
    return 0


def _delete(connection: Connection, unit_ids: Sequence[int]) -> None:
    episode = episode_table.c
    ids = list(connection.execute(select(episode.id).where(episode.unit.in_(unit_ids))).scalars())
    connection.execute(delete(call_table).where(call_table.c.episode.in_(ids)))
    connection.execute(delete(episode_table).where(episode.id.in_(ids)))
    connection.execute(delete(unit_table).where(unit_table.c.id.in_(unit_ids)))


# -- asyncio -----------------------------------------------------------------------------------------------------------


class _Gathering(Generic[Item, T]):
    """Batches pending items into one store operation and resolves their futures."""

    def __init__(self, store: Callable[[list[Item]], Awaitable[Sequence[T | M2ForgeError]]]) -> None:
        self._store = store
        self._waiting: list[tuple[Item, asyncio.Future[T]]] = []
        self._flushing: asyncio.Task[None] | None = None

    async def add(self, item: Item) -> T:
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        if self._flushing is None:
            self._flushing = asyncio.create_task(self._flush())
        return await future

    async def finish(self) -> None:
        while self._flushing is not None:
            await self._flushing

    async def _flush(self) -> None:
        try:
            while self._waiting:
                batch, self._waiting = self._waiting[:MAX_AT_ONCE], self._waiting[MAX_AT_ONCE:]
                await self._store_batch(batch)
        finally:
            self._flushing = None

    async def _store_batch(self, batch: list[tuple[Item, asyncio.Future[T]]]) -> None:
        results: Sequence[T | M2ForgeError]
        try:
            results = await self._store([item for item, _ in batch])
        except M2ForgeError as error:
            # The database failed: nothing of the batch is stored.
            results = [error] * len(batch)
        except BaseException:
            for _, future in batch:
                future.cancel()
            raise
        for (_, future), answer in zip(batch, results, strict=True):
            if future.done():
                continue
            if isinstance(answer, M2ForgeError):
                future.set_exception(answer)
            else:
                future.set_result(answer)


def _lower_priority(niceness: int) -> None:
    """Add to the niceness of the calling thread alone, which Linux allows."""
    thread = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + niceness))


class PoolWriter:
    """Asyncio access to a pool: calls of many agents in, few transactions out.

        async with PoolWriter(pool) as writer:
            await writer.append(lease, call)               returns when it is stored
            await writer.end(lease, calls, outcome)        stores a whole attempt; returns when it is stored
            leases = await writer.run(pool.lease, "worker", 8)

    SQLite has one writer at a time, and a transaction costs the same for one call as for many. So one thread does all
    writes: it stores everything that is pending in one transaction and resolves each caller's future. The event loop
    never blocks, and the more agents there are, the more calls share a transaction and its disk sync.
    """

    def __init__(self, pool: Pool, niceness: int = 0) -> None:
        """`niceness`: is added to the thread's. It is ignored on SQLite, where a writer blocks all others."""
        self._pool = pool
        lower = None if pool.database.is_sqlite or not niceness else partial(_lower_priority, niceness)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pool", initializer=lower)
        self._appends: _Gathering[Append, None] = _Gathering(lambda items: self.run(pool.append, items))
        self._endings: _Gathering[Ending, bool] = _Gathering(lambda items: self.run(pool.end, items))

    async def append(self, lease: Lease, call: StoredCall) -> None:
        """Store a call; raises `LeaseLostError` if the attempt is no longer the episode's current one. Calls of one
        attempt are stored in the order in which they are appended."""
        await self._appends.add(Append(lease, call))

    async def end(self, lease: Lease, calls: Sequence[StoredCall], outcome: Outcome) -> bool:
        """End an attempt; `calls` are those not appended before. Returns whether its unit may now be complete and wait
        for a reward. Raises as `append` does, and then stores none of it."""
        return await self._endings.add(Ending(lease, tuple(calls), outcome))

    async def run(self, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a method of the pool in the writer's thread, in the order of the calls."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, lambda: method(*args, **kwargs))

    async def close(self) -> None:
        """Store all pending items, then stop the thread."""
        await self._appends.finish()
        await self._endings.finish()
        self._thread.shutdown()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            # A process that ends does not wait for its database.
            self._pool.database.stop_waiting()
        await self.close()
