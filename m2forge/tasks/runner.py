"""Runs families' code in worker processes with time and memory limits: tasks and submissions in, verdicts out.

    async with TaskRunner(VerifyConfig(), folder, families=("chain",)) as runner:
        verdict = await runner.verify(task, Submission(answer))

A policy's output reaches a family's code only here, so a verifier that never ends or fills the memory does not stall
the caller. One rule holds for every verifier:

    over a limit                            perf 0, `limit`
    raised twice on the same submission     perf 0, `verifier_error`, with the traceback as evidence
    more than `max_error_share` of the      `BrokenVerifierError`, which ends the run: the rewards would be wrong
    last `NUM_WATCHED` verdicts are that
    a worker was lost, or starved of CPU    `infra`: retried with another, never a verdict
    a judge's endpoint does not respond     `VerifierUnavailableError`: infra, the attempt is retried

Workers stay alive and warm: they import the families' libraries once. They die with this process, whatever signal
kills it, because a sandbox's keeper supervises them.
"""

import asyncio
import functools
import itertools
import json
import logging
import os
import sys
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Self, cast

import m2forge
from m2forge.errors import ConfigError, DataError, EngineError, RecordError, RunError
from m2forge.protocols import Command, Sandbox
from m2forge.records import JsonValue, Submission, Task, Verdict, VerdictReason
from m2forge.sandbox.command_worker import ProcessWorker
from m2forge.sandbox.config import SandboxConfig
from m2forge.sandbox.process import ProcessSandbox
from m2forge.tasks.config import VerifyConfig
from m2forge.tasks.family import TimeLimitError, family_key_of, family_name, shown
from m2forge.tasks.folders.folder_family import FOLDER_KEY
from m2forge.tasks.folders.folder_host import FolderHost
from m2forge.tasks.llm_judge import KEY_VARIABLE, SETTINGS_VARIABLE
from m2forge.tasks.source import located
from m2forge.tasks.task_file import read_verifier, run_inside
from m2forge.tasks.task_set import Distinct, FamilyInfo, Split
from m2forge.tasks.time_limit import MAX_WAIT
from m2forge.tasks.worker import MAX_REPLY_BYTES, RequestOutcome
from m2forge.text.message import Message, Tool, message_from_openai, tool_from_openai

NUM_WATCHED = 200
MAX_LOST = 10
"""Number of workers lost at one request after which it fails with an error."""
START_S = 120.0
"""How long a worker may take to import its families."""
TIMEOUT_MARGIN_S = 2.0
"""How much later than a verifier's own limit its worker is killed."""
LIFE_S = 30 * 86400.0
RETRY_S = 0.05

_COMMAND = (sys.executable, "-m", "m2forge.tasks.worker")
_log = logging.getLogger(__name__)


class BrokenVerifierError(RunError):
    """A verifier raises too often for its verdicts to serve as rewards."""


class VerifierUnavailableError(EngineError):
    """A service that the verifier needs does not respond; the attempt is retried."""


class LimitError(EngineError):
    """A family's code other than its verifier exceeded a limit or raised."""


@dataclass(frozen=True, slots=True)
class ToolAnswer:
    content: str
    latency_s: float
    """Latency to simulate, in addition to the time that the call took."""


