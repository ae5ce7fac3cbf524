"""The process that runs families' code (`draw`, `tools`, `call`, `verify`) for `tasks/runner.py`, held to limits.

    python -m m2forge.tasks.worker TIMEOUT_S DRAW_TIMEOUT_S      requests and replies, one JSON object a line

It imports the families, and forks an executor, which serves requests. An executor that exceeds a limit is killed and
another is forked, which takes milliseconds however long the imports took; so what a hostile answer has done to the
memory of one is gone with it. The sandbox limits the address space of both.

A request has one of these outcomes. An executor that fails in a way that may not be the request's doing is
replaced, and the request runs once more in a fresh one:

    ok                value
    limit             over time; or over memory in a fresh executor, since an older one holds caches
    verifier_error    it raised twice, or its process crashed twice; with the traceback
    infra             the executor was killed from outside: the caller retries
    refused           an error of m2forge/errors.py in anything but `verify`: the text says what is wrong

Time over counts at once if the executor was busy; one that slept or was starved of a processor gets a second try.
"""

import json
import os
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict
from enum import StrEnum
from typing import NoReturn, cast

from m2forge.errors import M2ForgeError, RecordError
from m2forge.records import JsonValue, Task
from m2forge.tasks.catalog import find_family
from m2forge.tasks.family import Family, Preparing
from m2forge.tasks.task_set import Split, TaskSet
from m2forge.text.message import tool_to_openai

MAX_TRACE = 4000
"""Characters of a traceback, from its end."""
MAX_EVIDENCE = 64 << 10
"""Bytes of a verdict's evidence."""
BUSY_SHARE = 0.5
"""An executor that used so much of its time on a processor was at work."""
BEGUN = b'"begun"\n'
MEMORY = b'{"outcome": "memory"}\n'

Fields = Mapping[str, JsonValue]


class RequestOutcome(StrEnum):
    OK = "ok"
    LIMIT = "limit"
    VERIFIER_ERROR = "verifier_error"
    INFRA = "infra"
    REFUSED = "refused"
    MEMORY = "memory"
    """An executor ran out of memory; no request ends with it."""
    RAISED = "raised"
    """The family's code raised; no request ends with it."""


# -- the executor -----------------------------------------------------------------------------------------------------


def run(request: Fields) -> JsonValue:
    """What a request asks for."""
    family = find_family(str(request["family"]))
    if request["op"] == "next":
        return _next(family, request)
    task = Task.read(cast("Fields", request["task"]))
    match request["op"]:
        case "tools":
            return [tool_to_openai(tool) for tool in family.tools(task)]
        case "call":
            name = str(request["name"])
            content = family.call(task, name, request["arguments"])
            return {"content": str(content), "latency_s": float(family.latency_s(task, name))}
        case "verify":
            verdict = family.verify(task, str(request["answer"]))
            evidence = dict(verdict.evidence)
            size = len(json.dumps(evidence, allow_nan=False))
            if size > MAX_EVIDENCE:
                raise RecordError(f"{family.name}: evidence: {size} bytes, at most {MAX_EVIDENCE}")
            return {"perf": float(verdict.perf), "evidence": evidence}
    raise RecordError(f"tasks.worker: no operation {request['op']!r}")


def _next(family: Family, request: Fields) -> JsonValue:
    split, seed, position, lowest, highest = cast("tuple[Split, int, int, int, int]", request["stream"])
    return asdict(TaskSet(family, split, seed, position).next(lowest, highest))


def execute(requests: int, replies: int) -> NoReturn:
    """In a forked process: serve requests until they end."""
    try:
        with os.fdopen(requests, "rb") as lines:
            for line in lines:
                request = json.loads(line)
                if "task" in request:
                    family = find_family(str(request["family"]))
                    if isinstance(family, Preparing):
                        family.prepare(Task.read(request["task"]))
                os.write(replies, BEGUN)
                _write_all(replies, _reply(request))
    except MemoryError:
        os.write(replies, MEMORY)
    except BaseException as error:  # noqa: BLE001  (the executor must not go on as a second worker)
        _write_all(replies, _encode(RequestOutcome.RAISED, _trace(error)))
    finally:
        os._exit(1)


def _reply(request: Fields) -> bytes:
    try:
        return _encode(RequestOutcome.OK, run(request))
    except MemoryError:
        raise
    except M2ForgeError as error:
        return _encode(
            RequestOutcome.RAISED if request["op"] == "verify" else RequestOutcome.REFUSED, _trace(error), str(error)
        )
    except BaseException as error:  # noqa: BLE001  (a family's code may raise anything)
        return _encode(RequestOutcome.RAISED, _trace(error))


def _encode(outcome: RequestOutcome, value: JsonValue, text: str = "") -> bytes:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    told = {"outcome": outcome, "value": value, "text": text, "cpu_s": usage.ru_utime + usage.ru_stime}
    return json.dumps(told | {"memory_bytes": usage.ru_maxrss << 10}, allow_nan=False).encode() + b"\n"


def _trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))[-MAX_TRACE:]


# -- the worker -------------------------------------------------------------------------------------------------------


