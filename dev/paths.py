"""The files that a reader opens to follow one step: traces four paths and prints their files in order of first call.

    python dev/paths.py [PATH ...] [--json]        all four by default; about a minute on one core

A path's first file lists the path's files in reading order, in a comment that begins with `# Reading path: NAME`. The
command fails if a list and what runs differ.

A file is on a path if code of one of its functions runs during the traced step, in any thread of this process, in
steady state: earlier steps have filled caches, compiled kernels and imported modules. Module and class bodies do not
count, nor do the base (m2forge/*.py and observe/) and the scripted engine of testing/. Everything runs on the CPU:

    train    TrainEngine.step over two token trees, and its report read: the second step of an MoE model with MTP
             modules in float32, under the default optimizer and policy loss
    decode   Core.step over a batch of two requests that both decode: the third step of an MoE model in float32,
             without drafts
    chat     a chat completion until it is in the pool: the second completion of an agent's second episode, from the
             gateway's socket to the journal and the response, sampled by a scripted engine; then the attempt's calls
             are encoded and stored, as the loop does it. How the loop fetches them over HTTP is part of the next path
    rl       the loop's process of `m2forge rl` while the trainer makes steps 2 to 4, since attempts and weight updates
             overlap with steps: tasks drawn, attempts run, episodes stored and rewarded, weights pushed. The trainer,
             the sampler, the gateway, agents and verifiers run in processes of their own; no evaluation and no lease
             renewal is due. An attempt consists of chat completions, so files of that path outside of the stage's own
             room are not counted again
"""

import argparse
import asyncio
import contextlib
import functools
import itertools
import json
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "m2forge"
MAX_FILES = {"train": 22, "decode": 14, "chat": 24, "rl": 18}
EXCLUDED = ("observe", "testing")
"""Folders whose files are never on a path."""
RL_ROOM = "rl/"
VIEW_S = 1.5
"""Longer than the time between two updates of the terminal, which would otherwise fall between traced steps."""
BODIES = 3
"""`CO_OPTIMIZED | CO_NEWLOCALS`: the flags of functions, which module and class bodies lack."""


class Tracer:
    """Records the files whose functions run while it is on, in all threads that start after it was made."""

    def __init__(self) -> None:
        self.files: list[str] = []
        self._is_on = False
        self._seen: set[CodeType] = set()
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        self._is_on = True
        try:
            yield
        finally:
            self._is_on = False

    def _note(self, frame: FrameType, event: str, argument: object) -> None:
        if not self._is_on or event != "call" or frame.f_code in self._seen:
            return
        code = frame.f_code
        self._seen.add(code)
        path = Path(code.co_filename)
        if code.co_flags & BODIES != BODIES or not path.is_relative_to(PACKAGE):
            return
        parts = path.relative_to(PACKAGE).parts
        name = "/".join(parts)
        if len(parts) > 1 and parts[0] not in EXCLUDED and name not in self.files:
            self.files.append(name)


def trace_train(tracer: Tracer, folder: Path) -> None:
    import torch

    from m2forge.train.config import OptimizerConfig, PolicyConfig
    from m2forge.train.engine import TrainEngine
    from tests.model.draw_tree import branching_tree
    from tests.train.draw import VOCAB, small_model

    engine = TrainEngine(small_model(torch.float32), OptimizerConfig(), policy=PolicyConfig())
    for step in range(2):
        trees = [branching_tree(VOCAB, seed) for seed in (2 * step, 2 * step + 1)]
        with tracer.on() if step else contextlib.nullcontext():
            report = engine.step(trees, lr=1e-3, version=step)
            report.read()
            report.logprobs()


def trace_decode(tracer: Tracer, folder: Path) -> None:
    import numpy as np
    import torch

    from m2forge.protocols import Prompt
    from m2forge.records import PolicyVersion
    from m2forge.rollout.config import RolloutConfig
    from m2forge.rollout.core import Core
    from tests.train.draw import small_model

    core = Core(small_model(torch.float32), RolloutConfig(seed=0), PolicyVersion("paths", 0))
    for id in "ab":
        core.add(id, Prompt(np.arange(8, dtype=np.int32), 8))
    for step in range(3):
        with tracer.on() if step == 2 else contextlib.nullcontext():
            core.step()


def trace_chat(tracer: Tracer, folder: Path) -> None:
    asyncio.run(_chat(tracer, folder))


