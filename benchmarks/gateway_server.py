"""Processes of the gateway's benchmark: the upstream, our gateway and the LiteLLM proxy, each on the core it is given.

LiteLLM is installed into an environment of its own, once. It runs with one worker on uvloop, which is how it starts;
without a database, keys, callbacks, retries, telemetry and fallbacks, its logs at errors alone, and without its
logging of streams.
"""

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gateway_work import ADMIN_KEY, MODEL

ROOT = Path(__file__).parents[1]
LITELLM = ROOT / "build" / "litellm-venv"
LITELLM_VERSION = "1.108.4"
PROXY_CORE, OTHER_CORE = 0, 1
CONTEXT = 1_000_000
START_S = 90.0
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Server:
    process: "subprocess.Popen[str]"
    port: int

    @property
    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    @property
    def memory_mib(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"VmRSS:\s+(\d+)", status)
        return int(found.group(1)) / 1024 if found else 0.0


@contextmanager
def upstream(folder: Path, answers: Mapping[str, Sequence[str]], pace_ms: float = 0.0) -> Iterator[Server]:
    path = folder / "answers.json"
    path.write_text(json.dumps(answers))
    command = [sys.executable, str(ROOT / "benchmarks" / "gateway_upstream.py"), str(path), "--pace-ms", str(pace_ms)]
    with _started(command, OTHER_CORE, {}) as process:
        yield Server(process, int(_first_line(process)))


def gateway_command(model: Path, journal: Path, behind: Server, context: int) -> list[str]:
    """Recording on, with `ADMIN_KEY`."""
    key_file = journal.with_suffix(".key")
    key_file.touch(0o600)
    key_file.write_text(ADMIN_KEY)
    command = [sys.executable, "-m", "m2forge", "gateway", str(model), "--engine", "m2forge"]
    command += ["--url", f"http://127.0.0.1:{behind.port}", "--journal", str(journal), "--port", "0"]
    return [*command, "--set", f"context={context}", "--admin-key-file", str(key_file)]


@contextmanager
def our_gateway(model: Path, journal: Path, behind: Server) -> Iterator[Server]:
    with _started(gateway_command(model, journal, behind, CONTEXT), PROXY_CORE, {}) as process:
        yield Server(process, int(_first_line(process).rpartition(":")[2]))


@contextmanager
def litellm(folder: Path, behind: Server) -> Iterator[Server]:
    config = folder / "litellm.yaml"
    config.write_text(
        f"model_list:\n- model_name: {MODEL}\n  litellm_params:\n    model: openai/{MODEL}\n"
        f"    api_base: http://127.0.0.1:{behind.port}/v1\n    api_key: none\n"
        "litellm_settings:\n  telemetry: false\n  num_retries: 0\n  disable_streaming_logging: true\n"
    )
    settings = {
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_LOG": "ERROR",
        "LITELLM_MODE": "PRODUCTION",
        "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
    }
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(LITELLM / "bin" / "litellm"), "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
    with _started([*command, "--num_workers", "1"], PROXY_CORE, settings, folder / "litellm.log") as process:
        _wait_for(lambda: _is_open(port), process)
        yield Server(process, port)


def has_litellm() -> bool:
    return (LITELLM / ".installed").exists()


def install_litellm() -> None:
    """With the dependencies that it names, but for a floor under certifi's date, which no index may hold yet."""
    print(f"installing LiteLLM {LITELLM_VERSION} into {LITELLM.relative_to(ROOT)}; this may take minutes", flush=True)
    pip = [str(LITELLM / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "-qq"]
    subprocess.run([sys.executable, "-m", "venv", str(LITELLM)], check=True)
    subprocess.run([*pip, "install", "--no-deps", f"litellm=={LITELLM_VERSION}"], check=True)
    read = "import importlib.metadata as m; print('\\n'.join(m.requires('litellm')))"
    told = subprocess.run([pip[0], "-c", read], check=True, capture_output=True, text=True).stdout
    wanted = []
    for line in told.splitlines():
        requirement, _, marker = line.partition(";")
        if "extra ==" in marker and "'proxy'" not in marker.replace('"', "'"):
            continue
        condition = re.sub(r"(\s*and)?\s*extra == .proxy.", "", marker).strip()
        name = "certifi" if requirement.startswith("certifi") else requirement.strip()
        wanted.append(f"{name}; {condition}" if condition else name)
    listed = LITELLM / "requirements.txt"
    listed.write_text("\n".join(wanted) + "\n")
    subprocess.run([*pip, "install", "-r", str(listed)], check=True)
    (LITELLM / ".installed").touch()


@contextmanager
def _started(
    command: Sequence[str], core: int, settings: Mapping[str, str], log: Path | None = None
) -> "Iterator[subprocess.Popen[str]]":
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **settings}
    with (log or Path(os.devnull)).open("w") as sink:
        process = subprocess.Popen(
            ["taskset", "--cpu-list", str(core % (os.cpu_count() or 1)), *command],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE if log is None else sink,
            stderr=None if log is None else sink,
            text=True,
        )
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _first_line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if not line:
        raise SystemExit(f"a server did not start: {process.args!r}")
    return line


def _wait_for(is_there: Callable[[], bool], process: "subprocess.Popen[str]") -> None:
    stop_s = time.monotonic() + START_S
    while not is_there():
        if process.poll() is not None or time.monotonic() > stop_s:
            raise SystemExit(f"a server did not start: {process.args!r}")
        time.sleep(0.1)


def _is_open(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True
