"""The worker process that runs families' code (`draw`, `tools`, `call`, `verify`) for `tasks/runner.py` under limits.

    python -m m2forge.tasks.worker TIMEOUT_S DRAW_TIMEOUT_S      requests and replies, one JSON object a line

It imports the families and forks an executor, which serves requests. An executor that exceeds a limit is killed and
another is forked, which takes milliseconds however long the imports took; so any damage that a hostile answer did to
its memory ends with it. The sandbox limits the address space of both.

A request has one of these outcomes. An executor that fails in a way that the request may not have caused is replaced,
and the request runs once more in a fresh one:

    ok                value
    limit             over time; over the size of a reply; or over memory in a fresh executor, since an older one
                      holds caches
    verifier_error    it raised twice, or its process crashed twice; with the traceback
    infra             the executor was killed from outside, or starved of CPU: the caller retries
    unavailable       a service that the verifier needs does not respond: there is no verdict, the attempt is retried
    refused           an error of m2forge/errors.py in anything but `verify`, or a task whose data cannot be loaded: the
                      text says what is wrong

The time limit covers the executor's own use (`tasks/time_limit.py`): CPU time and sleep. Time that it waits for a CPU
on a loaded machine does not count, up to `MAX_WAIT` times the limit; then the outcome is `infra`. An executor that
mostly slept gets a second try.
"""

import json
import os
import random
import resource
import select
import signal
import sys
import traceback
from collections.abc import Mapping
from dataclasses import asdict, replace
from enum import StrEnum
from typing import NoReturn, cast

from m2forge.errors import M2ForgeError, RecordError
from m2forge.records import JsonValue, Submission, Task, Verdict
from m2forge.tasks.catalog import find_family
from m2forge.tasks.family import Family, Preparing, TimeLimitError, UnavailableError, as_verdict, portable
from m2forge.tasks.library_family import GymFamily
from m2forge.tasks.task_set import Split, TaskSet, describe
from m2forge.tasks.time_limit import MAX_WAIT, Use
from m2forge.tasks.user_code import call_reward, find_reward
from m2forge.text.message import message_to_openai, tool_to_openai

MAX_TRACE = 4000
"""Characters reported from the end of a traceback."""
MAX_EVIDENCE = 64 << 10
"""Maximum bytes of a verdict's evidence."""
MAX_REPLY_BYTES = 8 << 20
"""Maximum bytes of one reply; a longer one exceeds the limit."""
BUSY_SHARE = 0.5
"""An executor counts as busy, not asleep, if CPU time was at least this share of its own use."""
BEGUN = b'"begun"\n'
MEMORY = b'{"outcome": "memory"}\n'

Fields = Mapping[str, JsonValue]


class RequestOutcome(StrEnum):
    OK = "ok"
    LIMIT = "limit"
    VERIFIER_ERROR = "verifier_error"
    INFRA = "infra"
    REFUSED = "refused"
    UNAVAILABLE = "unavailable"
    MEMORY = "memory"
    """An executor ran out of memory; internal, never the final outcome of a request."""
    RAISED = "raised"
    """The family's code raised; internal, never the final outcome of a request."""


ALIVE = (RequestOutcome.OK, RequestOutcome.REFUSED, RequestOutcome.UNAVAILABLE)
"""Outcomes after which the executor serves the next request."""
WRITTEN = (*ALIVE, RequestOutcome.LIMIT, RequestOutcome.MEMORY, RequestOutcome.RAISED)
"""Outcomes that an executor writes itself."""


# -- the executor -----------------------------------------------------------------------------------------------------


def run(request: Fields) -> JsonValue:
    """Execute a request and return its value."""
    family = find_family(str(request["family"]))
    match request["op"]:
        case "describe":
            return asdict(describe(family))
        case "next":
            return _next(family, request)
    task = Task.read(cast("Fields", request["task"]))
    match request["op"]:
        case "tools":
            return [tool_to_openai(tool) for tool in family.tools(task)]
        case "call":
            name = str(request["name"])
            content = family.call(task, name, request["arguments"])
            return {"content": str(content), "latency_s": float(family.latency_s(task, name))}
        case "portable":
            return portable(family, task)
        case "demonstrate":
            rng = random.Random(str(request["seed"]))
            return [message_to_openai(message) for message in family.demonstrate(task, rng)]
        case "verify":
            if isinstance(family, GymFamily) and request["is_wrong_on_raise"]:
                family = replace(family, on_raise="wrong")
            submission = Submission.read(cast("Fields", request["submission"]))
            return _verify(family, task, submission, str(request.get("reward") or ""))
        case "reward":
            submission = Submission.read(cast("Fields", request["submission"]))
            verdict = Verdict.read(cast("Fields", request["verdict"]))
            return _fields(family, _rewarded(verdict, task, submission, str(request["reward"])))
    raise RecordError(f"tasks.worker: no operation {request['op']!r}")


def _verify(family: Family, task: Task, submission: Submission, reward: str) -> JsonValue:
    verdict = as_verdict(family.verify(task, submission), f"{family.name}: verify")
    return _fields(family, _rewarded(verdict, task, submission, reward) if reward else verdict)


