"""The SDK of workers: an async function serves jobs at once, with tools, errors and cancels."""

import asyncio
import contextlib
import http.server
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from m2forge.agents.attempt import AgentError, ErrorKind, Job
from m2forge.agents.config import WorkerConfig
from m2forge.agents.worker_pool import WorkerPool
from m2forge.agents.workspace import SandboxCounts, Workspace, Workspaces
from m2forge.protocols import Endpoint
from m2forge.records import Domain, Task
from m2forge.sandbox.config import BackendName
from m2forge.text.message import Tool
from tests.rl.ring import ROOT
from tests.sandbox.places import require

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
            | {"sandbox": {"backend": "process", "inherits": ("PATH", "PYTHONPATH")}}
        )
        async with WorkerPool(config, tmp_path / "workers") as workers:

            def job(id: str, instruction: str) -> Job:
                task = Task("t", Domain.AGENT, instruction)
                (tmp_path / id).mkdir()
                return Job(id, task, Endpoint(url, "key"), (Tool("look", "", {}),), Workspace(tmp_path / id))

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
    assert found == [f"{name} policy {tmp_path}/{name}/workspace {result}" for name in ("one", "two")]


DRIVING = """
from m2forge.agents.worker import Job, serve

async def attempt(job: Job) -> str:
    if job.instruction == "lost":
        await job.run("sleep 60")
        return "not lost"
    await job.write_file("src/b.bin", bytes(range(256)))
    done = await job.run("cat src/a.txt; wc -c < src/b.bin; pwd; echo err >&2; cat - > c.txt; exit 3", stdin="in")
    late = await job.run(["sleep", "60"], timeout_s=0.1)
    try:
        await job.read_file("../../etc/passwd")
    except ValueError as error:
        refused = "inside the workspace" in str(error)
    return repr((done, late.reason, await job.read_file("c.txt"), refused))

serve(attempt)
"""


@pytest.mark.parametrize("backend", ["process", "namespace"])
def test_a_worker_drives_its_attempts_sandbox(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: BackendName
) -> None:
    require(backend)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "agent.py").write_text(DRIVING)
    config = WorkerConfig.model_validate(
        {"command": (sys.executable, str(tmp_path / "agent.py")), "timeout_s": 30.0}
        | {"sandbox": {"backend": backend, "inherits": ("PATH", "PYTHONPATH")}}
    )

    async def scene() -> tuple[str, str]:
        task = Task("t", Domain.AGENT, "drive", metadata={"files": {"src/a.txt": "1\n"}})
        workspaces = Workspaces(tmp_path / "all", config.sandbox)
        async with WorkerPool(config, tmp_path / "workers") as workers:
            workspace = workspaces.open("a", task)
            try:
                job = Job("a", task, Endpoint("http://127.0.0.1:9", "key"), (), workspace)
                answer = await workers.attempt(job)
                assert (await workspace.collect() / "c.txt").read_text() == "in"
                assert workspaces.counts == SandboxCounts(num_started=1, num_alive=1)
            finally:
                await workspace.stop()
            assert workspaces.counts.num_alive == 0
            return answer.text, workspace.inside

    text, inside = asyncio.run(scene())
    done = f"reason='exited', status=3, stdout='1\\n256\\n{inside}\\n', stderr='err\\n'"
    assert text == f"(CommandResult({done}), 'timeout', b'in', True)"


def supervisors() -> list[int]:
    """The processes that keep the sandboxes of this one."""
    children = [int(pid) for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()]
    return [pid for pid in children if b"\0start\0" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_a_lost_sandbox_is_the_infrastructures_doing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require("namespace")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "agent.py").write_text(DRIVING)
    sandbox = {"backend": "namespace", "inherits": ("PATH", "PYTHONPATH")}
    command = (sys.executable, str(tmp_path / "agent.py"))
    config = WorkerConfig.model_validate({"command": command, "timeout_s": 30.0, "sandbox": sandbox})

    async def scene() -> None:
        task = Task("t", Domain.AGENT, "lost")
        workspaces = Workspaces(tmp_path / "all", config.sandbox)
        async with WorkerPool(config, tmp_path / "workers") as workers:
            workspace = workspaces.open("a", task)
            attempt = asyncio.create_task(
                workers.attempt(Job("a", task, Endpoint("http://127.0.0.1:9", "key"), (), workspace))
            )
            while workspace.sandbox is None:
                await asyncio.sleep(0.01)
            for pid in supervisors():
                os.kill(pid, signal.SIGKILL)
            with pytest.raises(AgentError) as caught:
                await attempt
            assert (caught.value.kind, workspace.is_lost) == (ErrorKind.INFRA, True)
            await workspace.stop()
            assert workspaces.counts == SandboxCounts(num_started=1, num_failed=1)

    asyncio.run(scene())
