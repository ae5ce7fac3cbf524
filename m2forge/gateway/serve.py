"""A gateway as its own process: the tokenizer and chat format of a model folder, over any engine, until it is
stopped."""

import asyncio
import contextlib
import gc
import os
import socket
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from m2forge.errors import ConfigError
from m2forge.gateway.config import GatewayConfig
from m2forge.gateway.server import GatewayServer, bind
from m2forge.protocols import Engine, ToolHost, Watched
from m2forge.text.format import make_format
from m2forge.text.tokenizer import load_tokenizer

_COLLECTOR_THRESHOLDS = (5_000, 4, 1_000)
_IDLE_CHECK_S = 1.0


def serve_gateway(
    folder: Path,
    config: GatewayConfig,
    make_engine: Callable[[], Engine],
    announce: Callable[[str], None],
    *,
    admin_key: str,
    context: int | None = None,
    vocab_size: int | None = None,
    listener: socket.socket | None = None,
    open_tool_host: Callable[[], AbstractAsyncContextManager[ToolHost | None]] = contextlib.nullcontext,
) -> None:
    """`announce` is called with the address once it listens. `admin_key` gives access to the admin routes. `context`
    and `vocab_size` are the model's, if known. `listener`: a listening socket, instead of the configured address.
    `open_tool_host`: opens the host of the tools of episodes with a task. Raises the `EngineError` of a failed
    in-process engine once every request in flight has ended."""
    context = config.context or context
    if context is None:
        raise ConfigError(f"{folder} does not say how long its context is; give it with --set context=N")
    # Messages are tokenized one at a time: passing them to other threads would only take longer.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    format = make_format(config.format, load_tokenizer(folder))
    # Before weights are loaded: an address that is in use should be reported at once.
    with bind(config, admin_key) if listener is None else listener as listener:

        async def run(num_context: int) -> None:
            async with open_tool_host() as tool_host:
                await serve(num_context, tool_host)

        async def serve(num_context: int, tool_host: ToolHost | None) -> None:
            engine = make_engine()
            try:
                server = GatewayServer(
                    engine,
                    format,
                    config,
                    context=num_context,
                    vocab_size=vocab_size,
                    admin_key=admin_key,
                    listener=listener,
                    captures_signals=True,
                    tool_host=tool_host,
                )
                announce(server.url)
                app = server.app
                collecting = asyncio.create_task(
                    collect_when_idle(lambda: app.calls.num_running, lambda: app.counts.num_prompt)
                )
                watching = asyncio.create_task(engine.watch()) if isinstance(engine, Watched) else None
                if watching is not None:
                    watching.add_done_callback(lambda task: server.stop())
                try:
                    await server.serve()
                    if watching is not None and watching.done():
                        watching.result()
                finally:
                    collecting.cancel()
                    if watching is not None:
                        watching.cancel()
            finally:
                await engine.close()

        spare_collector()
        with asyncio.Runner(loop_factory=_find_loop()) as runner:
            runner.run(run(context))


def spare_collector() -> None:
    """Make cyclic garbage collection rare. Streams leave little garbage, episodes are many long-lived objects, and all
    requests wait while the collector scans them."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_COLLECTOR_THRESHOLDS)


async def collect_when_idle(num_running: Callable[[], int], num_prompt: Callable[[], int]) -> None:
    """Run a full collection while no request waits: when none is in flight and none arrived for a while."""
    before = 0
    while True:
        await asyncio.sleep(_IDLE_CHECK_S)
        before, asked = num_prompt(), num_prompt() - before
        if gc.get_count()[2] and not asked and not num_running():
            gc.collect()


def _find_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return uvloop's factory if it is installed: the loop takes half of a busy gateway's time."""
    try:
        import uvloop
    except ImportError:
        return None
    make_loop: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return make_loop
