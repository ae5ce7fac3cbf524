"""The socket through which an agent outside drives its attempt's sandbox: requests as lines in, results as lines out.

A Unix socket; any number of connections, each served in the order of its requests. One JSON object a line:

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
import tempfile
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from m2forge.agents.attempt import LOST, ErrorKind, Job
from m2forge.agents.workspace import remove
from m2forge.errors import DataError, EngineError, M2ForgeError
from m2forge.protocols import Command, Sandbox
from m2forge.records import JsonValue
from m2forge.text.message import parse_json

MAX_LINE_BYTES = 96 << 20
MAX_FILE_BYTES = 64 << 20
MAX_PATH_BYTES = 100
"""Linux refuses the paths of sockets from 108 bytes on."""
MAX_DEPTH = 8
NAME = "sandbox.sock"


@asynccontextmanager
async def serve_sandbox(job: Job) -> AsyncGenerator[str, None]:
    """Serve the sandbox of a job's workspace; yields the socket's path."""
    with _folder_for(job.workspace.folder) as folder:
        path = str(folder / NAME)
        connections: set[asyncio.Task[None]] = set()

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            connections.add(task)
            try:
                await _serve(job, reader, writer)
            except (OSError, ValueError, asyncio.CancelledError):
                pass  # The connection broke, a line was too long, or the attempt is over.
            finally:
                connections.discard(task)
                writer.close()

        server = await asyncio.start_unix_server(accept, path, limit=MAX_LINE_BYTES)
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
    if len(str(folder / NAME).encode()) <= MAX_PATH_BYTES:
        yield folder
        return
    short = Path(tempfile.mkdtemp(prefix="m2forge-"))
    try:
        yield short
    finally:
        remove(short)


async def _serve(job: Job, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while line := await reader.readline():
        answering = asyncio.ensure_future(_answer(job, line))
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


async def _answer(job: Job, line: bytes) -> dict[str, JsonValue]:
    try:
        request = parse_json(line.decode(), MAX_DEPTH)
        return await _use(await job.workspace.start(job.endpoint), request)
    except EngineError as error:
        return {"error": str(error), "kind": ErrorKind.INFRA}
    except (M2ForgeError, ValueError) as error:
        return {"error": str(error)}


async def _use(sandbox: Sandbox, request: JsonValue) -> dict[str, JsonValue]:
    match request:
        case {"run": argv, **more} if set(more) <= {"stdin", "env", "timeout_s"}:
            outcome = await sandbox.run(_command(argv, {str(name): value for name, value in more.items()}))
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


def _command(argv: object, more: Mapping[str, object]) -> Command:
    env, timeout_s = more.get("env", {}), more.get("timeout_s")
    if not isinstance(argv, list) or not all(isinstance(word, str) for word in argv):
        raise DataError(f"sandbox: run: expected a program and its arguments, received {str(argv)[:200]}")
    if not isinstance(env, dict) or not all(isinstance(value, str) for value in env.values()):
        raise DataError(f"sandbox: env: expected names and texts, received {str(env)[:200]}")
    if timeout_s is not None and not isinstance(timeout_s, int | float):
        raise DataError(f"sandbox: timeout_s: expected seconds, received {str(timeout_s)[:200]}")
    words, variables = tuple(map(str, argv)), {name: str(value) for name, value in env.items()}
    return Command(words, variables, str(more.get("stdin", "")).encode(errors="replace"), timeout_s)