def _rewarded(verdict: Verdict, task: Task, submission: Submission, reward: str) -> Verdict:
    return replace(verdict, reward=call_reward(reward, task, submission, verdict))


def _fields(family: Family, verdict: Verdict) -> JsonValue:
    fields = asdict(verdict) | {"perf": float(verdict.perf)}
    size = len(json.dumps([fields["evidence"], fields["criteria"]], allow_nan=False))
    if size > MAX_EVIDENCE:
        raise RecordError(f"{family.name}: evidence: {size} bytes, at most {MAX_EVIDENCE}")
    return fields


def _next(family: Family, request: Fields) -> JsonValue:
    split, seed, position, lowest, highest = cast("tuple[Split, int, int, int, int]", request["stream"])
    tasks = TaskSet(family, split, seed, position, str(request["key"]))
    return asdict(tasks.named(str(request["id"])) if request["id"] else tasks.next(lowest, highest))


def execute(requests: int, replies: int) -> NoReturn:
    """Serve requests in the forked process until the pipe closes."""
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
    except TimeLimitError as error:
        return _encode(RequestOutcome.LIMIT, text=str(error))
    except UnavailableError as error:
        return _encode(RequestOutcome.UNAVAILABLE, text=str(error))
    except M2ForgeError as error:
        return _encode(
            RequestOutcome.RAISED if request["op"] in ("verify", "reward") else RequestOutcome.REFUSED,
            _trace(error),
            str(error),
        )
    except BaseException as error:  # noqa: BLE001  (a family's code may raise anything)
        return _encode(RequestOutcome.RAISED, _trace(error))


def _encode(outcome: RequestOutcome, value: JsonValue = None, text: str = "") -> bytes:
    memory_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    reply = {"outcome": outcome, "value": value, "text": text, "memory_bytes": memory_bytes}
    return json.dumps(reply, allow_nan=False).encode() + b"\n"


def _trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))[-MAX_TRACE:]


# -- the worker -------------------------------------------------------------------------------------------------------


class Executor:
    """A forked process and its pipes."""

    def __init__(self, *inherited: int) -> None:
        """`inherited`: file descriptors that the forked process must close."""
        requests, self._requests = os.pipe()
        self._replies, replies = os.pipe()
        self.is_fresh = True
        self._received = bytearray()
        self.pid = os.fork()
        if not self.pid:
            os.setpgid(0, 0)
            for descriptor in (self._requests, self._replies, *inherited):
                os.close(descriptor)
            execute(requests, replies)
        os.close(requests)
        os.close(replies)

    def serve(self, line: bytes, timeout_s: float, prepare_timeout_s: float) -> dict[str, JsonValue]:
        """Try a request once; `used_s` and `has_begun` of the reply say how much of its time it used and whether it
        reached the family's code. `prepare_timeout_s`: time limit until it begins. After any outcome but
        those of `ALIVE` the executor is dead."""
        use = Use(self.pid, prepare_timeout_s)
        has_begun = False
        try:
            _write_all(self._requests, line)
            received = self._receive_line(use)
            if received == BEGUN:
                has_begun, use = True, Use(self.pid, timeout_s)
                received = self._receive_line(use)
        except BrokenPipeError:
            received = b""
        reply = _read_reply(received) if received else self._ended(use)
        if received and reply["outcome"] not in ALIVE:
            _, usage = self.kill()
            reply["memory_bytes"] = usage.ru_maxrss << 10
        return reply | {"used_s": use.used_s, "has_begun": has_begun}

    def kill(self) -> tuple[int, resource.struct_rusage]:
        """Kill the executor and its process group. It is our child and not yet reaped, so its pid cannot be reused."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            os.kill(self.pid, signal.SIGKILL)
        _, status, usage = os.wait4(self.pid, 0)
        os.close(self._requests)
        os.close(self._replies)
        return status, usage

    def _ended(self, use: Use) -> dict[str, JsonValue]:
        """The outcome of a try without a complete reply: over a limit, starved, or the executor died."""
        is_over, is_starved, is_flood = use.is_over, use.is_starved, len(self._received) > MAX_REPLY_BYTES
        if not (is_over or is_starved or is_flood):
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        status, usage = self.kill()
        reply: dict[str, JsonValue] = {"memory_bytes": usage.ru_maxrss << 10, "value": None, "text": ""}
        if is_flood:
            text = f"a reply of over {MAX_REPLY_BYTES} bytes"
            return reply | {"outcome": RequestOutcome.LIMIT, "text": text, "was_busy": True}
        if is_over:
            text = f"no result after {use.used_s:.1f} s"
            was_busy = use.cpu_s >= BUSY_SHARE * use.used_s
            return reply | {"outcome": RequestOutcome.LIMIT, "text": text, "was_busy": was_busy}
        if is_starved:
            text = f"starved: {use.used_s:.1f} s used in {use.passed_s:.1f} s, {MAX_WAIT} times its limit"
            return reply | {"outcome": RequestOutcome.INFRA, "text": text}
        code = os.waitstatus_to_exitcode(status)
        if code == -signal.SIGKILL:
            return reply | {"outcome": RequestOutcome.INFRA, "text": "the executor was killed"}
        return reply | {
            "outcome": RequestOutcome.RAISED,
            "value": f"the process of the family's code ended with status {code}",
        }

    def _receive_line(self, use: Use) -> bytes:
        """Receive a line including its newline; empty if the executor is over a limit, starved or dead."""
        num_searched = 0
        while (end := self._received.find(b"\n", num_searched)) < 0:
            num_searched = len(self._received)
            if num_searched > MAX_REPLY_BYTES:
                return b""
            ready, _, _ = select.select([self._replies], [], [], use.period_s)
            if ready:
                data = os.read(self._replies, 1 << 16)
                if not data:
                    return b""
                self._received += data
                if b"\n" in data:
                    continue  # It was sent in time, even if this process reads it late on a loaded machine.
            use.note()
            if use.is_over or use.is_starved:
                return b""
        line = bytes(self._received[: end + 1])
        del self._received[: end + 1]
        return line


def _read_reply(line: bytes) -> dict[str, JsonValue]:
    """Parse a reply. A line that `execute` did not write came from the family's code and counts as raising."""
    try:
        reply = json.loads(line)
    except (ValueError, RecursionError):
        reply = None
    if not isinstance(reply, dict) or reply.get("outcome") not in WRITTEN:
        shown = line[:100].decode(errors="replace")
        reply = {"outcome": RequestOutcome.RAISED, "value": f"the family's code wrote {shown!r} for a reply"}
    return {"value": None, "text": ""} | reply