class Executor:
    """A forked process and its pipes."""

    def __init__(self, *inherited: int) -> None:
        """`inherited`: descriptors that it must not keep open."""
        requests, self._requests = os.pipe()
        self._replies, replies = os.pipe()
        self.is_fresh, self._cpu_s = True, 0.0
        self._received = b""
        self.pid = os.fork()
        if not self.pid:
            os.setpgid(0, 0)
            for descriptor in (self._requests, self._replies, *inherited):
                os.close(descriptor)
            execute(requests, replies)
        os.close(requests)
        os.close(replies)

    def serve(self, line: bytes, timeout_s: float, prepare_timeout_s: float) -> dict[str, JsonValue]:
        """One try. `prepare_timeout_s`: until it begins. After any outcome but `ok` and `refused` the executor is
        gone."""
        started_s, limit_s = time.monotonic(), prepare_timeout_s
        try:
            _write_all(self._requests, line)
        except BrokenPipeError:
            return self._ended(started_s, is_over=False)
        received = self._receive_line(started_s + limit_s)
        if received == BEGUN:
            started_s, limit_s = time.monotonic(), timeout_s
            received = self._receive_line(started_s + limit_s)
        if not received:
            return self._ended(started_s, is_over=time.monotonic() >= started_s + limit_s)
        reply: dict[str, JsonValue] = json.loads(received)
        if reply["outcome"] not in (RequestOutcome.OK, RequestOutcome.REFUSED):
            _, usage = self.kill()
            reply["memory_bytes"] = usage.ru_maxrss << 10
        elif isinstance(reply["cpu_s"], float):
            self._cpu_s = reply["cpu_s"]
        return reply

    def kill(self) -> tuple[int, resource.struct_rusage]:
        """It and what it has started. It is our child and not waited for yet, so its id is its own."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            os.kill(self.pid, signal.SIGKILL)
        _, status, usage = os.wait4(self.pid, 0)
        os.close(self._requests)
        os.close(self._replies)
        return status, usage

    def _ended(self, started_s: float, *, is_over: bool) -> dict[str, JsonValue]:
        """The outcome of a try that got no reply: time over, or the executor died."""
        if not is_over:
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        passed_s = time.monotonic() - started_s
        status, usage = self.kill()
        told: dict[str, JsonValue] = {"memory_bytes": usage.ru_maxrss << 10, "value": None, "text": ""}
        if is_over:
            busy_s = usage.ru_utime + usage.ru_stime - self._cpu_s
            text = f"no result after {passed_s:.1f} s"
            return told | {"outcome": RequestOutcome.LIMIT, "text": text, "was_busy": busy_s >= BUSY_SHARE * passed_s}
        code = os.waitstatus_to_exitcode(status)
        if code == -signal.SIGKILL:
            return told | {"outcome": RequestOutcome.INFRA, "text": "the executor was killed"}
        return told | {
            "outcome": RequestOutcome.RAISED,
            "value": f"the process of the family's code ended with status {code}",
        }

    def _receive_line(self, until_s: float) -> bytes:
        """With its end; empty if there is none by then, or the executor is gone."""
        while b"\n" not in self._received:
            ready, _, _ = select.select([self._replies], [], [], max(0.0, until_s - time.monotonic()))
            data = os.read(self._replies, 1 << 16) if ready else b""
            if not data:
                return b""
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        return line + b"\n"


class Worker:
    def __init__(self, requests: int, replies: int, timeout_s: float, draw_timeout_s: float) -> None:
        self._requests, self._replies = requests, replies
        self._timeout_s, self._draw_timeout_s = timeout_s, draw_timeout_s
        self._families: set[str] = set()
        self._executor: Executor | None = None

    def work(self) -> None:
        with os.fdopen(self._requests, "rb", closefd=False) as lines:
            for line in lines:
                request = json.loads(line)
                reply = self._serve(request, line)
                _write_all(self._replies, json.dumps(reply | {"n": request["n"]}).encode() + b"\n")

    def _serve(self, request: Fields, line: bytes) -> dict[str, JsonValue]:
        refused = self._prepare(str(request["family"]))
        if refused is not None:
            return {"outcome": RequestOutcome.REFUSED, "text": refused}
        if request["op"] == "prepare":
            return {"outcome": RequestOutcome.OK, "value": None}
        reply: dict[str, JsonValue] = {}
        left_s, is_over = self._draw_timeout_s if request["op"] == "next" else self._timeout_s, False
        for is_last in (False, True):
            executor = self._executor or Executor(self._requests, self._replies)
            was_fresh, executor.is_fresh = executor.is_fresh, False
            started_s = time.monotonic()
            reply = executor.serve(line, left_s, self._draw_timeout_s)
            self._executor = executor if reply["outcome"] in (RequestOutcome.OK, RequestOutcome.REFUSED) else None
            match reply["outcome"]:
                case RequestOutcome.LIMIT:
                    is_over = is_last or reply["was_busy"] is True
                case RequestOutcome.MEMORY:
                    is_over = is_last or was_fresh
                    reply = reply | {"outcome": RequestOutcome.LIMIT, "text": "out of memory"}
                case RequestOutcome.RAISED:
                    is_over = is_last
                    reply = reply | {"outcome": RequestOutcome.VERIFIER_ERROR}
                    # Both tries share the time of one.
                    left_s = max(0.1, left_s - (time.monotonic() - started_s))
                case _:
                    is_over = True
            if is_over:
                break
        return reply

    def _prepare(self, name: str) -> str | None:
        """Imports what the family needs, outside of the limits of a request. What is wrong with it, if anything is."""
        if name not in self._families:
            try:
                find_family(name)
            except M2ForgeError as error:
                return str(error)
            self._families.add(name)
            if self._executor is not None:
                self._executor.kill()
                self._executor = None
        return None


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def main() -> None:
    # What families print must not be taken for a reply.
    replies = os.dup(1)
    os.dup2(2, 1)
    Worker(0, replies, float(sys.argv[1]), float(sys.argv[2])).work()


if __name__ == "__main__":
    main()
