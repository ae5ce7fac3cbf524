"""A listening gateway: inside the process of a training loop, or as its own process.

    async with GatewayServer(engine, format, config, context=32768) as gateway:
        episode, key = gateway.episodes.create("task-1")
        ...                                   # an agent with base URL f"{gateway.url}/v1" and that key

By default it listens on this machine only; other addresses require an admin key. At shutdown, requests in flight may
finish for `shutdown_s`; then they are aborted, and streamed ones recorded. It does not close the engine.

`serve_gateway` runs a gateway as its own process, over any engine, until it is stopped.
"""

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import TracebackType
from typing import Self

import uvicorn

from m2forge.errors import ConfigError
from m2forge.gateway.app import GatewayApp
from m2forge.gateway.config import GatewayConfig
from m2forge.gateway.episodes.registry import Episodes
from m2forge.gateway.http.connection import ConnectionLimits, fit_open_files, make_connection
from m2forge.listener import LOOPBACK, address, find_loop, listen
from m2forge.protocols import Engine, ToolHost, Watched
from m2forge.text.format import ChatFormat

GRACE_S = 5
"""Seconds in which aborted requests are recorded and answered."""
KEEP_ALIVE_S = 60
"""Seconds that an idle connection waits for its next request."""
HEAD_ROOM = 64 << 10
"""Bytes by which the HTTP parser's own limit exceeds ours, so that it never refuses a head first."""

_log = logging.getLogger(__name__)


class GatewayServer:
    def __init__(
        self,
        engine: Engine,
        format: ChatFormat,
        config: GatewayConfig,
        *,
        context: int,
        vocab_size: int | None = None,
        admin_key: str | None = None,
        listener: socket.socket | None = None,
        captures_signals: bool = False,
        tool_host: ToolHost | None = None,
    ) -> None:
        """`context`: maximum tokens of prompt plus completion, unless configured. `vocab_size`: the network's, if it is
        larger than the tokenizer's. `listener`: a socket from `bind`. `captures_signals`: whether SIGTERM and SIGINT
        stop it, for a process that does nothing else. `tool_host`: serves the tools of episodes with a task."""
        self._listener = bind(config, admin_key) if listener is None else listener
        try:
            config = fit_open_files(config)
            self.episodes = make_episodes(format, config, vocab_size)
        except BaseException:
            self._listener.close()
            raise
        self.url = address(self._listener)
        self.app = GatewayApp(
            engine,
            format,
            config,
            self.episodes,
            context=config.context or context,
            admin_key=admin_key,
            tool_host=tool_host,
        )
        self._server = _Server(self.app, config, captures_signals=captures_signals)
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self.serve())
        while not self._server.started and not self._task.done():
            await asyncio.sleep(0)
        if self._task.done():
            await self._task
            raise ConfigError(f"{self.url}: the gateway exited before it accepted requests; see its log")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        if self._task is not None:
            await self._task

    def stop(self) -> None:
        """Refuse new requests; `serve` returns when those in flight have ended."""
        self._server.stop()

    async def serve(self) -> None:
        """Serve until stopped."""
        with self._listener:
            await self._server.serve(sockets=[self._listener])


class _Server(uvicorn.Server):
    def __init__(self, app: GatewayApp, config: GatewayConfig, *, captures_signals: bool) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=make_connection(config, ConnectionLimits(config, app.owners)),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=int(config.shutdown_s) + 1 + GRACE_S,
                h11_max_incomplete_event_size=config.max_header_bytes + HEAD_ROOM,
            )
        )
        self._app, self._shutdown_s, self._captures_signals = app, config.shutdown_s, captures_signals
        self._stopped = asyncio.Event()

    def stop(self) -> None:
        self.should_exit = True
        self._stopped.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Unlike the parent, do not re-raise the signal at the end: the caller has an engine to close."""
        loop = asyncio.get_running_loop()
        signals = (signal.SIGTERM, signal.SIGINT) if self._captures_signals else ()
        for number in signals:
            loop.add_signal_handler(number, self.stop)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)

    async def main_loop(self) -> None:
        counter = 0
        while not await self.on_tick(counter):
            await self._app.tidy()
            counter = (counter + 10) % 864000
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopped.wait(), 1.0)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        calls = self._app.calls
        self._app.drain()
        if calls.num_running:
            _log.info("stopping: %d requests may finish for %g s", calls.num_running, self._shutdown_s)
        timer = asyncio.get_running_loop().call_later(self._shutdown_s, calls.abort_all)
        await super().shutdown(sockets)
        timer.cancel()
        await calls.close()


def make_episodes(format: ChatFormat, config: GatewayConfig, vocab_size: int | None = None) -> Episodes:
    """Create the registry; episodes in the journals continue."""
    return Episodes(
        format,
        restores_thinking=config.restore_thinking,
        vocab_size=vocab_size,
        budget=config.budget,
        folder=Path(config.journal) if config.journal else None,
        sync=config.sync,
        max_closed=config.max_closed,
    )


def bind(config: GatewayConfig, admin_key: str | None) -> socket.socket:
    """Return a socket that listens on the configured address."""
    if admin_key is None and config.host not in LOOPBACK:
        raise ConfigError(
            f"host {config.host}: other machines could reach the gateway; set an admin key, or listen on 127.0.0.1"
        )
    return listen(config.host, config.port, backlog=2048)


_COLLECTOR_THRESHOLDS = (5_000, 4, 1_000)
_IDLE_POLL_S = 1.0


def serve_gateway(
    format: ChatFormat,
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
        raise ConfigError("the model does not state its context length; set it with --set context=N")
    # Messages are tokenized one at a time: passing them to other threads would only take longer.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
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
        with asyncio.Runner(loop_factory=find_loop()) as runner:
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
        await asyncio.sleep(_IDLE_POLL_S)
        before, num_new = num_prompt(), num_prompt() - before
        if gc.get_count()[2] and not num_new and not num_running():
            gc.collect()
