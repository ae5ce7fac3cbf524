"""A stand-in for the model hub on this machine: the requests that huggingface_hub makes to fetch a model.

GET /api/models/ID, /api/models/ID/revision/REV      the commit
GET /api/models/ID/tree/COMMIT                       the files with their sizes
GET, HEAD /ID/resolve/COMMIT/FILE                    a file
"""

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ID = "own/tiny"


def _commit(number: int) -> str:
    return hashlib.sha1(str(number).encode()).hexdigest()


FIRST_COMMIT = _commit(0)


class StandInHub:
    """One model with a branch `main`."""

    def __init__(self) -> None:
        self.commits: dict[str, Path] = {}
        self.main = ""
        self.fetched: list[str] = []
        """Names of the files whose contents were sent."""
        self.num_requests = 0
        self.status: int | None = None
        """Answer of every request, if set."""

    def publish(self, folder: Path) -> str:
        """A new commit of `main` with the files of `folder`."""
        self.main = _commit(len(self.commits))
        self.commits[self.main] = folder
        return self.main

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """(status, headers, body)"""
        if self.status is not None:
            return self.status, {}, b""
        if found := re.fullmatch(rf"/api/models/{ID}(?:/revision/(.+))?", path):
            commit = self.main if found[1] in (None, "main") else found[1]
            if commit not in self.commits:
                return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
            return 200, {}, json.dumps({"id": ID, "sha": commit, "siblings": []}).encode()
        if found := re.fullmatch(rf"/api/models/{ID}/tree/([0-9a-f]+)", path):
            folder = self.commits[found[1]]
            files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
            entries = [
                {"type": "file", "path": str(file.relative_to(folder)), "size": file.stat().st_size, "oid": etag(file)}
                for file in files
            ]
            return 200, {}, json.dumps(entries).encode()
        if found := re.fullmatch(rf"/{ID}/resolve/([0-9a-f]+)/(.+)", path):
            file = self.commits[found[1]] / found[2]
            headers = {"ETag": f'"{etag(file)}"', "X-Repo-Commit": found[1], "Accept-Ranges": "bytes"}
            return 200, headers, file.read_bytes()
        return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"


def etag(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


@contextlib.contextmanager
def serving(hub: StandInHub) -> Iterator[str]:
    """The hub's address while it is served."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.num_requests += 1
            status, headers, body = hub.answer(path)
            self.send_response(status, HTTPStatus(status).phrase)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)
                if "/resolve/" in path:
                    hub.fetched.append(path.rpartition("/")[2])

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@contextlib.contextmanager
def hub_at(url: str, home: Path) -> Iterator[None]:
    """This process and those it starts take the hub at `url` and the cache in `home`. huggingface_hub reads the
    variables when it is imported, which another test may have done before."""
    from huggingface_hub import constants

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", url)
        patch.setenv("HF_HOME", str(home))
        patch.setattr(constants, "ENDPOINT", url)
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
        patch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
        yield
