"""Kills `m2forge pipeline` at random moments, resumes it and compares it with a run that was never killed."""

import json
import os
import random
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from m2forge.cli import main
from m2forge.compiled import cache_folder
from tests.pipelines.endpoint import Endpoint

LONG = os.environ.get("M2FORGE_LONG") == "1"
NUM_KILLS = 10 if LONG else 1
POLL_S = 0.01


def files_of(run_dir: Path) -> dict[str, tuple[int, bytes]]:
    paths = [path for path in (run_dir / "tasks").rglob("*") if path.is_file()]
    return {str(path.relative_to(run_dir)): (path.stat().st_mode, path.read_bytes()) for path in paths}


def check_kills(config: Path, whole: Path, endpoint: Endpoint, folder: Path, seed: int) -> None:
    """`whole`: the directory of the run that was never killed. `endpoint` responds by a function of the request."""
    rng, run_dir, total = random.Random(seed), folder / whole.name, _num_rows(whole, "outcome")
    command = [sys.executable, "-m", "m2forge", "pipeline", str(config), "--runs", str(folder)]
    before = Counter[str]()
    # The first kill hits the item for which the first completion was stored; the others come at any outcome.
    moments = [("completion", 1), *(("outcome", rng.randrange(1, total)) for _ in range(NUM_KILLS - 1))]
    for table, num_rows in sorted(moments):
        _kill(command, run_dir, table, num_rows, rng.random() / 4, _env(folder))
        before = _stored(run_dir)
        endpoint.requests.clear()
    assert main(command[3:]) == 0
    asked = Counter(_conversation(request) for request in endpoint.requests)
    assert asked == _stored(run_dir) - before
    assert _stored(run_dir) == _stored(whole)
    assert _num_rows(run_dir, "outcome") == total
    assert files_of(run_dir) == files_of(whole)


def _env(folder: Path) -> dict[str, str]:
    """Variables of the command. A long test has an empty image store, so that kills also interrupt image builds."""
    if not LONG:
        return dict(os.environ)
    other = folder / "cache" / cache_folder().name
    if not other.exists():
        other.mkdir(parents=True)
        for path in cache_folder().iterdir():
            if path.name != "images":
                (other / path.name).symlink_to(path)
    return {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}


def _kill(command: list[str], run_dir: Path, table: str, num_rows: int, delay_s: float, env: dict[str, str]) -> None:
    """Start the command and kill it `delay_s` after a table of its store has as many rows."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env)
    while _num_rows(run_dir, table) < num_rows and process.poll() is None:
        time.sleep(POLL_S)
    time.sleep(delay_s)
    process.kill()
    process.wait()


def _rows(run_dir: Path, query: str) -> list[tuple[Any, ...]]:
    try:
        connection = sqlite3.connect(f"file:{run_dir / 'pipeline.db'}?mode=ro", uri=True)
        return connection.execute(query).fetchall()
    except sqlite3.OperationalError:
        return []


def _num_rows(run_dir: Path, table: str) -> int:
    return sum(number for (number,) in _rows(run_dir, f"SELECT COUNT(*) FROM {table}"))


def _stored(run_dir: Path) -> Counter[str]:
    """How many completions of each conversation are stored; a draw's number is not sent."""
    return Counter(_conversation(json.loads(text)) for (text,) in _rows(run_dir, "SELECT request FROM completion"))


def _conversation(request: dict[str, Any]) -> str:
    return json.dumps(request["messages"], sort_keys=True)
