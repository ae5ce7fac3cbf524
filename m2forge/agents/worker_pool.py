"""The agent kind `worker`: programs that stay alive across attempts; jobs in, answers out.

A worker is any program that reads jobs, one JSON object a line, and writes answers:

    {"id": "…", "base_url": "http://…/v1", "api_key": "…", "model": "policy",               to its standard input
     "task": {"id", "domain", "instruction", "difficulty"}, "tools": […], "tools_url": "…", "workspace": "…",
     "sandbox": "…"}
    {"id": "…", "cancel": true}                                                             the job is over: stop it
    {"id": "…", "answer": "…"}   or   {"id": "…", "error": "…", "kind": "…"}                from its standard output
    {"id": "…", "cancelled": true}                                                          confirms a cancel

It may work on several jobs at once and answer them in any order. A job that times out, or whose attempt is cancelled,
is cancelled in the worker: its slot is free once the worker confirms, by `cancelled` or by any other line for that id.
A worker that does not confirm within `agent.cancel_s` may be stuck, so it is restarted, and its other jobs end with
`WorkerDiedError`. A worker that dies is restarted too. A program that dies repeatedly without an answer ends the run.

A program may print other lines; the loop ignores them. A line that looks like JSON but cannot be read, or is nested
deeper than `MAX_DEPTH`, is dropped with a warning.

A job holds nothing that the task's verifier needs. `tools` are functions as OpenAI's API describes them; a call is
`POST {"name", "arguments"}` to `tools_url` with the job's key, and answered by `{"content": "…"}`.

`sandbox` is the path of a Unix socket through which the program runs commands, reads and writes files in the attempt's
sandbox. `workspace` is the folder with the task's files there, which with the backend `process` is also a folder of
this machine; the verifier sees what is left in it. The program itself runs outside.

An error's `kind` (`ErrorKind`) says whether the policy's tokens or the infrastructure caused it. It may be left out.

The socket takes any number of connections, each served in the order of its requests. One JSON object a line:

    {"run": ["sh", "-c", "make"], "stdin": "…", "env": {…}, "timeout_s": 60}    argv; the other keys may be left out
        {"reason": "exited", "status": 0, "stdout": "…", "stderr": "…"}         `OutcomeReason`, `Outcome.status`
    {"read": "src/a.c"}                                                         a file of the workspace
        {"content": BASE64}
    {"write": "src/a.c", "content": BASE64}
        {}

A request that cannot be served is answered by {"error": "…"}, with "kind": "infra" where the sandbox is to blame. The
first request starts the sandbox. A command ends with its connection.
"""

import asyncio
import base64
import contextlib
import json
import logging
import math
import shlex
import tempfile
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from m2forge.agents.attempt import (
    LOST,
    AgentError,
    Answer,
    DeathCause,
    ErrorKind,
    Job,
    JobError,
    Recorded,
    StuckError,
    WorkerDiedError,
)
from m2forge.agents.config import WorkerConfig
from m2forge.agents.program import death_cause, from_here
from m2forge.agents.workspace import remove
from m2forge.errors import DataError, EngineError, M2ForgeError
from m2forge.protocols import Command, Outcome, Sandbox, Worker
from m2forge.records import JsonValue
from m2forge.sandbox.process import ProcessSandbox
from m2forge.text.message import parse_json, tool_to_openai

RESTART_S = 0.5
MAX_DEPTH = 32
"""Maximum JSON nesting depth of a worker's line."""
MAX_DEATHS = 10
"""Deaths per configured worker, without an answer in between, after which the program counts as broken."""

TASK_VIEW = ("id", "domain", "instruction", "difficulty")
"""Fields of a task that the agent receives."""

MAX_REQUEST_BYTES = 96 << 20
MAX_FILE_BYTES = 64 << 20
MAX_SOCKET_PATH_BYTES = 100
"""Linux refuses the paths of sockets from 108 bytes on."""
MAX_REQUEST_DEPTH = 8
SOCKET_NAME = "sandbox.sock"

_log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _WorkerState:
    """One worker: its current process and its jobs."""

    name: str
    jobs: dict[str, asyncio.Future[str]] = field(default_factory=dict)
    cancelled: dict[str, asyncio.Future[bool]] = field(default_factory=dict)
    """Jobs that the worker was asked to cancel; each future resolves to True if it confirmed, False if it died."""
    reserved: str | None = None
    """The job that waits for, or has, exclusive use of the worker."""
    worker: Worker | None = None
    is_stuck: bool = False
    """Whether the loop is stopping the worker because it did not confirm a cancel."""

    @property
    def is_up(self) -> bool:
        return self.worker is not None and not self.is_stuck

    @property
    def num_jobs(self) -> int:
        return len(self.jobs) + len(self.cancelled)


