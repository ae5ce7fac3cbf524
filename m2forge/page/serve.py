"""Serves the page of a run's directory, or of a folder of runs, until interrupted."""

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from m2forge.errors import ConfigError
from m2forge.listener import LOOPBACK, address, listen
from m2forge.page.app import make_app, make_list_app
from m2forge.page.run_folder import Run
from m2forge.page.run_list import RunList, is_run

KEY_VARIABLE = "M2FORGE_PAGE_KEY"
"""Environment variable with the key that browsers on other machines need; command lines are visible to all users."""
MAX_PORT = 65535
GRACE_S = 2

_log = logging.getLogger(__name__)


def serve_page(folder: Path, host: str, port: int, announce: Callable[[str], None]) -> None:
    """`announce` is called with the URL once the socket listens."""
    app = make_page(folder, find_key(host))
    with bind(host, port) as listener:
        announce(address(listener))
        asyncio.run(make_server(app).serve(sockets=[listener]))


def make_page(folder: Path, key: str | None = None) -> ASGIApp:
    """The page of the run if `folder` is the directory of one, else the list of the runs below it."""
    run = Run(folder)
    if is_run(run):
        return make_app(run, key)
    runs = RunList(folder)
    if runs.is_empty():
        _log.warning(
            "%s holds no runs yet; one that `m2forge pretrain CONFIG --runs %s` starts appears", folder, folder
        )
    return make_list_app(runs, key)


def find_key(host: str) -> str | None:
    key = os.environ.get(KEY_VARIABLE) or None
    if key is None and host not in LOOPBACK:
        raise ConfigError(
            f"host {host}: other machines could read what agents wrote; set a key in {KEY_VARIABLE}, "
            f"or listen on 127.0.0.1"
        )
    if key is not None and not all(sign.isascii() and (sign.isalnum() or sign in "-_") for sign in key):
        raise ConfigError(f"{KEY_VARIABLE}: expected letters, digits, - and _, which an address can carry")
    return key


def bind(host: str, port: int) -> socket.socket:
    if not 0 <= port <= MAX_PORT:
        raise ConfigError(f"port {port}: expected 0 to {MAX_PORT}; 0 takes any that is free")
    return listen(host, port)


def make_server(app: ASGIApp) -> uvicorn.Server:
    """A server to run with `serve(sockets=[listener])`."""
    return uvicorn.Server(
        uvicorn.Config(
            app,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=GRACE_S,
        )
    )
