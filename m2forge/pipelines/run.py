"""Runs a pipeline: its stages one after the other over all items, each item's outcome committed once.

    runs/NAME/pipeline.db       all state (`m2forge/pipelines/store.py`)
    runs/NAME/yields.json       counts by stage and reason, completions, tokens, seconds
    runs/NAME/…                 what the pipeline's write stages write

The same command resumes a killed run and, after it has ended, processes the failed items again. Workers finish in any
order; the order of items is the source's, so the files do not depend on their number.

A stage in worker processes has one process per thread. It dies with this process. If it dies while it processes an
item, by a signal or out of memory, that item fails and the next one gets another process.
"""

import asyncio
import ctypes
import importlib
import json
import logging
import os
import pickle
import random
import shutil
import signal
import sqlite3
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import islice
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar, cast

from rich.console import Console
from rich.table import Table

from m2forge.errors import ConfigError, M2ForgeError, RunError
from m2forge.files import write_atomic
from m2forge.loop_thread import LoopThread
from m2forge.observe.progress import progress
from m2forge.pipelines.completion import Completions, EndpointError, serve_folder
from m2forge.pipelines.config import PIPELINES, CustomConfig, PipelineConfig
from m2forge.pipelines.stage import (
    Completion,
    Context,
    Failure,
    Item,
    Messages,
    Outcome,
    Pipeline,
    Rejection,
    SetStage,
    Stage,
)
from m2forge.pipelines.store import Processed, Row, StageYield, Store
from m2forge.records import JsonValue
from m2forge.tasks.source import located
from m2forge.tasks.user_code import end_of_trace, load_object
from m2forge.train.run_dir import hold_run, open_run

T = TypeVar("T")
STORE_FILE, YIELDS_FILE, SCRATCH_FOLDER = "pipeline.db", "yields.json", "scratch"
COMMIT_S, NUM_COMMITTED = 0.5, 8192
"""Outcomes are committed after this time, or this number."""
YIELDS_S, YIELDS_SHARE = 2.0, 0.05
"""Interval at which `yields.json` is written while a stage runs, and the maximum share of the time that this takes."""
MUTABLE_KEYS = ("url", "key_env", "timeout_s", "max_retries", "retry_s")
"""Keys of a model that may change on resume."""
PR_SET_PDEATHSIG = 1
TRACE_LINES = 4

_log = logging.getLogger(__name__)


def run_pipeline(config: PipelineConfig, runs: Path, console: Console | None = None) -> Path:
    """Run, or resume, the configured pipeline; returns the run's directory."""
    pipeline = make_pipeline(config)
    # Refuses missing input before anything is written.
    pipeline.source.fingerprint()
    run_dir = runs / config.name
    models = tuple(f"models.{name}.{key}" for name in config.models for key in MUTABLE_KEYS)
    with hold_run(run_dir):
        phase = 0 if _has_begun(run_dir) else None
        open_run(run_dir, config, phase, mutable=("workers", "replay", "completions", *models))
        yields = run_stages(pipeline, config, run_dir)
    (console or Console()).print(render(yields))
    if num_failed := sum(one.num_failed for one in yields):
        _log.warning("%d items failed; the same command processes them again", num_failed)
    return run_dir


def _has_begun(run_dir: Path) -> bool:
    """Whether a run has stored records; until then its configuration may still change."""
    path = run_dir / STORE_FILE
    if not path.exists():
        return False
    with Store(path) as store:
        return store.fact("num_records", "0") != "0"


def make_pipeline(config: PipelineConfig) -> Pipeline:
    if config.custom is not None:
        return _custom_pipeline(config.custom)
    ((key, table),) = config.tables.items()
    made: Pipeline = importlib.import_module(PIPELINES[key]).make_pipeline(table)
    return made


def _custom_pipeline(config: CustomConfig) -> Pipeline:
    make = load_object(located(config.pipeline))
    if not callable(make):
        raise ConfigError(f"{config.pipeline}: expected a function that returns a Pipeline, received {make!r}")
    try:
        made = make(config.options)
    except M2ForgeError:
        raise
    except Exception as error:
        raise ConfigError(f"{config.pipeline}: raised:\n{end_of_trace(error)}") from error
    if not isinstance(made, Pipeline):
        raise ConfigError(f"{config.pipeline}: expected a Pipeline (m2forge/pipelines/stage.py), received {made!r}")
    return made