class WorkerPool:
    """See `AttemptAgent`."""

    is_silent_allowed = True

    def __init__(self, config: WorkerConfig, folder: Path) -> None:
        """`folder`: parent of the workers' folders."""
        self._config, self._command = config, Command(from_here(config.command))
        self._states = [_WorkerState(f"worker-{index}") for index in range(config.num_workers)]
        limits = config.sandbox.model_copy(update={"backend": "process"})
        self._sandboxes = [ProcessSandbox(folder / state.name, limits) for state in self._states]
        self._tasks: list[asyncio.Task[None]] = []
        self._cancels: set[asyncio.Task[bool]] = set()
        self._has_changed = asyncio.Event()
        """Set when a slot may have become free."""
        self._num_dropped = 0
        """Number of lines that could not be parsed."""
        self._num_deaths = 0
        """Worker deaths since the last answer."""
        self._last_stderr = ""
        """End of stderr at the last logged death; consecutive deaths with the same text are logged once."""
        self._broken: JobError | None = None

    async def __aenter__(self) -> "WorkerPool":
        self._tasks = [
            asyncio.create_task(self._supervise(state, sandbox))
            for state, sandbox in zip(self._states, self._sandboxes, strict=True)
        ]
        return self

    async def __aexit__(self, *error: object) -> None:
        ending = [*self._tasks, *self._cancels]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        for sandbox in self._sandboxes:
            await sandbox.close()

    async def watch(self) -> None:
        """Wait until the program counts as broken, then raise."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()

    async def attempt(self, job: Job, *, is_exclusive: bool = False) -> Answer:
        """The attempt's timeout starts when a worker has a free slot. `is_exclusive`: give the worker no other job."""
        async with serve_sandbox(job) as socket:
            line = _job_line(job, socket)
            if not is_exclusive:
                return Answer(await self._attempt(await self._free_worker(), job.id, line))
            state = await self._reserve_worker(job.id)
            try:
                return Answer(await self._attempt(state, job.id, line))
            finally:
                state.reserved = None
                self._has_changed.set()

    async def inspect(self, answer: Answer, recorded: Recorded) -> bool | None:
        """A worker logs nothing."""
        return None

    async def _attempt(self, state: _WorkerState, id: str, job: bytes) -> str:
        # There is no await between choosing the worker and this entry.
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        state.jobs[id] = future
        try:
            async with asyncio.timeout(self._config.timeout_s):
                assert state.worker is not None
                await state.worker.send(job)
                return await future
        except TimeoutError:
            if future.done() and not future.cancelled():
                return future.result()  # The answer arrived at the moment of the timeout.
            if state.worker is None:
                # The worker died before the timeout; wait until its process has ended.
                await asyncio.shield(self._cancel(state, id))
                raise WorkerDiedError(f"{state.name} died") from None
            has_others = any(other != id for other in (*state.jobs, *state.cancelled))
            if not await asyncio.shield(self._cancel(state, id)):
                problem = f"{state.name} did not confirm that it cancelled the job"
                # Any of its jobs may be the one that blocks it.
                raise WorkerDiedError(problem) if has_others else StuckError(problem) from None
            raise
        except asyncio.CancelledError:
            self._cancel(state, id)
            raise
        finally:
            if state.jobs.get(id) is future:
                del state.jobs[id]
            self._has_changed.set()

    def _cancel(self, state: _WorkerState, id: str) -> asyncio.Task[bool]:
        """Ask the worker to cancel a job; the task returns whether it confirmed."""
        task = asyncio.create_task(self._confirm(state, id))
        if state.jobs.pop(id, None) is not None:
            state.cancelled[id] = asyncio.get_running_loop().create_future()
        self._cancels.add(task)
        task.add_done_callback(self._cancels.discard)
        return task

    async def _confirm(self, state: _WorkerState, id: str) -> bool:
        confirmed, worker = state.cancelled.get(id), state.worker
        if confirmed is None:
            return True  # The worker has died, and the job with it.
        if worker is None:
            return await asyncio.shield(confirmed)  # The worker is being stopped.
        line = json.dumps({"id": id, "cancel": True}).encode() + b"\n"
        try:
            async with asyncio.timeout(self._config.cancel_s):
                await worker.send(line)
                return await asyncio.shield(confirmed)
        except TimeoutError:
            # Another job's cancel may have restarted the worker meanwhile.
            if state.worker is worker and not confirmed.done():
                _log.warning("%s did not cancel %s within %g s; restarting it", state.name, id, self._config.cancel_s)
                state.is_stuck = True
                await worker.stop()
            return False

    async def _free_worker(self) -> _WorkerState:
        """Wait for a worker with a free slot; returns the one with the fewest jobs."""
        while True:
            if self._broken is not None:
                raise self._broken
            free = [
                state
                for state in self._states
                if state.is_up and state.reserved is None and state.num_jobs < self._config.jobs_per_worker
            ]
            if free:
                return min(free, key=lambda state: state.num_jobs)
            self._has_changed.clear()
            await self._has_changed.wait()

    async def _reserve_worker(self, id: str) -> _WorkerState:
        """Reserve the worker with the fewest jobs and wait until it has none left; it takes no other jobs."""
        while not (unreserved := [state for state in self._states if state.reserved is None]):
            if self._broken is not None:
                raise self._broken
            self._has_changed.clear()
            await self._has_changed.wait()
        state = min(unreserved, key=lambda state: state.num_jobs)
        state.reserved = id
        try:
            while not state.is_up or state.num_jobs:
                if self._broken is not None:
                    raise self._broken
                self._has_changed.clear()
                await self._has_changed.wait()
        except BaseException:
            state.reserved = None
            self._has_changed.set()
            raise
        return state

    async def _supervise(self, state: _WorkerState, sandbox: ProcessSandbox) -> None:
        while self._broken is None:
            worker = await sandbox.start(self._command)
            state.worker, state.is_stuck = worker, False
            self._has_changed.set()
            is_flood = False
            try:
                while line := await worker.receive_line():
                    self._take(state, line)
            except DataError as error:
                is_flood = True
                _log.warning("%s: %s", state.name, error)
            finally:
                state.worker = None
                outcome = await worker.stop()
                cause = DeathCause.LIMIT if is_flood else death_cause(outcome)
                self._fail_jobs(state, f"{state.name} ended with status {outcome.status}", cause)
            if not state.is_stuck:
                self._note_death(state, outcome)
                await asyncio.sleep(RESTART_S)

    def _note_death(self, state: _WorkerState, outcome: Outcome) -> None:
        self._num_deaths += 1
        last_stderr = outcome.stderr.text()[-1000:].strip() or "it wrote nothing to stderr"
        if self._num_deaths == 1 or last_stderr != self._last_stderr:
            self._last_stderr = last_stderr
            _log.warning("%s ended with status %d: %s", state.name, outcome.status, last_stderr)
        if self._num_deaths >= MAX_DEATHS * len(self._states) and self._broken is None:
            self._broken = JobError(
                f"the agent's program ended {self._num_deaths} times without an answer, the last time with status "
                f"{outcome.status}: {last_stderr.splitlines()[-1]}; make sure that `{shlex.join(self._command.argv)}` "
                f"starts in an empty folder with only the environment variables of agent.sandbox.inherits"
            )
            self._has_changed.set()
            raise self._broken

    def _take(self, state: _WorkerState, line: bytes) -> None:
        try:
            message = parse_json(line.decode(), MAX_DEPTH)
        except (ValueError, MemoryError) as error:
            if line.lstrip()[:1] in (b"{", b"["):
                self._note_dropped(state, line, error)
            return
        id = message.get("id") if isinstance(message, dict) else None
        if not isinstance(message, dict) or not isinstance(id, str):
            return
        confirmed, future = state.cancelled.pop(id, None), state.jobs.get(id)
        if confirmed is not None:
            self._has_changed.set()
            if not confirmed.done():
                confirmed.set_result(True)
        if future is None or future.done():
            return
        self._num_deaths = 0
        answer = message.get("answer")
        if isinstance(answer, str):
            future.set_result(answer)
        else:
            kind = message.get("kind")
            known = ErrorKind(kind) if isinstance(kind, str) and kind in list(ErrorKind) else None
            future.set_exception(AgentError(f"the agent reported an error: {message.get('error')!r}", known))

    def _note_dropped(self, state: _WorkerState, line: bytes, error: Exception) -> None:
        self._num_dropped += 1
        if math.log10(self._num_dropped).is_integer():
            _log.warning(
                "%s: dropped a line of %d bytes (%s); %d so far", state.name, len(line), error, self._num_dropped
            )

    def _fail_jobs(self, state: _WorkerState, reason: str, cause: DeathCause) -> None:
        for future in state.jobs.values():
            if not future.done():
                future.set_exception(WorkerDiedError(reason, cause))
        for confirmed in state.cancelled.values():
            if not confirmed.done():
                confirmed.set_result(False)
        state.jobs, state.cancelled = {}, {}
        self._has_changed.set()