class TaskRunner:
    def __init__(
        self,
        config: VerifyConfig,
        folder: Path,
        families: Sequence[str] = (),
        command: Sequence[str] = _COMMAND,
        wrong_on_raise: Collection[str] = (),
        reward: str | None = None,
    ) -> None:
        """`folder`: parent of the workers' directories. `families`: keys of families that are imported before the first
        request. `command`: the worker's command. `wrong_on_raise`: keys of reasoning-gym families whose answers count
        as wrong if the scorer raises. `reward`: the function that computes `Verdict.reward`, FILE.py:NAME."""
        self._wrong_on_raise = frozenset(wrong_on_raise)
        self._reward = None if reward is None else located(reward)
        # Workers run in folders of their own, and a run may change this one.
        self._locate = functools.cache(functools.partial(located, folder=Path.cwd()))
        self._config, self._families = config, tuple(dict.fromkeys(families))
        limits = (str(config.timeout_s), str(config.draw_timeout_s))
        seats = [_Seat(folder / f"worker-{index}", config, (*command, *limits)) for index in range(config.num_workers)]
        self._seats = seats
        self._idle: asyncio.Queue[_Seat] = asyncio.Queue()
        self._warming: list[asyncio.Task[None]] = []
        self._errors: deque[bool] = deque(maxlen=NUM_WATCHED)
        self._folders = FolderHost(config.base_image)
        self.max_memory_bytes = 0
        """Peak memory of any process so far."""

    async def __aenter__(self) -> Self:
        self._warming = [asyncio.create_task(self._warm(seat)) for seat in self._seats]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._warming:
            task.cancel()
        await asyncio.gather(*self._warming, return_exceptions=True)
        await asyncio.gather(*(seat.close() for seat in self._seats))

    async def sandbox(self, task: Task, config: SandboxConfig) -> tuple[SandboxConfig, Mapping[str, str]]:
        """The sandbox of an attempt at the task, and variables of its commands; `config`: the run's. A task folder has
        an image, a user, a workspace and a network of its own."""
        if FOLDER_KEY not in task.metadata:
            return config, {}
        environment = await self._folders.environment(task, config)
        return environment.config, environment.env

    async def verify(self, task: Task, submission: Submission, sandbox: Sandbox | None = None) -> Verdict:
        """`sandbox`: that of the attempt, in which nothing runs any more; a verifier that is a command runs there, and
        the tests of a task folder verify what it holds."""
        request: dict[str, JsonValue] = {"op": "verify", "task": asdict(task), "submission": asdict(submission)}
        request["is_wrong_on_raise"] = family_key_of(task) in self._wrong_on_raise
        request["reward"] = self._reward
        verifier = task.metadata.get("verifier")
        reply: dict[str, JsonValue] | None = None
        if FOLDER_KEY in task.metadata:
            reply = {"outcome": RequestOutcome.OK, "value": asdict(await self._folders.verify(task, sandbox))}
        elif sandbox is not None and isinstance(verifier, Mapping) and "command" in verifier:
            reply = await _run_inside(task, sandbox)
        if reply is not None:
            if reply["outcome"] == RequestOutcome.OK and self._reward is not None:
                reply = await self._ask(request | {"op": "reward", "verdict": reply["value"]}, family_key_of(task))
            return self._verdict(task, submission, reply)
        if isinstance(verifier, Mapping) and isinstance(limit_s := verifier.get("timeout_s"), int | float):
            # The verifier ends a command or a request by itself at its limit.
            request["timeout_s"] = float(limit_s) + TIMEOUT_MARGIN_S
        return self._verdict(task, submission, await self._ask(request, family_key_of(task)))

    def _verdict(self, task: Task, submission: Submission, reply: Mapping[str, JsonValue]) -> Verdict:
        verifier, outcome = task.metadata.get("verifier"), RequestOutcome(str(reply["outcome"]))
        if outcome is RequestOutcome.REFUSED:
            raise DataError(str(reply["text"]))
        is_judge = isinstance(verifier, Mapping) and "judge" in verifier
        if outcome is RequestOutcome.UNAVAILABLE or (is_judge and outcome is RequestOutcome.LIMIT):
            # A judge's time depends on its endpoint, not on the policy.
            raise VerifierUnavailableError(f"task {task.id}: {reply['text']}")
        self._errors.append(outcome is RequestOutcome.VERIFIER_ERROR)
        if outcome is RequestOutcome.OK:
            return Verdict.read(cast("Mapping[str, JsonValue]", reply["value"]))
        evidence: dict[str, JsonValue] = {"reason": str(outcome), "received": shown(submission.answer)}
        if outcome is RequestOutcome.LIMIT:
            return Verdict(0.0, evidence | {"error": reply["text"]}, VerdictReason.LIMIT)
        trace = str(reply.get("value") or reply["text"])
        num_errors, most = sum(self._errors), self._config.max_error_share * NUM_WATCHED
        if num_errors > most:
            raise BrokenVerifierError(
                f"{family_name(task)}: its verifier raised at {num_errors} of the last {len(self._errors)} answers, "
                f"more than {self._config.max_error_share:.0%} of {NUM_WATCHED}; repair it, then start the run again. "
                f"The last one, at task {task.id}:\n{trace}"
            )
        return Verdict(0.0, evidence | {"traceback": trace}, VerdictReason.VERIFIER_ERROR)

    async def tools(self, task: Task) -> tuple[Tool, ...]:
        value = await self._value({"op": "tools", "task": asdict(task)}, family_key_of(task))
        return tuple(tool_from_openai(tool) for tool in cast("list[Mapping[str, JsonValue]]", value))

    async def call(self, task: Task, name: str, arguments: JsonValue) -> ToolAnswer:
        """Call a tool; the response is an error line if it exceeds a limit or the family's code raises."""
        request: dict[str, JsonValue] = {"op": "call", "task": asdict(task), "name": name, "arguments": arguments}
        reply = await self._ask(request, family_key_of(task))
        match reply["outcome"]:
            case RequestOutcome.OK:
                value = cast("Mapping[str, JsonValue]", reply["value"])
                return ToolAnswer(str(value["content"]), cast("float", value["latency_s"]))
            case RequestOutcome.LIMIT:
                return ToolAnswer(f"error: {shown(name)} exceeded its limits of time or memory", 0.0)
        _log.warning("%s: %s failed: %s", task.id, shown(name), reply.get("value") or reply["text"])
        return ToolAnswer(f"error: {shown(name)} failed", 0.0)

    async def describe(self, family: str) -> FamilyInfo:
        """What the family with that key offers; raises if it cannot be opened."""
        return FamilyInfo.read(
            cast("Mapping[str, JsonValue]", await self._value({"op": "describe", "reward": self._reward}, family))
        )

    async def demonstrate(self, task: Task, seed: str) -> list[Message]:
        """A conversation that solves the task; raises `DataError` if the family has none."""
        request: dict[str, JsonValue] = {"op": "demonstrate", "task": asdict(task), "seed": seed}
        value = await self._value(request, family_key_of(task))
        return [message_from_openai(message) for message in cast("list[Mapping[str, JsonValue]]", value)]

    async def portable(self, task: Task) -> Mapping[str, JsonValue]:
        """What a task folder needs of the task (`family.portable`); raises `DataError` if the family cannot be
        exported."""
        value = await self._value({"op": "portable", "task": asdict(task)}, family_key_of(task))
        return cast("Mapping[str, JsonValue]", value)

    async def next_task(
        self, family: str, split: Split, seed: int, position: int, lowest: int, highest: int, id: str = ""
    ) -> Task:
        """`TaskSet.next` of the stream at that position; each position yields one task. `family`: its key. `id`: take
        this task of a fixed list instead."""
        stream: JsonValue = [split, seed, position, lowest, highest]
        value = await self._value({"op": "next", "stream": stream, "key": family, "id": id}, family)
        return Task.read(cast("Mapping[str, JsonValue]", value))

    async def distinct(self, family: str, split: Split, seed: int, num: int, lowest: int, highest: int) -> list[Task]:
        """The first `num` distinct tasks of a stream."""
        distinct = Distinct(family, split, num, lowest, highest)
        for position in itertools.count():
            if not distinct.is_wanting:
                break
            distinct.add(await self.next_task(family, split, seed, position, lowest, highest))
        return distinct.tasks

    async def _value(self, request: dict[str, JsonValue], family: str) -> JsonValue:
        reply = await self._ask(request, family)
        match reply["outcome"]:
            case RequestOutcome.OK:
                return reply["value"]
            case RequestOutcome.REFUSED:
                raise DataError(str(reply["text"]))
            case RequestOutcome.LIMIT:
                raise LimitError(
                    f"{family}: {request['op']}: {reply['text']}; make the family's code cheaper, or "
                    "raise the limits under `verify` in the configuration, then start the run again"
                )
        raise LimitError(
            f"{family}: {request['op']}: its code raised; repair the family, then start the run again. The traceback:\n"
            f"{reply['value']}"
        )

    async def _ask(self, request: dict[str, JsonValue], family: str) -> dict[str, JsonValue]:
        problem = ""
        for _ in range(MAX_LOST):
            seat = await self._idle.get()
            try:
                reply = await seat.ask(request | {"family": self._locate(family)})
            except _LostError as error:
                problem = str(error)
            else:
                memory = reply.get("memory_bytes")
                self.max_memory_bytes = max(self.max_memory_bytes, memory if isinstance(memory, int) else 0)
                if reply["outcome"] != RequestOutcome.INFRA:
                    return reply
                problem = str(reply["text"])
            finally:
                self._idle.put_nowait(seat)
            _log.warning("a task worker was lost; retrying: %s", problem)
            await asyncio.sleep(RETRY_S)
        raise EngineError(
            f"{family}: {MAX_LOST} task workers were lost at one request ({request['op']}); if the machine is "
            "short of memory or processes, lower `verify.num_workers` or raise `verify.max_memory_bytes`, then start "
            f"the run again. The last one: {problem}"
        )

    async def _warm(self, seat: "_Seat") -> None:
        try:
            for family in self._families:
                request: dict[str, JsonValue] = {"op": "prepare", "reward": self._reward}
                await seat.ask(request | {"family": self._locate(family)})
        except _LostError as error:
            _log.warning("a task worker could not start: %s", error)
        finally:
            self._idle.put_nowait(seat)


