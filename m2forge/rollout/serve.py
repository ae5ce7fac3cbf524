"""Serves a model folder until the process is asked to stop."""

import asyncio
import gc
import logging
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from m2forge.errors import ConfigError, M2ForgeError, NotFoundError
from m2forge.listener import address
from m2forge.model.checkpoint import load_model
from m2forge.records import PolicyVersion
from m2forge.rollout.core import Core
from m2forge.rollout.held_dtype import fastest_dtype
from m2forge.rollout.native import NativeEngine
from m2forge.rollout.request import Decode
from m2forge.rollout.server import bind, make_app, make_server
from m2forge.rollout.server_config import ServeConfig
from m2forge.text.tokenizer import Tokenizer, load_tokenizer

_log = logging.getLogger(__name__)

_DTYPES = {
    "auto": None,
    "stored": None,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def serve_model(
    folder: Path, config: ServeConfig, key: str, announce: Callable[[str], None], listener: socket.socket | None = None
) -> None:
    """Serve `folder` to clients that send `key`; calls `announce` with the address once the server listens. `listener`:
    a listening socket to use instead of the configured address. Raises the `EngineError` of a failed engine after every
    request has received it, so that the process ends and can be restarted."""
    # Bind before loading the weights, so that an address in use fails at once.
    with bind(config.server) if listener is None else listener as listener:
        engine = NativeEngine(make_core(folder, config))
        spare_collector()

        async def run() -> None:
            announce(address(listener))
            server, watching = make_server(make_app(engine, config.server, key)), asyncio.create_task(engine.watch())

            def stop(task: asyncio.Task[None]) -> None:
                server.should_exit = True

            watching.add_done_callback(stop)
            try:
                await server.serve(sockets=[listener])
                if watching.done():
                    watching.result()
            finally:
                watching.cancel()
                await engine.close()

        asyncio.run(run())


def spare_collector() -> None:
    """Exclude permanent objects (libraries, network, cache) from garbage collection, which would scan all of them from
    time to time, for 0.14 s, while a batch waits."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def make_core(folder: Path, config: ServeConfig) -> Core:
    """The engine core of the model in `folder`, with its tokenizer if it has one."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device cuda: torch sees no GPU; serve on the CPU with device = cpu")
    device = ("cuda" if torch.cuda.is_available() else "cpu") if config.device == "auto" else config.device
    model = load_model(folder, device=device, dtype=_DTYPES[config.dtype])
    if config.dtype == "auto" and device == "cpu":
        model = model.to(fastest_dtype(model))
    version = PolicyVersion(config.lineage or folder.absolute().name, config.step, config.branch)
    return Core(model.eval(), config.rollout, version, _find_decode(folder))


def _find_decode(folder: Path) -> Decode | None:
    """The decode function for stop texts, which are rejected without one. Exact, because only byte-level vocabularies
    are loaded: the text of a token sequence is the concatenation of each token's bytes."""
    try:
        tokenizer = load_tokenizer(folder)
    except NotFoundError:
        return None
    except M2ForgeError as error:
        _log.warning("prompts with stop texts will be refused: %s", error)
        return None

    def decode(ids: Sequence[int]) -> bytes:
        return b"".join(_bytes_of(tokenizer, id) for id in ids)

    return decode


def _bytes_of(tokenizer: Tokenizer, id: int) -> bytes:
    """A token's bytes; empty for ids beyond the tokenizer, which pad a network's vocabulary to a round size."""
    try:
        return tokenizer.decode_bytes((id,))
    except NotFoundError:
        return b""
