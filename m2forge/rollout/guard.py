"""Access control of the inference server: an ASGI layer around the whole application.

    421   the Host header names another machine: a site that points its own name here (DNS rebinding)
    403   the Origin header is that of another site
    401   without the key (`Authorization: Bearer KEY`), on every route, `/health` and unknown ones included
    415   a body whose content type is not application/json, which browsers send to other sites without asking first

The body of a rejected request stays unread, so its connection is closed.
"""

import hmac
import ipaddress
from collections.abc import Callable, Mapping
from typing import TypeAlias

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from m2forge.listener import LOOPBACK, host_name
from m2forge.records import JsonValue
from m2forge.rollout.server_config import ServerConfig

ANY_ADDRESS = ("0.0.0.0", "::", "")
JSON_TYPE = "application/json"


ErrorBody: TypeAlias = Callable[[int, str], Mapping[str, JsonValue]]


def error_body(status: int, message: str) -> dict[str, JsonValue]:
    return {"error": {"type": "HTTPException", "message": message}}


class Guard:
    def __init__(self, app: ASGIApp, config: ServerConfig, key: str, error_body: ErrorBody = error_body) -> None:
        """`error_body`: makes the body of a refusal from its status and message."""
        self._app, self._expected, self._error_body = app, key.encode(), error_body
        self._hosts = {_own_name(entry) for entry in (*LOOPBACK, config.host, *config.hosts)} - {""}
        self._takes_addresses = config.host in ANY_ADDRESS

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        refusal = self._refusal(scope)
        if refusal is None:
            await self._app(scope, receive, send)
            return
        status, message = refusal
        await JSONResponse(self._error_body(status, message), status, headers={"connection": "close"})(
            scope, receive, send
        )

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        host, origin = headers.get(b"host", ""), headers.get(b"origin")
        if not self._is_own(host_name(host)):
            return 421, f"the Host header names {host[:200]!r}, not this server; add the name to server.hosts"
        if origin is not None and origin.lower() not in (f"http://{host}".lower(), f"https://{host}".lower()):
            return 403, f"the Origin header names {origin[:200]!r}; other sites may not use this server"
        # Constant-time comparison.
        scheme, _, sent = headers.get(b"authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(sent.strip().encode("latin-1"), self._expected):
            return 401, "the server's key is needed: send Authorization: Bearer KEY"
        content_type = headers.get(b"content-type", "").partition(";")[0].strip().lower()
        if scope["method"] == "POST" and content_type != JSON_TYPE:
            return 415, f"the content type is {content_type[:200]!r}; send JSON as {JSON_TYPE}"
        return None

    def _is_own(self, name: str) -> bool:
        return name in self._hosts or (self._takes_addresses and _is_address(name))


def _own_name(entry: str) -> str:
    """The name of a configured host in the form that `host_name` gives for a request: without a port, which a proxy may
    change."""
    return entry.lower() if _is_address(entry) else host_name(entry)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