async def _run_inside(task: Task, sandbox: Sandbox) -> dict[str, JsonValue]:
    """A worker's reply for a verifier that is a command, run in the attempt's sandbox."""
    spec = read_verifier(task.metadata.get("verifier"), f"Task {task.id}")
    try:
        verdict = await run_inside(spec, task, sandbox)
    except TimeLimitError as error:
        return {"outcome": RequestOutcome.LIMIT, "text": str(error)}
    except RecordError as error:
        return {"outcome": RequestOutcome.VERIFIER_ERROR, "text": str(error)}
    return {"outcome": RequestOutcome.OK, "value": asdict(verdict)}


def _settings(config: VerifyConfig) -> dict[str, str]:
    """The environment variables by which a worker knows the table `verify` and the judge's key."""
    settings = {SETTINGS_VARIABLE: config.model_dump_json()}
    if config.judge is not None and config.judge.key_env is not None:
        if config.judge.key_env not in os.environ:
            raise ConfigError(f"verify.judge.key_env: the environment variable {config.judge.key_env} is not set")
        settings[KEY_VARIABLE] = os.environ[config.judge.key_env]
    return settings


class _LostError(Exception):
    """A worker ended or did not reply."""


class _Seat:
    """A slot for one worker process, which is replaced when it is lost."""

    def __init__(self, folder: Path, config: VerifyConfig, argv: Sequence[str]) -> None:
        limits = SandboxConfig(
            backend="process",
            timeout_s=LIFE_S,
            max_memory_bytes=config.max_memory_bytes,
            max_output_bytes=2 * MAX_REPLY_BYTES,
        )
        self._sandbox = ProcessSandbox(folder, limits)
        # The worker must find the package from its own folder. Threads of numeric libraries would reserve memory.
        roots = [str(Path(m2forge.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
        path = os.pathsep.join(root for root in roots if root)
        env = {"PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        self._command = Command(tuple(argv), env | _settings(config))
        # Two tries, each starved for the maximum time.
        self._patience_s = START_S + 2 * MAX_WAIT * (config.draw_timeout_s + config.timeout_s)
        self._worker: ProcessWorker | None = None
        self._numbers = itertools.count()

    async def ask(self, request: dict[str, JsonValue]) -> dict[str, JsonValue]:
        number = next(self._numbers)
        if self._worker is None:
            self._worker = await self._sandbox.start(self._command)
        worker = self._worker
        try:
            await worker.send(json.dumps(request | {"n": number}).encode() + b"\n")
            asked_s = request.get("timeout_s")
            patience_s = self._patience_s + (2 * MAX_WAIT * asked_s if isinstance(asked_s, float) else 0.0)
            while line := await worker.receive_line(patience_s):
                reply: dict[str, JsonValue] = json.loads(line)
                # A reply with another number belongs to a cancelled request.
                if reply["n"] == number:
                    return reply
        except (TimeoutError, DataError, ValueError) as error:
            problem = f"{type(error).__name__}: {error}"
        else:
            problem = "it ended"
        self._worker = None
        outcome = await worker.stop()
        raise _LostError(f"{problem}, status {outcome.status}: {outcome.stderr.text()[-1000:].strip() or 'no output'}")

    async def close(self) -> None:
        await self._sandbox.close()