def _job_line(job: Job, socket: str) -> bytes:
    """The job's line, without the task's metadata, which contains answers or what reveals them."""
    url = f"{job.endpoint.url.rstrip('/')}/v1"
    fields: Mapping[str, JsonValue] = {
        "id": job.id,
        "base_url": url,
        "api_key": job.endpoint.key,
        "model": job.endpoint.model,
        "task": {name: value for name, value in asdict(job.task).items() if name in TASK_VIEW},
        "tools": [tool_to_openai(tool) for tool in job.tools],
        "tools_url": f"{url}/tools/call",
        "workspace": job.workspace.inside,
        "sandbox": socket,
    }
    return json.dumps(fields).encode() + b"\n"


# -- the socket of an attempt's sandbox --------------------------------------------------------------------------------


@asynccontextmanager
async def serve_sandbox(job: Job) -> AsyncGenerator[str, None]:
    """Serve the sandbox of a job's workspace; yields the socket's path."""
    with _folder_for(job.workspace.folder) as folder:
        path = str(folder / SOCKET_NAME)
        connections: set[asyncio.Task[None]] = set()

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            connections.add(task)
            try:
                await _serve_connection(job, reader, writer)
            except (OSError, ValueError, asyncio.CancelledError):
                pass  # The connection broke, a line was too long, or the attempt is over.
            finally:
                connections.discard(task)
                writer.close()

        server = await asyncio.start_unix_server(accept, path, limit=MAX_REQUEST_BYTES)
        try:
            yield path
        finally:
            server.close()
            for task in list(connections):
                task.cancel()
            await asyncio.gather(*connections, return_exceptions=True)
            Path(path).unlink(missing_ok=True)


