"""The sampler of a run with a vLLM or SGLang server: a proxy with the rollout server's routes, one for each server.

Loop and gateway support one kind of sampler. This process forwards their requests, pushes each published version by the
server's own update routes, and records which version sampled a token. At its start the server's weights are unknown, so
it loads the newest version before it serves.

A server that was restarted holds other weights than the last version sent to it. So this process sends a health check
every `POLL_S`, and ends when one fails; its successor waits for the server, and loads the newest version again.
"""

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import numpy as np

from m2forge.errors import ConfigError, EngineError, RequestError
from m2forge.protocols import Prompt
from m2forge.records import PolicyVersion
from m2forge.rl.config import RLConfig, SGLangConfig, VLLMConfig
from m2forge.rollout.backends.sglang import SGLangEngine
from m2forge.rollout.backends.vllm import VLLMEngine
from m2forge.rollout.config import ServerConfig
from m2forge.rollout.server.app import Guard, make_app, serve_engine

START_S = 600.0
"""Seconds to wait for a server that does not respond."""
POLL_S = 1.0
"""A server takes longer than this to start, so a restart is always detected."""

_log = logging.getLogger(__name__)


def serve_relay(
    config: RLConfig,
    folder: Path,
    version: PolicyVersion,
    key: str,
    announce: Callable[[str], None],
    listener: socket.socket,
    index: int = 0,
) -> None:
    """Serve the server's samples to clients that send `key`, after it has loaded `version` of `folder`. `index`: of the
    server among several."""
    assert config.engine.server is not None
    engine = make_engine(config.engine.server, version, index)
    refuse_samplings(engine, config)
    is_ready = asyncio.Event()

    async def watch() -> None:
        await is_ready.wait()
        while True:
            await asyncio.sleep(POLL_S)
            await engine.refuse_dead()

    @contextlib.asynccontextmanager
    async def open_app() -> AsyncGenerator[Guard, None]:
        await wait_for(engine)
        await engine.check_server()
        await load_first(engine, folder, version)
        is_ready.set()
        yield make_app(engine, ServerConfig(host=listener.getsockname()[0]), key)

    with listener:
        serve_engine(engine, watch, open_app, listener, announce)


def make_engine(config: VLLMConfig | SGLangConfig, version: PolicyVersion, index: int = 0) -> VLLMEngine | SGLangEngine:
    key, url = None, config.urls[index]
    if config.key_env is not None:
        key = os.environ.get(config.key_env)
        if not key:
            raise ConfigError(f"engine.server.key_env: the environment variable {config.key_env} is not set")
    if isinstance(config, VLLMConfig):
        return VLLMEngine(url, version, model=config.model, api_key=key, logprobs_mode=config.logprobs_mode)
    return SGLangEngine(url, version, api_key=key, takes_seeds=config.takes_seeds)


def refuse_samplings(engine: VLLMEngine | SGLangEngine, config: RLConfig) -> None:
    """Raise a ConfigError if the server cannot sample with the parameters of the run's agents or evaluations."""
    for name, sampling in (("agent.sampling", config.agent.sampling), ("eval.sampling", config.eval.sampling)):
        if sampling is not None:
            prompt = Prompt(np.zeros(1, np.int32), max_tokens=1, sampling=sampling.record())
            try:
                engine.refuse_unsupported(prompt)
            except RequestError as error:
                raise ConfigError(f"{name}: {error}") from error


async def load_first(engine: VLLMEngine | SGLangEngine, folder: Path, version: PolicyVersion) -> None:
    """Load the version with which the server starts to sample; raises a ConfigError if the server refuses a version
    that is there, as it will refuse the next."""
    try:
        await engine.load(folder, version)
    except RequestError as error:
        if not folder.is_dir():
            raise
        raise ConfigError(f"engine.server: {error}; it must see {folder} under this path") from error


async def wait_for(engine: VLLMEngine | SGLangEngine) -> None:
    """Wait until the server responds."""
    until_s, has_said = time.monotonic() + START_S, False
    while True:
        try:
            await engine.state()
            return
        except EngineError as error:
            if time.monotonic() > until_s:
                raise ConfigError(f"engine.server: no response within {START_S:g} s ({error}); start it") from error
            if not has_said:
                _log.warning("waiting for the server: %s", error)
                has_said = True
        await asyncio.sleep(POLL_S)
