"""A run in which nothing is sampled and nothing trained, so that its trainer and its sampler need no torch.

`use` has a run start these processes. The trainer publishes the model's folder as the first version and waits; the
sampler answers that it serves what it was sent. The gateway is the product's own.
"""

import json
import shutil
import signal
import socket
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import m2forge.rl.child_main as own
from m2forge.config import load_resolved
from m2forge.model.config_file import CONFIG_FILE as WEIGHTS_CONFIG
from m2forge.observe.log import set_up_logging
from m2forge.rl.config import RLConfig
from m2forge.rl.layout import Layout
from m2forge.train.run_dir import CONFIG_FILE
from tests.rl.ring import ROOT

MODULE = "tests.rl.idle_run"


def use(patch: pytest.MonkeyPatch) -> None:
    patch.setenv("PYTHONPATH", str(ROOT))
    for starts in ("loop", "servers"):
        patch.setattr(f"m2forge.rl.{starts}.MODULE", MODULE)


def run_trainer(run_dir: Path) -> None:
    config = load_resolved(RLConfig, run_dir / CONFIG_FILE)
    model, folder = Path(config.model), Layout(run_dir).weight_store(config).folder / "step-00000000-aa"
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns(WEIGHTS_CONFIG))
    shutil.copy(model / WEIGHTS_CONFIG, folder)
    signal.pause()


def run_sampler(run_dir: Path, descriptor: str, *_: str) -> None:
    own.read_keys(1)
    newest = Layout(run_dir).weight_store(load_resolved(RLConfig, run_dir / CONFIG_FILE)).newest()
    assert newest is not None, "the loop starts the sampler after the first version"
    health = json.dumps({"version": newest[0].to_dict(), "num_running": 0, "num_waiting": 0}).encode()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(200)
            self.send_header("Content-Length", str(len(health)))
            self.end_headers()
            self.wfile.write(health)

        do_POST = do_GET

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler, bind_and_activate=False)
    server.socket = socket.socket(fileno=int(descriptor))
    server.serve_forever()


if __name__ == "__main__":
    set_up_logging()
    processes = own.PROCESSES | {"trainer": run_trainer, "sampler": run_sampler}
    processes[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
