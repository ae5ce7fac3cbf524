"""A chat format, a finished run that nobody changes, and a page that serves whichever run it is given."""

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import uvicorn

from m2forge.listener import address
from m2forge.page.app import make_app
from m2forge.page.run import Run
from m2forge.page.serve import bind, make_server
from m2forge.text.format import ChatFormat
from tests.page.scene import Scene, make_chat_format


@pytest.fixture(scope="session")
def format() -> ChatFormat:
    return make_chat_format()


@pytest.fixture(scope="session")
def done(format: ChatFormat, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that is complete."""
    scene = Scene(tmp_path_factory.mktemp("runs") / "done", format, num_steps=6, group_size=2, queue=8, window=6)
    scene.run(6)
    scene.keep_ratios()
    scene.complete()
    scene.pool.close()
    return scene.run_dir


@contextmanager
def serving(run_dir: Path, key: str | None = None) -> Iterator[str]:
    """The address of a page that a thread serves."""
    listener = bind("127.0.0.1", 0)
    server = make_server(make_app(Run(run_dir), key))
    thread = threading.Thread(target=_serve, args=(server, listener))
    thread.start()
    try:
        while not server.started:
            time.sleep(0.005)
        yield address(listener)
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


def _serve(server: uvicorn.Server, listener: socket.socket) -> None:
    with asyncio.Runner() as runner:
        runner.run(server.serve(sockets=[listener]))
