"""`m2forge rl` with a scripted policy and a trainer that only takes batches; the program behind scale_agents.py.

    python -m benchmarks.scale_agents_run rl CONFIG …

The sampler answers every prompt with the same word, at a steady rate once the file `held` in the run's folder is gone.
Loop, keeper, gateways and hosts are the product's own. The environment variable PROFILES names a folder for a profile
of each process.
"""

import asyncio
import cProfile
import os
import socket
import sys
import time
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import numpy as np

import m2forge.rl.child_main as own
from m2forge.config import load_resolved
from m2forge.observe.log import set_up_logging
from m2forge.protocols import Chunk, EngineState, Prompt
from m2forge.records import FinishReason, PolicyVersion
from m2forge.rl.config import RLConfig
from m2forge.rl.layout import Layout
from m2forge.rollout.config import ServerConfig
from m2forge.rollout.server.app import make_app, make_server
from m2forge.text.format import make_format
from m2forge.text.message import Message
from m2forge.text.tokenizer import load_tokenizer
from m2forge.train.run_dir import CONFIG_FILE

MODULE = "benchmarks.scale_agents_run"
HELD = "held"
ANSWER = "done"
ANSWERS_PER_S = 4096 / 240
"""4,096 attempts of four minutes."""
POLL_S = 0.1


class HeldEngine:
    """See `Engine`. Gives every prompt the same answer, in the order of their arrival, once a file is gone."""

    def __init__(self, ids: Sequence[int], version: PolicyVersion, held: Path) -> None:
        self._ids, self._version, self._held = np.array(ids, np.int32), version, held
        self._logprobs = np.full(len(ids), -1.0, np.float32)
        self._num_requests = self._num_running = 0
        self._freed_s: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    async def watch(self) -> None:
        while self._held.exists():
            await asyncio.sleep(POLL_S)
        self._freed_s.set_result(time.monotonic())

    async def generate(self, prompt: Prompt) -> AsyncGenerator[Chunk, None]:
        index = self._num_requests
        self._num_requests += 1
        self._num_running += 1
        try:
            freed_s = await asyncio.shield(self._freed_s)
            await asyncio.sleep(freed_s + index / ANSWERS_PER_S - time.monotonic())
            versions = np.full(self._ids.size, self._version.step, np.int32)
            yield Chunk(0, self._ids, self._logprobs, self._logprobs, versions, finish_reason=FinishReason.STOP)
        finally:
            self._num_running -= 1

    async def load(self, folder: Path, version: PolicyVersion) -> None:
        self._version = version

    async def state(self) -> EngineState:
        return EngineState(self._version, self._num_running, 0)

    async def close(self) -> None:
        """There is nothing to close."""


def run_sampler(run_dir: Path, descriptor: str, *_: str) -> None:
    (key,) = own.read_keys(1)
    config, listener = load_resolved(RLConfig, run_dir / CONFIG_FILE), socket.socket(fileno=int(descriptor))
    newest = Layout(run_dir).weight_store(config).newest()
    assert newest is not None, "the loop starts the sampler after the first version"
    tokenizer = load_tokenizer(Path(config.model))
    format = make_format(config.gateway.format, tokenizer)
    rendered = format.render([Message("user", "x"), Message("assistant", ANSWER)], [])
    ids = [id for id, was_sampled in zip(rendered.ids, rendered.trained, strict=True) if was_sampled]

    async def serve() -> None:
        engine = HeldEngine(ids, newest[0], run_dir / HELD)
        watching = asyncio.create_task(engine.watch())
        await make_server(make_app(engine, ServerConfig(), key)).serve(sockets=[listener])
        watching.cancel()

    asyncio.run(serve())


def main() -> int:
    kind, *arguments = sys.argv[1:]
    set_up_logging()

    def run() -> int:
        if kind == "rl":
            from tests.rl.other_children import run_loop

            return run_loop(MODULE)
        from tests.rl.hosts_run import run_trainer

        processes = own.PROCESSES | {"sampler": run_sampler, "trainer": run_trainer}
        processes[kind](Path(arguments[0]), *arguments[1:])
        return 0

    folder = os.environ.get("PROFILES")
    if not folder or kind == "trainer":
        return run()
    name = arguments[-1] if len(arguments) > 1 and kind != "rl" else kind
    profile = cProfile.Profile()
    try:
        return profile.runcall(run)
    finally:
        profile.dump_stats(Path(folder) / f"{name}.prof")


if __name__ == "__main__":
    sys.exit(main())
