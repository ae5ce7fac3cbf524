"""Agent programs that live across attempts: jobs in, answers out.

A worker is any program that reads jobs, one JSON object a line, and writes answers:

    {"id": "…", "base_url": "http://…/v1", "api_key": "…", "model": "policy", "task": {…}}      to its standard input
    {"id": "…", "answer": "…"}   or   {"id": "…", "error": "…"}                             from its standard output

It may work on several jobs at once and answer them in any order. A worker that dies is started again; the jobs that it
had are told so. A program that does nothing but die is given up, and with it the run. What it prints besides is its own
affair: lines that are no answers are passed over.
"""

import asyncio
import json
import logging
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from m2forge.errors import DataError, EngineError
from m2forge.forge.config import AgentConfig
from m2forge.protocols import Command, Endpoint, Outcome, Worker
from m2forge.records import JsonValue, Task
from m2forge.sandbox.process import ProcessSandbox

RESTART_S = 0.5
MAX_DEATHS = 10
"""For each worker there is: so many deaths without an answer between, and the program is broken."""

_log = logging.getLogger(__name__)


class JobError(EngineError):
    """An attempt that broke off: its worker died, or said that it cannot go on."""


class WorkerDiedError(JobError):
    """An attempt whose worker died; it may not have been this attempt that killed it."""


@dataclass(eq=False, slots=True)
class _Desk:
    """One worker's place: the process of the moment, and the jobs it has."""

    name: str
    jobs: dict[str, asyncio.Future[str]] = field(default_factory=dict)
    worker: Worker | None = None


class Workers:
    def __init__(self, config: AgentConfig, folder: Path) -> None:
        """`folder`: where they work, each in a folder of its own."""
        self._config, self._command = config, Command(from_here(config.command))
        self._desks = [_Desk(f"worker-{index}") for index in range(config.num_workers)]
        self._sandboxes = [ProcessSandbox(folder / desk.name, config.sandbox) for desk in self._desks]
        self._tasks: list[asyncio.Task[None]] = []
        self._is_up = asyncio.Event()
        self._num_deaths = 0
        """Since the last answer."""
        self._last_words = ""
        """Of the program, when it died; those of a row of deaths are told once."""
        self._broken: JobError | None = None

    async def __aenter__(self) -> "Workers":
        self._tasks = [
            asyncio.create_task(self._keep(desk, sandbox))
            for desk, sandbox in zip(self._desks, self._sandboxes, strict=True)
        ]
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for sandbox in self._sandboxes:
            await sandbox.close()

    async def watch(self) -> None:
        """Raises when the program is found to be broken; until then it does not end."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()

    async def attempt(self, id: str, task: Task, endpoint: Endpoint) -> str:
        """The answer to a task; raises `JobError`, or `TimeoutError` after the attempt's time, which begins when a
        worker is there."""
        desk = await self._free_desk()
        async with asyncio.timeout(self._config.timeout_s):
            assert desk.worker is not None
            future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            desk.jobs[id] = future
            try:
                await desk.worker.send(_job(id, task, endpoint))
                return await future
            finally:
                desk.jobs.pop(id, None)

    async def _free_desk(self) -> _Desk:
        """The worker with fewest jobs; there is one that is not full, because no more attempts are made at once."""
        while True:
            if self._broken is not None:
                raise self._broken
            up = [desk for desk in self._desks if desk.worker is not None]
            if up:
                return min(up, key=lambda desk: len(desk.jobs))
            self._is_up.clear()
            await self._is_up.wait()

    async def _keep(self, desk: _Desk, sandbox: ProcessSandbox) -> None:
        while self._broken is None:
            worker = await sandbox.start(self._command)
            desk.worker = worker
            self._is_up.set()
            try:
                while line := await worker.receive_line():
                    self._take(desk, line)
            except DataError as error:
                _log.warning("%s: %s", desk.name, error)
            finally:
                desk.worker = None
                outcome = await worker.stop()
                self._fail_jobs(desk, f"{desk.name} ended with status {outcome.status}")
            self._note_death(desk, outcome)
            await asyncio.sleep(RESTART_S)

    def _note_death(self, desk: _Desk, outcome: Outcome) -> None:
        self._num_deaths += 1
        last_words = outcome.stderr.text()[-1000:].strip() or "it said nothing"
        if self._num_deaths == 1 or last_words != self._last_words:
            self._last_words = last_words
            _log.warning("%s ended with status %d: %s", desk.name, outcome.status, last_words)
        if self._num_deaths >= MAX_DEATHS * len(self._desks) and self._broken is None:
            self._broken = JobError(
                f"the agent's program ended {self._num_deaths} times without an answer, at last with status "
                f"{outcome.status}: {last_words.splitlines()[-1]}; see that `{shlex.join(self._command.argv)}` starts "
                f"in an empty folder with no environment variables but those of agent.sandbox.inherits"
            )
            self._is_up.set()
            raise self._broken

    def _take(self, desk: _Desk, line: bytes) -> None:
        try:
            told = json.loads(line)
        except ValueError:
            return
        future = desk.jobs.get(str(told.get("id"))) if isinstance(told, dict) else None
        if future is None or future.done():
            return
        self._num_deaths = 0
        if isinstance(told.get("answer"), str):
            future.set_result(told["answer"])
        else:
            future.set_exception(JobError(f"the agent could not go on: {told.get('error')!r}"))

    def _fail_jobs(self, desk: _Desk, reason: str) -> None:
        for future in desk.jobs.values():
            if not future.done():
                future.set_exception(WorkerDiedError(reason))
        desk.jobs = {}


def _job(id: str, task: Task, endpoint: Endpoint) -> bytes:
    job: Mapping[str, JsonValue] = {
        "id": id,
        "base_url": f"{endpoint.url.rstrip('/')}/v1",
        "api_key": endpoint.key,
        "model": endpoint.model,
        "task": asdict(task),
    }
    return json.dumps(job).encode() + b"\n"


def from_here(command: Sequence[str]) -> tuple[str, ...]:
    """A worker has a folder of its own: paths that name a file from this one are made whole."""
    return tuple(str(Path(word).absolute()) if "/" in word and Path(word).is_file() else word for word in command)