class Worker:
    def __init__(self, requests: int, replies: int, timeout_s: float, draw_timeout_s: float) -> None:
        self._requests, self._replies = requests, replies
        self._timeout_s, self._draw_timeout_s = timeout_s, draw_timeout_s
        self._loaded: set[tuple[str, str]] = set()
        self._executor: Executor | None = None

    def work(self) -> None:
        with os.fdopen(self._requests, "rb", closefd=False) as lines:
            for line in lines:
                request = json.loads(line)
                reply = self._serve(request, line)
                _write_all(self._replies, json.dumps(reply | {"n": request["n"]}).encode() + b"\n")

    def _serve(self, request: Fields, line: bytes) -> dict[str, JsonValue]:
        refused = self._prepare(str(request["family"]), str(request.get("reward") or ""))
        if refused is not None:
            return {"outcome": RequestOutcome.REFUSED, "text": refused}
        if request["op"] == "prepare":
            return {"outcome": RequestOutcome.OK, "value": None}
        timeout_s = (
            self._draw_timeout_s
            if request["op"] in ("next", "describe", "demonstrate", "portable")
            else self._timeout_s
        )
        if isinstance(asked_s := request.get("timeout_s"), float):
            timeout_s = asked_s
        reply = self._try(line, timeout_s)
        if not reply["has_begun"] and reply["outcome"] in (RequestOutcome.LIMIT, RequestOutcome.VERIFIER_ERROR):
            # The policy's answer was not involved, so this must not become a verdict.
            text = f"{request['family']}: the data of the task cannot be loaded: {reply.get('value') or reply['text']}"
            return reply | {"outcome": RequestOutcome.REFUSED, "text": text}
        return reply

    def _try(self, line: bytes, left_s: float) -> dict[str, JsonValue]:
        """The reply of the first try, or of the second if the first was inconclusive."""
        reply: dict[str, JsonValue] = {}
        for is_last in (False, True):
            executor = self._executor or Executor(self._requests, self._replies)
            was_fresh, executor.is_fresh = executor.is_fresh, False
            reply = executor.serve(line, left_s, self._draw_timeout_s)
            self._executor = executor if reply["outcome"] in ALIVE else None
            match reply["outcome"]:
                case RequestOutcome.LIMIT:
                    # An executor that reports a limit itself has measured it.
                    is_over = is_last or reply.get("was_busy", True) is True
                case RequestOutcome.MEMORY:
                    is_over = is_last or was_fresh
                    reply = reply | {"outcome": RequestOutcome.LIMIT, "text": "out of memory"}
                case RequestOutcome.RAISED:
                    is_over = is_last
                    reply = reply | {"outcome": RequestOutcome.VERIFIER_ERROR}
                    # Both tries share one time limit.
                    used_s = reply["used_s"]
                    left_s = max(0.1, left_s - (used_s if isinstance(used_s, float) else 0.0))
                case _:
                    is_over = True
            if is_over:
                break
        return reply

    def _prepare(self, family: str, reward: str) -> str | None:
        """Import what the family and the reward function need, outside the limits of a request; returns the error, or
        None."""
        if (family, reward) not in self._loaded:
            try:
                find_family(family)
                if reward:
                    find_reward(reward)
            except M2ForgeError as error:
                return str(error)
            self._loaded.add((family, reward))
            if self._executor is not None:
                self._executor.kill()
                self._executor = None
        return None


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def main() -> None:
    # Output that families print must not be mistaken for a reply.
    replies = os.dup(1)
    os.dup2(2, 1)
    Worker(0, replies, float(sys.argv[1]), float(sys.argv[2])).work()


if __name__ == "__main__":
    main()
