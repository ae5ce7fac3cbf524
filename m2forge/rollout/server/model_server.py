"""The server of one model folder or GGUF file: `serve_model` loads its engine and serves it until the process is asked
to stop.
"""

import contextlib
import gc
import logging
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from starlette.types import ASGIApp

from m2forge.errors import ConfigError, M2ForgeError, NotFoundError
from m2forge.model.checkpoint import load_model
from m2forge.model.transformer import Transformer
from m2forge.records import PolicyVersion
from m2forge.rollout.config import ServeConfig
from m2forge.rollout.core import Broadcasts, Core
from m2forge.rollout.engine import NativeEngine
from m2forge.rollout.execution.cpu_dtype import fastest_dtype
from m2forge.rollout.request import Decode
from m2forge.rollout.server.app import bind, make_app, serve_engine
from m2forge.text.tokenizer import Tokenizer, load_tokenizer

_log = logging.getLogger(__name__)

DTYPES = {
    "auto": None,
    "stored": None,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def serve_model(
    folder: Path,
    config: ServeConfig,
    key: str,
    announce: Callable[[str], None],
    listener: socket.socket | None = None,
    broadcasts: Broadcasts | None = None,
) -> None:
    """Serve `folder` to clients that send `key`; calls `announce` with the address once the server listens. `listener`:
    a listening socket to use instead of the configured address. `broadcasts`: brings versions before their folders are
    complete. Raises the `EngineError` of a failed engine after every request has received it, so that the process ends
    and can be restarted."""
    # Bind before loading the weights, so that an address in use fails at once.
    with bind(config.server) if listener is None else listener as listener:
        engine = NativeEngine(make_core(folder, config, broadcasts=broadcasts))
        spare_collector()
        app: ASGIApp = make_app(engine, config.server, key)
        serve_engine(engine, engine.watch, lambda: contextlib.nullcontext(app), listener, announce)


def spare_collector() -> None:
    """Exclude permanent objects (libraries, network, cache) from garbage collection, which would scan all of them from
    time to time, for 0.14 s, while a batch waits."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def make_core(
    path: Path, config: ServeConfig, lineage: str | None = None, broadcasts: Broadcasts | None = None
) -> Core:
    """The engine core of the model in a folder or GGUF file, with its tokenizer if it has one. `lineage`: name of the
    weights unless the config names them; by default that of the path."""
    model = load_model(path, device=find_device(config), dtype=DTYPES[config.dtype])
    return core_of(model, config, lineage or path.absolute().name, _find_decode(path), broadcasts)


def core_of(
    model: Transformer, config: ServeConfig, lineage: str, decode: Decode | None, broadcasts: Broadcasts | None = None
) -> Core:
    """The engine core of a loaded model; `lineage` names its weights unless the config does."""
    if config.dtype == "auto" and model.embedding.weight.device.type == "cpu":
        model = model.to(fastest_dtype(model))
    version = PolicyVersion(config.lineage or lineage, config.step, config.branch)
    return Core(model.eval(), config.rollout, version, decode, broadcasts=broadcasts)


def find_device(config: ServeConfig) -> str:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device cuda: torch sees no GPU; serve on the CPU with device = cpu")
    return ("cuda" if torch.cuda.is_available() else "cpu") if config.device == "auto" else config.device


def _find_decode(path: Path) -> Decode | None:
    """The decode function for stop texts, which are rejected without one."""
    try:
        return decoder(load_tokenizer(path))
    except NotFoundError:
        return None
    except M2ForgeError as error:
        _log.warning("the tokenizer cannot be loaded, so prompts with stop texts will be rejected: %s", error)
        return None


def decoder(tokenizer: Tokenizer) -> Decode:
    """A tokenizer's decode function. Exact, because only byte-level vocabularies are loaded: the text of a token
    sequence is the concatenation of each token's bytes."""

    def decode(ids: Sequence[int]) -> bytes:
        return b"".join(_bytes_of(tokenizer, id) for id in ids)

    return decode


def _bytes_of(tokenizer: Tokenizer, id: int) -> bytes:
    """A token's bytes; empty for ids beyond the tokenizer, which pad a network's vocabulary to a round size."""
    try:
        return tokenizer.decode_bytes((id,))
    except NotFoundError:
        return b""
