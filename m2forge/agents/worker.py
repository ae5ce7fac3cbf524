"""An SDK for agents of the kind `worker`: an async function that attempts a task in, a program that serves jobs out.

    import openai
    from m2forge.agents.worker import Job, serve

    async def attempt(job: Job) -> str:
        client = openai.AsyncOpenAI(base_url=job.base_url, api_key=job.api_key)
        messages = [{"role": "user", "content": job.instruction}]
        while True:
            answer = await client.chat.completions.create(model=job.model, messages=messages, tools=job.tools)
            message = answer.choices[0].message
            if not message.tool_calls:
                return message.content or ""
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls:
                result = await job.call_tool(call.function.name, call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})

    serve(attempt)

`await job.run("make test")` runs a command in the attempt's sandbox; `job.read_file` and `job.write_file` exchange its
files. Jobs run concurrently in one event loop. A cancelled job's task is cancelled. An exception ends its job with an
error whose cause the run decides (`agents/attempt.py`); raise `InfraError` for one that the policy did not cause. What
the program prints goes to standard error, because standard output carries the answers. It imports the standard library
alone.
"""

import asyncio
import base64
import json
import os
import sys
import urllib.request
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

MAX_LINE_BYTES = 128 << 20


class InfraError(Exception):
    """A failure of the infrastructure: the attempt is retried."""


@dataclass(frozen=True)
class CommandResult:
    reason: str
    """exited, signalled, timeout, memory or flooded."""
    status: int
    """Exit status, or minus the signal that ended it."""
    stdout: str
    stderr: str


@dataclass(frozen=True)
class Job:
    """One attempt; `agents/worker_pool.py` specifies the line that it is read from."""

    id: str
    instruction: str
    task: dict[str, Any]
    base_url: str
    """The policy's address, as OpenAI's SDK takes it."""
    api_key: str
    model: str
    tools: list[dict[str, Any]]
    """The tools of the task's family, as OpenAI's API describes functions."""
    tools_url: str
    workspace: str
    """The attempt's own folder in its sandbox, with the task's files."""
    sandbox: str
    """The socket that serves the sandbox; `agents/worker_pool.py` specifies its lines."""

    async def run(
        self, command: str | Sequence[str], *, stdin: str = "", timeout_s: float | None = None
    ) -> CommandResult:
        """Run a program with its arguments, or a line of a shell, in the workspace."""
        argv = ["sh", "-c", command] if isinstance(command, str) else list(command)
        request: dict[str, Any] = {"run": argv, "stdin": stdin}
        if timeout_s is not None:
            request["timeout_s"] = timeout_s
        return CommandResult(**await _ask(self.sandbox, request))

    async def read_file(self, path: str) -> bytes:
        return base64.b64decode((await _ask(self.sandbox, {"read": path}))["content"])

    async def write_file(self, path: str, content: bytes) -> None:
        await _ask(self.sandbox, {"write": path, "content": base64.b64encode(content).decode()})

    async def call_tool(self, name: str, arguments: object) -> str:
        """The result of a family's tool. `arguments`: an object, or its JSON as the policy wrote it."""
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except ValueError:
                arguments = None
        body = json.dumps({"name": name, "arguments": arguments}).encode()
        headers = {"Authorization": f"Bearer {self.api_key}", "Content-Type": "application/json"}
        request = urllib.request.Request(self.tools_url, body, headers)
        return await asyncio.to_thread(_fetch_content, request)


Attempt = Callable[[Job], Awaitable[str]]


def serve(attempt: Attempt) -> None:
    """Serve jobs from standard input until it ends."""
    answers = os.dup(1)
    os.dup2(2, 1)  # What the program prints is no answer.
    asyncio.run(_serve(attempt, answers))


async def _serve(attempt: Attempt, answers: int) -> None:
    running: dict[str, asyncio.Task[None]] = {}

    def send(id: str, fields: dict[str, Any]) -> None:
        data = memoryview(json.dumps({"id": id} | fields).encode() + b"\n")
        while data:
            data = data[os.write(answers, data) :]

    def end(id: str, task: asyncio.Task[None]) -> None:
        del running[id]
        if task.cancelled():
            send(id, {"cancelled": True})

    async def work(job: Job) -> None:
        try:
            fields: dict[str, Any] = {"answer": str(await attempt(job))}
        except InfraError as error:
            fields = {"error": str(error), "kind": "infra"}
        except Exception as error:  # noqa: BLE001  (an error is an answer; without one the job would wait for its timeout)
            fields = {"error": f"{type(error).__name__}: {error}"}
        send(job.id, fields)

    while line := await asyncio.to_thread(sys.stdin.readline):
        fields = json.loads(line)
        id = fields["id"]
        if not fields.get("cancel"):
            names = ("base_url", "api_key", "model", "tools", "tools_url", "workspace", "sandbox")
            job = Job(id, fields["task"]["instruction"], fields["task"], *(fields[name] for name in names))
            running[id] = asyncio.create_task(work(job))
            running[id].add_done_callback(partial(end, id))
        elif id in running:
            running[id].cancel()
    await asyncio.gather(*running.values())


async def _ask(socket: str, request: dict[str, Any]) -> dict[str, Any]:
    try:
        reader, writer = await asyncio.open_unix_connection(socket, limit=MAX_LINE_BYTES)
        try:
            writer.write(json.dumps(request).encode() + b"\n")
            answer: dict[str, Any] = json.loads(await reader.readline() or b'{"error": "it closed", "kind": "infra"}')
        finally:
            writer.close()
    except OSError as error:
        raise InfraError(f"the sandbox does not respond: {error}") from error
    if "error" in answer:
        raise (InfraError if answer.get("kind") == "infra" else ValueError)(answer["error"])
    return answer


def _fetch_content(request: urllib.request.Request) -> str:
    with urllib.request.urlopen(request) as response:
        return str(json.load(response)["content"])