def run_stages(pipeline: Pipeline, config: PipelineConfig, run_dir: Path) -> list[StageYield]:
    """Run the stages in a directory that only this process uses."""
    names = [pipeline.source.name, *(stage.name for stage in pipeline.stages)]
    if len(set(names)) < len(names):
        raise RunError(f"stages: expected a different name for each, received {names}")
    scratch = run_dir / SCRATCH_FOLDER
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    with ExitStack() as stack:
        earlier = [stack.enter_context(Store(Path(path), is_read_only=True)) for path in config.completions]
        store, loop = stack.enter_context(Store(run_dir / STORE_FILE)), stack.enter_context(LoopThread("pipeline"))
        local = {name: model for name, model in config.models.items() if model.folder is not None and not config.replay}
        served = {name: stack.enter_context(serve_folder(name, model, scratch)) for name, model in local.items()}
        completions = Completions(config.models, store, loop, is_replay=config.replay, earlier=earlier, served=served)
        runner = _Runner(pipeline, config, run_dir, store, loop, completions)
        try:
            runner.run()
        except sqlite3.Error as error:
            raise RunError(
                f"{run_dir / STORE_FILE}: {error}; make room or end what else uses it, then start the run again"
            ) from error
        finally:
            completions.close()
        shutil.rmtree(scratch, ignore_errors=True)
        return runner.yields()


def render(yields: Sequence[StageYield]) -> Table:
    """The yields as a table: a row for each stage, below it one for each reason."""
    table = Table(title="Yields", title_justify="left", box=None, padding=(0, 1, 0, 0))
    has_models = any(one.num_asked or one.num_cached for one in yields)
    models = ("asked", "cached", "tokens") if has_models else ()
    table.add_column("stage", overflow="fold")
    for name in ("in", "passed", "rejected", "failed", "made", *models, "seconds"):
        table.add_column(name, justify="right", min_width=len(name))
    for one in yields:
        numbers = [one.num_in, one.num_passed, one.num_rejected, one.num_failed, one.num_made]
        numbers += [one.num_asked, one.num_cached, one.num_prompt + one.num_sampled] if has_models else []
        table.add_row(one.name, *(f"{number:,}" for number in numbers), f"{one.seconds:.1f}")
        for reason, num in one.rejected.items():
            table.add_row(f"  {reason}", "", "", f"{num:,}", style="dim")
        for reason, num in one.failed.items():
            table.add_row(f"  {reason}", "", "", "", f"{num:,}", style="dim")
    return table


# -- contexts ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _RunContext:
    """The context of one item, in the process of the run."""

    run_dir: Path
    seed: int
    stage: str
    store: Store
    loop: LoopThread
    completions: Completions
    num_cached: int = 0

    def random(self, item: Item) -> random.Random:
        return _seeded(self.seed, self.stage, item)

    def ask(
        self,
        model: str,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, JsonValue]] = (),
        draw: int = 0,
        **sampling: JsonValue,
    ) -> Completion:
        completion, is_cached = self.completions.ask(self.stage, model, messages, tools, draw, sampling)
        self.num_cached += is_cached
        return completion

    def remember(self, key: JsonValue, text: str) -> str:
        return self.completions.remember(self.stage, key, text)

    def put(self, data: bytes) -> str:
        return self.store.put(data)

    def get(self, digest: str) -> bytes:
        return self.store.get(digest)

    def run(self, coroutine: Coroutine[object, object, T]) -> T:
        return self.loop.run(coroutine)


class _WorkerContext:
    """The context in a worker process: operations on the store are requests to the run's process."""

    def __init__(self, connection: Connection, run_dir: Path, seed: int, stage: str) -> None:
        self._connection, self.run_dir, self.seed, self._stage = connection, run_dir, seed, stage

    def random(self, item: Item) -> random.Random:
        return _seeded(self.seed, self._stage, item)

    def ask(
        self,
        model: str,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, JsonValue]] = (),
        draw: int = 0,
        **sampling: JsonValue,
    ) -> Completion:
        return cast("Completion", self._remote("ask", model, messages, tools, draw, sampling))

    def remember(self, key: JsonValue, text: str) -> str:
        return cast("str", self._remote("remember", key, text))

    def put(self, data: bytes) -> str:
        return cast("str", self._remote("put", data))

    def get(self, digest: str) -> bytes:
        return cast("bytes", self._remote("get", digest))

    def run(self, coroutine: Coroutine[object, object, T]) -> T:
        return asyncio.run(_await(coroutine))

    def _remote(self, name: str, *arguments: object) -> object:
        self._connection.send((name, arguments))
        value, error = self._connection.recv()
        if error is not None:
            raise error
        return value


