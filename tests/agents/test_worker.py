"""The SDK of workers: an async function serves jobs at once, with tools, errors and cancels."""

import asyncio
import contextlib
import http.server
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from m2forge.agents.attempt import AgentError, ErrorKind, Job
from m2forge.agents.config import WorkerConfig
from m2forge.agents.worker_pool import WorkerPool
from m2forge.agents.workspace import Workspace
from m2forge.protocols import Endpoint
from m2forge.records import Domain, Task
from m2forge.text.message import Tool
from tests.rl.ring import ROOT

PROGRAM = """
import asyncio
from m2forge.agents.worker import InfraError, Job, serve

num_running = 0

async def attempt(job: Job) -> str:
    global num_running
    num_running += 1
    print("no answer", job.instruction)
    if job.instruction == "hang":
        await asyncio.sleep(60)
    if job.instruction == "raise":
        raise KeyError("x")
    if job.instruction == "infra":
        raise InfraError("the disk")
    while num_running < 2:
        await asyncio.sleep(0.01)
    result = await job.call_tool(job.tools[0]["function"]["name"], '{"key": 1}')
    return f"{job.instruction} {job.model} {job.workspace} {result}"

serve(attempt)
"""


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        sent = json.loads(self.rfile.read(int(self.headers["content-length"])))
        body = json.dumps({"content": f"{sent} {self.headers['authorization']}"}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextlib.contextmanager
def tool_server() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()


def test_a_function_serves_jobs_with_tools_errors_and_cancels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "agent.py").write_text(PROGRAM)

    async def scene(url: str) -> list[str]:
        config = WorkerConfig.model_validate(
            {"command": (sys.executable, str(tmp_path / "agent.py")), "timeout_s": 30.0, "cancel_s": 20.0}
            | {"sandbox": {"inherits": ("PATH", "PYTHONPATH")}}
        )
        async with WorkerPool(config, tmp_path / "workers") as workers:

            def job(id: str, instruction: str) -> Job:
                task = Task("t", Domain.AGENT, instruction)
                return Job(id, task, Endpoint(url, "key"), (Tool("look", "", {}),), Workspace(Path("w")))

            hanging = asyncio.create_task(workers.attempt(job("0", "hang")))
            answers = await asyncio.gather(*(workers.attempt(job(n, n)) for n in ("one", "two")))
            hanging.cancel()
            for instruction, kind in (("raise", None), ("infra", ErrorKind.INFRA)):
                with pytest.raises(AgentError) as caught:
                    await workers.attempt(job(instruction, instruction))
                assert caught.value.kind is kind
            await asyncio.gather(*workers._cancels)
            assert workers._states[0].worker is not None, "the cancel was confirmed, and the worker not restarted"
            return [answer.text for answer in answers]

    with tool_server() as url:
        found = asyncio.run(scene(url))
    result = "{'name': 'look', 'arguments': {'key': 1}} Bearer key"
    assert found == [f"{name} policy w/workspace {result}" for name in ("one", "two")]
