"""A chat format, a finished run that no test changes, a browser, and servers of pages."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pytest
import uvicorn
from playwright.sync_api import Browser, ConsoleMessage, Page, expect
from starlette.types import ASGIApp

from m2forge.listener import address
from m2forge.page.app import make_app
from m2forge.page.run_folder import Run
from m2forge.page.serve import bind, make_server
from m2forge.text.format import ChatFormat
from tests.page.chromium import chromium
from tests.page.scene import Scene, make_chat_format

expect.set_options(timeout=60_000)  # the default of 5 s is little for a busy machine
SIZES = {"wide": (1440, 900), "narrow": (390, 800)}


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


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Pages that must have no error of any kind when the test ends."""
    errors: list[str] = []
    contexts = []

    def open_one(size: str = "wide", scheme: Literal["light", "dark"] = "light") -> Page:
        width, height = SIZES[size]
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda said: errors.append(said.text) if is_mistake(said) else None)
        page.set_default_timeout(60_000)
        return page

    yield open_one
    for context in contexts:
        context.close()
    assert errors == []


def is_mistake(said: ConsoleMessage) -> bool:
    """An answer that is no 200 is told as well, where it belongs to the test."""
    return said.type == "error" and not said.text.startswith("Failed to load resource")


@contextmanager
def serving(run_dir: Path, key: str | None = None) -> Iterator[str]:
    """The address of a run's page."""
    with serving_app(make_app(Run(run_dir), key)) as url:
        yield url


@contextmanager
def serving_app(app: ASGIApp) -> Iterator[str]:
    """The address of a page that a thread serves."""
    listener = bind("127.0.0.1", 0)
    server = make_server(app)
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