async def _await(coroutine: Coroutine[object, object, T]) -> T:
    return await coroutine


def _seeded(seed: int, stage: str, item: Item) -> random.Random:
    return random.Random(f"{seed}/{stage}/{item.id}")


def _processed(stage: Stage, item: Item, context: Context) -> Outcome:
    """The outcome of one item; an exception of the stage is a failure, unless it ends the run."""
    try:
        outcome = stage.process(item, context)
    except RunError:
        raise
    except EndpointError as error:
        return Failure(error.reason, {"error": str(error)})
    except M2ForgeError as error:
        return Failure(type(error).__name__, {"error": str(error)})
    except Exception as error:  # noqa: BLE001  (one item's failure must not end the others')
        trace = "".join(traceback.format_exception(error)).strip().splitlines()[-TRACE_LINES:]
        return Failure(type(error).__name__, {"error": str(error), "traceback": "\n".join(trace)})
    if not isinstance(outcome, Item | Rejection) and not outcome:
        return Failure("no item", {"error": f"stage {stage.name} returned neither an item nor a rejection"})
    return outcome


# -- worker processes --------------------------------------------------------------------------------------------------


class _Worker:
    """A worker process, for one thread of this process."""

    def __init__(self, stage: Stage, context: Callable[[], _RunContext], own_code: str | None) -> None:
        """`own_code`: the reference to the user's module that defines the stage."""
        self._context = context
        start = context()
        spawn = get_context("spawn")
        self._connection, theirs = spawn.Pipe()
        # As bytes: the process must import a user's module before it unpickles the stage.
        arguments = (theirs, _pickled(stage), own_code, start.run_dir, start.seed, os.getpid())
        self._process = spawn.Process(target=_serve_items, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        try:
            self._receive(start, "started")
        except EOFError as error:
            self._process.join()
            status = self._process.exitcode
            raise RunError(f"stage {stage.name}: its worker process died at its start (status {status})") from error

    def process(self, item: Item) -> tuple[Outcome, int, bool]:
        """The outcome, the number of stored completions, and whether the process is alive."""
        context = self._context()
        try:
            self._connection.send(item)
            outcome = cast("Outcome", self._receive(context, "done"))
        except (EOFError, OSError):
            self._process.join()
            failure = Failure("worker process died", {"exit_status": self._process.exitcode})
            return failure, context.num_cached, False
        return outcome, context.num_cached, True

    def close(self) -> None:
        self._connection.close()
        self._process.join(1.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def kill(self) -> None:
        self._process.kill()

    def _receive(self, context: _RunContext, wanted: str) -> object:
        """Serve the worker's requests until it sends the expected reply."""
        while True:
            name, arguments = self._connection.recv()
            if name == wanted:
                return arguments
            if name == "fatal":
                raise RunError(str(arguments))
            reply: tuple[object, M2ForgeError | None]
            try:
                reply = (_serve(context, name, arguments), None)
            except RunError:
                raise
            except M2ForgeError as error:
                reply = (None, error)
            self._connection.send(reply)


def _pickled(stage: Stage) -> bytes:
    try:
        return pickle.dumps(stage)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise RunError(
            f"stage {stage.name}: it runs in worker processes and cannot be pickled ({error}); give it neither lambdas "
            'nor open files, or set runs_in = "threads"'
        ) from error


def _serve(context: _RunContext, name: str, arguments: tuple[Any, ...]) -> object:
    match name:
        case "ask":
            model, messages, tools, draw, sampling = arguments
            return context.ask(model, messages, tools=tools, draw=draw, **sampling)
        case "remember":
            return context.remember(*arguments)
        case "put":
            return context.put(*arguments)
    assert name == "get"
    return context.get(*arguments)


def _serve_items(
    connection: Connection, pickled: bytes, own_code: str | None, run_dir: Path, seed: int, parent: int
) -> None:
    """The worker process: items in, outcomes out, until the connection or the parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if os.getppid() != parent:
        return
    if own_code is not None:
        load_object(own_code)
    stage: Stage = pickle.loads(pickled)
    context = _WorkerContext(connection, run_dir, seed, stage.name)
    with suppress(EOFError, BrokenPipeError):
        try:
            stage.open(context)
            connection.send(("started", None))
            while True:
                connection.send(("done", _processed(stage, connection.recv(), context)))
        except M2ForgeError as error:
            connection.send(("fatal", str(error)))
        finally:
            stage.close()


# -- the run -----------------------------------------------------------------------------------------------------------


class _Items:
    """The items of a stage, read from the store each time."""

    def __init__(self, store: Store, stage: int) -> None:
        self._store, self._stage = store, stage

    def __iter__(self) -> Iterator[Item]:
        return (row.item for row in self._store.items(self._stage))


class _Runner:
    def __init__(
        self,
        pipeline: Pipeline,
        config: PipelineConfig,
        run_dir: Path,
        store: Store,
        loop: LoopThread,
        completions: Completions,
    ) -> None:
        self._pipeline, self._num_workers, self._seed = pipeline, config.workers, config.seed
        self._own_code = None if config.custom is None else located(config.custom.pipeline)
        self._run_dir, self._store, self._loop, self._completions = run_dir, store, loop, completions
        self._next_yields_s = 0.0

    def run(self) -> None:
        self._check_input()
        if num_failed := self._store.forget_failures():
            _log.info("processing %d failed items again", num_failed)
        self._read_source()
        for number, stage in enumerate(self._pipeline.stages, 1):
            if isinstance(stage, SetStage):
                self._run_set(number, stage)
            else:
                self._run_items(number, stage)
            self._store.check(number, stage.name)
        self._write_yields(is_finished=True)

    def yields(self) -> list[StageYield]:
        names = (self._pipeline.source.name, *(stage.name for stage in self._pipeline.stages))
        return [self._store.stage_yield(number, name) for number, name in enumerate(names)]

    def _context(self, stage: str) -> _RunContext:
        return _RunContext(self._run_dir, self._seed, stage, self._store, self._loop, self._completions)

    def _check_input(self) -> None:
        now = self._pipeline.source.fingerprint()
        if self._store.fact("num_records", "0") != "0" and self._store.fact("fingerprint", now) != now:
            raise ConfigError(f"{self._run_dir} was started with other input; start a run of another name")
        self._store.set_fact("fingerprint", now)

    def _write_yields(self, *, is_finished: bool = False) -> None:
        begun_s = time.monotonic()
        if begun_s < self._next_yields_s and not is_finished:
            return
        stages = self.yields()
        found: dict[str, JsonValue] = {
            "is_finished": is_finished,
            "num_accepted": self._store.num_items(len(stages)),
            "stages": [one.to_json() for one in stages],
        }
        write_atomic(self._run_dir / YIELDS_FILE, json.dumps(found, indent=1) + "\n")
        now_s = time.monotonic()
        self._next_yields_s = now_s + max(YIELDS_S, (now_s - begun_s) / YIELDS_SHARE)

    def _read_source(self) -> None:
        source, start = self._pipeline.source, int(self._store.fact("num_records", "0"))
        if self._store.fact("is_read", ""):
            return
        with progress(None, source.name) as bar:
            bar.advance(start)
            started_s = time.perf_counter()
            found = islice(source.read(self._context(source.name)), start, None)
            batches: Iterator[list[Item | Rejection]] = _batches(found)
            for records in batches:
                now_s = time.perf_counter()
                self._store.add_records(start, records, now_s - started_s)
                start, started_s = start + len(records), now_s
                bar.advance(len(records))
                self._write_yields()
        self._store.set_fact("is_read", "yes")
        self._store.check(0, source.name)

    def _run_set(self, number: int, stage: SetStage) -> None:
        digest, total = self._store.digest(number), self._store.num_items(number)
        is_done = self._store.fact(f"digest-{number}", "") == digest and self._store.num_outcomes(number) == total
        if is_done and not stage.repeats:
            return
        started_s, outcomes = time.perf_counter(), list[Outcome]()
        context = self._context(stage.name)
        with progress(total, stage.name) as bar:
            for outcome in stage.process_all(_Items(self._store, number), context):
                outcomes.append(outcome)
                bar.advance()
        if len(outcomes) != total:
            raise RunError(f"stage {stage.name}: {total} items in, {len(outcomes)} outcomes; repair the stage")
        each_s = (time.perf_counter() - started_s) / max(1, total)
        rows = self._store.items(number)
        processed = [
            # Completions of the whole stage are counted at its first item.
            Processed(row.path, row.item.id, outcome, context.num_cached if index == 0 else 0, each_s)
            for index, (row, outcome) in enumerate(zip(rows, outcomes, strict=True))
        ]
        self._store.replace(number, processed, digest)
        self._write_yields()

    def _run_items(self, number: int, stage: Stage) -> None:
        total, num_done = self._store.num_items(number), self._store.num_outcomes(number)
        if total == num_done:
            return
        is_here = stage.runs_in != "processes"
        try:
            if is_here:
                stage.open(self._context(stage.name))
            with progress(total, stage.name) as bar:
                bar.advance(num_done)
                for processed in _batches(self._map(stage, self._store.items(number, pending=True))):
                    self._store.commit(number, processed)
                    bar.advance(len(processed))
                    self._write_yields()
        finally:
            if is_here:
                stage.close()

    # -- workers -------------------------------------------------------------------------------------------------------

    def _map(self, stage: Stage, rows: Iterator[Row]) -> Iterator[Processed | None]:
        """Process items in any order; None while workers are busy, so that the caller can commit."""
        if stage.runs_in == "main":
            for row in rows:
                yield self._process_here(stage, row)
            return
        is_here = stage.runs_in != "processes"
        workers = None if is_here else _Workers(stage, lambda: self._context(stage.name), self._own_code)
        process = (lambda row: self._process_here(stage, row)) if workers is None else workers.process
        executor = ThreadPoolExecutor(self._num_workers)
        try:
            waiting = {executor.submit(process, row) for row in islice(rows, 2 * self._num_workers)}
            while waiting:
                done, waiting = wait(waiting, COMMIT_S, FIRST_COMPLETED)
                yield from (future.result() for future in done)
                if not done:
                    yield None
                waiting |= {executor.submit(process, row) for row in islice(rows, len(done))}
        except BaseException:
            # Threads that wait for a model or a worker process must not delay the end.
            self._completions.stop()
            if workers is not None:
                workers.kill()
            executor.shutdown(wait=False, cancel_futures=True)
            raise
        if workers is not None:
            workers.close()
        executor.shutdown()

    def _process_here(self, stage: Stage, row: Row) -> Processed:
        context, started_s = self._context(stage.name), time.perf_counter()
        outcome = _processed(stage, row.item, context)
        return Processed(row.path, row.item.id, outcome, context.num_cached, time.perf_counter() - started_s)


class _Workers:
    """One worker process per thread that requests one."""

    def __init__(self, stage: Stage, context: Callable[[], _RunContext], own_code: str | None) -> None:
        self._stage, self._context, self._own_code = stage, context, own_code
        self._mine, self._all = threading.local(), list[_Worker]()

    def process(self, row: Row) -> Processed:
        worker: _Worker | None = getattr(self._mine, "worker", None)
        if worker is None:
            worker = self._mine.worker = _Worker(self._stage, self._context, self._own_code)
            self._all.append(worker)
        started_s = time.perf_counter()
        outcome, num_cached, is_alive = worker.process(row.item)
        if not is_alive:
            self._mine.worker = None
        return Processed(row.path, row.item.id, outcome, num_cached, time.perf_counter() - started_s)

    def close(self) -> None:
        for worker in self._all:
            worker.close()

    def kill(self) -> None:
        for worker in self._all:
            worker.kill()


def _batches(values: Iterable[T | None]) -> Iterator[list[T]]:
    """Batches of values: one ends after `COMMIT_S`, at `NUM_COMMITTED` values, or at None."""
    batch: list[T] = []
    begun_s = time.monotonic()
    for value in values:
        if value is not None:
            batch.append(value)
        if batch and (value is None or len(batch) == NUM_COMMITTED or time.monotonic() - begun_s >= COMMIT_S):
            yield batch
            batch, begun_s = [], time.monotonic()
    if batch:
        yield batch
