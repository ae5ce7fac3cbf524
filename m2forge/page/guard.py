"""Access control and browser security headers: ASGI middleware around the application.

On loopback a request must name this machine: a foreign site that points its own name here (DNS rebinding) is refused.
Elsewhere a key is required, first in the URL, `/?key=KEY`, then in a cookie that is sent only to this page. The page is
read-only. Scripts, styles and images load only from this origin, and text can never become markup: the policy forbids
it to scripts (`require-trusted-types-for`).
"""

import hmac
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs

from starlette.responses import PlainTextResponse, RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from m2forge.listener import LOOPBACK, host_name

COOKIE = "m2forge_page"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
HEADERS = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
)


class Guard:
    def __init__(self, app: ASGIApp, key: str | None = None) -> None:
        """`key`: None if only this machine can reach the page."""
        self._app, self._key = app, key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), *HEADERS]
            await send(message)

        answer = self._refusal(scope)
        await (self._app if answer is None else answer)(scope, receive, send_guarded)

    def _refusal(self, scope: Scope) -> ASGIApp | None:
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        if self._key is None:
            if host_name(headers.get(b"host", "")) not in LOOPBACK:
                return PlainTextResponse("this page answers to this machine's own name alone\n", 421)
            return None
        given = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("key", [""])[0]
        if given and hmac.compare_digest(given.encode(), self._key.encode()):
            found = RedirectResponse(scope["path"], 303)
            found.set_cookie(COOKIE, self._key, httponly=True, samesite="strict", path="/")
            return found
        if hmac.compare_digest(_cookie(headers.get(b"cookie", "")).encode(), self._key.encode()):
            return None
        return PlainTextResponse("open this page with its key: /?key=KEY\n", 401)


def _cookie(header: str) -> str:
    try:
        found = SimpleCookie(header).get(COOKIE)
    except CookieError:
        return ""
    return "" if found is None else found.value
