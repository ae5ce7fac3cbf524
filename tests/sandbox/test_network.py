"""What a sandbox reaches under each network policy."""

import asyncio
import http.server
import threading
from collections.abc import Iterator

import pytest

from m2forge.protocols import Command, Outcome, Sandbox
from m2forge.sandbox import network
from m2forge.sandbox.config import SandboxConfig
from tests.sandbox.places import require, use

FETCH = """
import sys, urllib.request, urllib.error
try:
    print(urllib.request.urlopen(sys.argv[1], timeout=30).read().decode())
except urllib.error.HTTPError as error:
    print(error.code, error.read().decode())
"""
TUNNEL = """
import socket, sys
s = socket.create_connection(("127.0.0.1", 3128), 5)
s.sendall(f"CONNECT {sys.argv[1]} HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n".encode())
print(s.recv(1000).decode().splitlines()[0])
"""


class Hello(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = f"hello {self.path}".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """Prints nothing."""


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    require("namespace")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hello)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


def python(config: SandboxConfig, code: str, argument: str, gateway: network.Address | None = None) -> Outcome:
    async def act(sandbox: Sandbox) -> Outcome:
        return await sandbox.run(Command(("/usr/bin/python3", "-c", code, argument)))

    return use(config, act, gateway=gateway)


def test_the_gateway_alone_is_reached(port: int) -> None:
    url = f"http://127.0.0.1:{port}/v1"
    config = SandboxConfig(backend="namespace", network="gateway")
    assert python(config, FETCH, url, ("127.0.0.1", port)).stdout.text() == "hello /v1\n"
    refused = python(config, FETCH, f"http://127.0.0.1:{port + 1}/", ("127.0.0.1", port))
    assert "Connection refused" in refused.stderr.text()
    assert not python(SandboxConfig(backend="namespace"), FETCH, url, ("127.0.0.1", port)).is_success


def test_connections_to_the_gateway_are_concurrent_and_whole(port: int) -> None:
    code = (
        "import sys, urllib.request, threading\n"
        "got = []\n"
        "def fetch(n):\n"
        "    got.append(urllib.request.urlopen(f'{sys.argv[1]}/{n}', timeout=20).read() == b'hello /%d' % n)\n"
        "threads = [threading.Thread(target=fetch, args=(n,)) for n in range(50)]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]\n"
        "print(sum(got))\n"
    )
    config = SandboxConfig(backend="namespace", network="gateway")
    assert python(config, code, f"http://127.0.0.1:{port}", ("127.0.0.1", port)).stdout.text() == "50\n"


def test_an_allowlist_is_a_proxy_for_its_hosts(port: int) -> None:
    config = SandboxConfig(backend="namespace", network="allowlist", allow=(f"127.0.0.1:{port}", ".example.com"))
    assert "200" in python(config, TUNNEL, f"127.0.0.1:{port}").stdout.text()
    # By another name or address of this machine, another port, and another host.
    for target in (f"localhost:{port}", f"127.0.0.1:{port + 1}", f"127.1:{port}", f"[::1]:{port}", "example.org:443"):
        assert "403" in python(config, TUNNEL, target).stdout.text(), target


def test_public_reaches_no_private_address(port: int) -> None:
    config = SandboxConfig(backend="namespace", network="public")
    targets = (f"127.0.0.1:{port}", f"localhost:{port}", "10.0.0.1:80", "169.254.169.254:80", f"[::ffff:7f00:1]:{port}")
    for target in targets:
        assert "403" in python(config, TUNNEL, target).stdout.text(), target


def test_plain_requests_pass_the_proxy_one_at_a_time(port: int) -> None:
    code = (
        "import os, socket, sys\n"
        "assert os.environ['HTTP_PROXY'] == 'http://127.0.0.1:3128'\n"
        "s = socket.create_connection(('127.0.0.1', 3128), 5)\n"
        "s.sendall(f'GET {sys.argv[1]} HTTP/1.1\\r\\nHost: x\\r\\nProxy-Connection: keep-alive\\r\\n\\r\\n'.encode())\n"
        "data = b''.join(iter(lambda: s.recv(1000), b''))\n"
        "print(data.decode().rpartition('\\r\\n')[2])\n"
    )
    config = SandboxConfig(backend="namespace", network="allowlist", allow=(f"127.0.0.1:{port}",))
    assert python(config, code, f"http://127.0.0.1:{port}/a/b").stdout.text() == "hello /a/b\n"


@pytest.mark.parametrize(
    ("allow", "host", "is_allowed"),
    [
        ("pypi.org", "pypi.org", True),
        ("pypi.org", "evil-pypi.org", False),
        (".pypi.org", "files.pypi.org", True),
        (".pypi.org", "pypi.org", True),
        (".pypi.org", "notpypi.org", False),
        ("pypi.org:443", "pypi.org", True),
        ("pypi.org:80", "pypi.org", False),
    ],
)
def test_hosts_match_whole_labels(monkeypatch: pytest.MonkeyPatch, allow: str, host: str, is_allowed: bool) -> None:
    async def resolve(host: str, port: int) -> network.Address:
        return "1.2.3.4", port

    monkeypatch.setattr(network, "_public_address", resolve)

    async def ask() -> bool:
        return await network.allowlist_rule([allow])(host, 443) is not None

    assert asyncio.run(ask()) == is_allowed