async def _chat(tracer: Tracer, folder: Path) -> None:
    import httpx2

    from m2forge.agents.attempt import Overrides
    from m2forge.gateway.config import GatewayConfig
    from m2forge.gateway.server import GatewayServer
    from m2forge.pool.config import PoolConfig
    from m2forge.pool.pool import Pool, PoolWriter
    from m2forge.pool.stored import Outcome
    from m2forge.rl.attempts import ANSWER
    from m2forge.rl.gateway_admin import GatewayAdmin
    from m2forge.tasks.catalog import find_family
    from m2forge.tasks.task_set import TaskSet
    from m2forge.testing.scripted import ScriptedEngine
    from tests.gateway.dialogue import minimax

    format = minimax()
    tokenizer = format.tokenizer
    engine = ScriptedEngine(tokenizer.vocab_size, context=4096, decode=tokenizer.decode_bytes)
    config = GatewayConfig(port=0, journal=str(folder / "journal"))
    pool = Pool(PoolConfig(url=f"sqlite:///{folder / 'pool.db'}"), tokenizer.vocab_size)
    task = TaskSet(find_family("chain"), "train", 0).next(1, 3)
    pool.put([(task, 2)], stage="only")
    async with (
        GatewayServer(engine, format, config, context=4096, admin_key="admin") as server,
        GatewayAdmin(server.url, "admin") as admin,
        httpx2.AsyncClient(base_url=server.url, trust_env=False) as http,
        PoolWriter(pool) as writer,
    ):
        for attempt, lease in enumerate(pool.lease("paths", 2)):
            key = (await admin.open(lease.name, lease.task, lease.group, Overrides())).key
            messages = [{"role": "user", "content": "How many?"}]
            for turn in range(2):
                body = {"model": "m", "messages": messages, "max_tokens": 8}
                with tracer.on() if attempt and turn else contextlib.nullcontext():
                    answer = await http.post(
                        "/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"}
                    )
                    message = answer.raise_for_status().json()["choices"][0]["message"]
                    messages += [message, {"role": "user", "content": "Sure?"}]
            tree = await admin.take(lease.name)
            with tracer.on() if attempt else contextlib.nullcontext():
                calls = lease.writer(pool.vocab_size).write_tree(tree)
                await writer.end(lease, calls, Outcome(artifacts={ANSWER: "2"}))


def trace_rl(tracer: Tracer, folder: Path) -> None:
    from m2forge.observe.metrics import FILE_NAME, read_metrics
    from m2forge.rl.loop import run_rl
    from tests.rl.ring import AGENT
    from tests.rl.scene import make_config, make_model

    config = make_config(
        make_model(folder),
        num_steps=6,
        agent={
            "command": [sys.executable, str(AGENT)],
            "timeout_s": 60.0,
            "budget": {"max_calls": 2, "max_tokens": 32},
            "sandbox": {"inherits": ["PATH"], "timeout_s": 1000.0},
        },
        pool={"window": {"queue": 8, "no_signal": "train"}, "lease_s": 3600.0},
        eval={"num_tasks": 0},
    )
    path = folder / "run" / FILE_NAME

    def wait_for(step: int) -> None:
        while not path.exists() or all(found.step < step for found in read_metrics(path)):
            time.sleep(0.02)

    def watch() -> None:
        wait_for(1)
        with tracer.on():
            time.sleep(VIEW_S)
            wait_for(4)

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    run_rl(config, folder)
    watching.join()


PATHS: dict[str, Callable[[Tracer, Path], None]] = {
    "train": trace_train,
    "decode": trace_decode,
    "chat": trace_chat,
    "rl": trace_rl,
}


def listed() -> dict[str, list[str]]:
    """The files of each path as the comment in its first file lists them."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        lines = iter(path.read_text("utf-8").splitlines())
        for line in lines:
            title = re.match(r"# Reading path: (\w+)", line)
            if title is not None:
                block = "\n".join(itertools.takewhile(lambda entry: entry.startswith("#"), lines))
                found[title[1]] = re.findall(r"^#     (\S+\.py)\b", block, re.MULTILINE)
    return found


@functools.cache
def trace(name: str) -> list[str]:
    tracer = Tracer()
    with tempfile.TemporaryDirectory() as folder:
        PATHS[name](tracer, Path(folder))
    sys.setprofile(None)
    threading.setprofile(None)
    if name != "rl":
        return tracer.files
    return [file for file in tracer.files if file.startswith(RL_ROOM) or file not in trace("chat")]


def main() -> None:
    parser = argparse.ArgumentParser(description="The files on the four reading paths.")
    parser.add_argument("paths", nargs="*", metavar="PATH", help=f"one of {', '.join(PATHS)}; all by default")
    parser.add_argument("--json", action="store_true", help="print one JSON object: path → files")
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    os.environ["PYTHONPATH"] = str(ROOT)
    found = {name: trace(name) for name in PATHS if not arguments.paths or name in arguments.paths}
    if arguments.json:
        print(json.dumps(found))
    else:
        for name, files in found.items():
            print(f"{name}: {len(files)} files")
            print("".join(f"    {file}\n" for file in files))
    lists = listed()
    for name, files in found.items():
        wrong = set(files) ^ set(lists.get(name, ()))
        if wrong:
            sys.exit(f"{name}: the list in the code and what runs differ: {', '.join(sorted(wrong))}")
        if len(files) > MAX_FILES[name]:
            sys.exit(f"{name}: {len(files)} files, at most {MAX_FILES[name]}")


if __name__ == "__main__":
    main()