@contextlib.contextmanager
def _folder_for(folder: Path) -> Iterator[Path]:
    if len(str(folder / SOCKET_NAME).encode()) <= MAX_SOCKET_PATH_BYTES:
        yield folder
        return
    short = Path(tempfile.mkdtemp(prefix="m2forge-"))
    try:
        yield short
    finally:
        remove(short)


async def _serve_connection(job: Job, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while line := await reader.readline():
        answering = asyncio.ensure_future(_answer_request(job, line))
        # The other side only writes after it has its answer, so that a read ends when it is gone.
        watching = asyncio.ensure_future(_wait_for_end(reader))
        try:
            await asyncio.wait((answering, watching), return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                return
            writer.write(json.dumps(answering.result()).encode() + b"\n")
            await writer.drain()
        finally:
            for task in (answering, watching):
                task.cancel()
            await asyncio.gather(answering, watching, return_exceptions=True)


async def _wait_for_end(reader: asyncio.StreamReader) -> None:
    while not reader.at_eof():
        await asyncio.sleep(0.1)


async def _answer_request(job: Job, line: bytes) -> dict[str, JsonValue]:
    try:
        request = parse_json(line.decode(), MAX_REQUEST_DEPTH)
        return await _use_sandbox(await job.workspace.start(job.endpoint), request)
    except EngineError as error:
        return {"error": str(error), "kind": ErrorKind.INFRA}
    except (M2ForgeError, ValueError) as error:
        return {"error": str(error)}


async def _use_sandbox(sandbox: Sandbox, request: JsonValue) -> dict[str, JsonValue]:
    match request:
        case {"run": argv, **more} if set(more) <= {"stdin", "env", "timeout_s"}:
            outcome = await sandbox.run(_read_command(argv, {str(name): value for name, value in more.items()}))
            if sandbox.is_lost:
                raise EngineError(LOST)
            texts = {"stdout": outcome.stdout.text(), "stderr": outcome.stderr.text()}
            return {"reason": outcome.reason, "status": outcome.status, **texts}
        case {"read": str(path), **more} if not more:
            return {"content": base64.b64encode(await sandbox.read(path, MAX_FILE_BYTES)).decode()}
        case {"write": str(path), "content": str(content), **more} if not more:
            await sandbox.write(path, base64.b64decode(content, validate=True))
            return {}
    raise DataError(f"sandbox: expected an object with run, read, or write and content, received {str(request)[:200]}")


def _read_command(argv: object, more: Mapping[str, object]) -> Command:
    env, timeout_s = more.get("env", {}), more.get("timeout_s")
    if not isinstance(argv, list) or not all(isinstance(word, str) for word in argv):
        raise DataError(f"sandbox: run: expected a program and its arguments, received {str(argv)[:200]}")
    if not isinstance(env, dict) or not all(isinstance(value, str) for value in env.values()):
        raise DataError(f"sandbox: env: expected names and texts, received {str(env)[:200]}")
    if timeout_s is not None and not isinstance(timeout_s, int | float):
        raise DataError(f"sandbox: timeout_s: expected seconds, received {str(timeout_s)[:200]}")
    words, variables = tuple(map(str, argv)), {name: str(value) for name, value in env.items()}
    return Command(words, variables, str(more.get("stdin", "")).encode(errors="replace"), timeout_s)
