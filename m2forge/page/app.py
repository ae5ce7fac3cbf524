"""The page as an ASGI application: the package's static files, and the output of a run, or of several, as JSON.

    GET /  /static/NAME                              the page
    GET /api/run                                     stage, state, evaluations
    GET /api/curves?revision=&step=                  metrics that are new to the browser
    GET /api/queue, /api/past                        the window: current state, and history
    GET /api/episodes?domain=&state=&task=&text=&least=&most=&order=&upto=&offset=&limit=
    GET /api/episodes/ID, …/outline, …/calls?start=&end=, …/tokens?call=&start=&end=, …/search?text=

The page of a folder of runs, whose IDs are only looked up in its list and never become a path:

    GET /  /static/NAME                              the list, and the curves of chosen runs in common charts
    GET /api/runs                                    the rows of the list
    GET /runs/ID/…                                   the page of one run, with the routes above

Responses are JSON, never markup; the browser inserts them as text. Handlers read files and a database, so they run in
threads.

`Guard` controls access and sets the browser's security headers, as ASGI middleware around the application. On loopback
a request must name this machine: a foreign site that points its own name here (DNS rebinding) is refused. Elsewhere a
key is required, first in the URL, `/?key=KEY`, then in a cookie that is sent only to this page. The page is read-only.
Scripts, styles and images load only from this origin, and text can never become markup: the policy forbids it to
scripts (`require-trusted-types-for`).
"""

import hmac
import json
import math
from collections.abc import Callable
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from urllib.parse import parse_qs

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from m2forge.errors import M2ForgeError, NotFoundError
from m2forge.listener import LOOPBACK, host_name
from m2forge.page.episode_list import ORDERS, Filter, list_episodes
from m2forge.page.episode_view import Episodes
from m2forge.page.pool_reader import PoolMissing, PoolReader
from m2forge.page.queue_view import queue_now, queue_past
from m2forge.page.run_folder import Run
from m2forge.page.run_list import RunList
from m2forge.pool.lifecycle import EpisodeState
from m2forge.records import Domain, JsonValue

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

        answer = self._error_response(scope)
        await (self._app if answer is None else answer)(scope, receive, send_guarded)

    def _error_response(self, scope: Scope) -> ASGIApp | None:
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        if self._key is None:
            if host_name(headers.get(b"host", "")) not in LOOPBACK:
                return PlainTextResponse("this page answers to this machine's own name alone\n", 421)
            return None
        sent_key = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("key", [""])[0]
        if sent_key and hmac.compare_digest(sent_key.encode(), self._key.encode()):
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


STATIC = Path(__file__).parent / "static"
MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
LIST_URL = "../../"
"""The list of runs, from the page of one."""
MAX_TEXT = 500
MAX_LIST = 200
MAX_CALLS = 200
MAX_NUMBER = 2**53


def make_app(run: Run, key: str | None = None) -> ASGIApp:
    """`key`: required of every request if other machines can reach the page."""
    return Guard(run_app(run), key)


def run_app(run: Run, list_url: str | None = None) -> Starlette:
    """The page of one run, without access control. All of its links are relative, so that it can be mounted at any
    path; `list_url` leads back to the list of runs, if there is one."""
    service = _Service(run, list_url)
    paths: list[tuple[str, Callable[[Request], Response]]] = [
        ("/", lambda request: static_file("index.html")),
        ("/static/{name:str}", serve_static),
        ("/api/run", service.run),
        ("/api/curves", service.curves),
        ("/api/queue", service.queue),
        ("/api/past", service.past),
        ("/api/episodes", service.episodes),
        ("/api/episodes/{id:int}", service.head),
        ("/api/episodes/{id:int}/outline", service.outline),
        ("/api/episodes/{id:int}/calls", service.calls),
        ("/api/episodes/{id:int}/tokens", service.tokens),
        ("/api/episodes/{id:int}/search", service.search),
    ]
    return Starlette(routes=[Route(path, handler) for path, handler in paths], exception_handlers=HANDLERS)


def make_list_app(runs: RunList, key: str | None = None) -> ASGIApp:
    """`key`: required of every request if other machines can reach the page."""

    def list_runs(request: Request) -> Response:
        return answer(runs.describe())

    routes = [
        Route("/", lambda request: static_file("runs.html")),
        Route("/static/{name:str}", serve_static),
        Route("/api/runs", list_runs),
        Mount("/runs/{id}", app=_RunPages(runs)),
    ]
    return Guard(Starlette(routes=routes, exception_handlers=HANDLERS), key)


class _RunPages:
    """Forwards a request to the page of the run that its path names."""

    def __init__(self, runs: RunList) -> None:
        self._runs = runs
        self._apps: dict[str, tuple[Run, ASGIApp]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        id = scope["path_params"]["id"]
        run = await run_in_threadpool(self._runs.find, id)
        if run is None:
            self._apps.pop(id, None)
            raise HTTPException(404, f"no run has the id {id[:200]!r}; the list of runs is at {LIST_URL}")
        known = self._apps.get(id)
        if known is None or known[0] is not run:
            known = self._apps[id] = (run, run_app(run, LIST_URL))
        await known[1](scope, receive, send)


class _Service:
    def __init__(self, run: Run, list_url: str | None) -> None:
        self._run, self._list_url = run, list_url
        self._reader: PoolReader | None = None
        self._episodes: Episodes | None = None

    def _pool(self) -> PoolReader:
        """Opens the pool on first use: the run may not have begun."""
        config = self._run.pool_config()
        if config is None:
            raise PoolMissing("this run has no data pool; only runs of m2forge rl have one")
        if self._reader is None or self._reader.config != config:
            self._reader = PoolReader(config)
            self._episodes = Episodes(self._run, self._reader)
        return self._reader

    def _calls(self) -> Episodes:
        self._pool()
        assert self._episodes is not None
        return self._episodes

    def run(self, request: Request) -> Response:
        return answer(self._run.describe() | {"list_url": self._list_url})

    def curves(self, request: Request) -> Response:
        return answer(self._run.curves.since(_number(request, "revision", -1), _number(request, "step", 0)))

    def queue(self, request: Request) -> Response:
        pool = self._pool()
        with pool.read() as connection:
            return answer(queue_now(connection, pool.config))

    def past(self, request: Request) -> Response:
        pool = self._pool()
        with pool.read() as connection:
            return answer(queue_past(connection, pool.config))

    def episodes(self, request: Request) -> Response:
        wanted = Filter(
            domain=_choice(request, "domain", [*Domain]),
            state=_choice(request, "state", [*EpisodeState]),
            task=_text(request, "task"),
            text=_text(request, "text"),
            least=_bound(request, "least"),
            most=_bound(request, "most"),
            order=_choice(request, "order", list(ORDERS)) or "newest",
            upto=_number(request, "upto", MAX_NUMBER),
        )
        offset, limit = _number(request, "offset", 0), min(MAX_LIST, _number(request, "limit", 100))
        with self._pool().read() as connection:
            return answer(list_episodes(connection, wanted, offset, limit))

    def head(self, request: Request) -> Response:
        return answer(self._calls().head(_id(request)))

    def outline(self, request: Request) -> Response:
        return answer(self._calls().outline(_id(request)))

    def calls(self, request: Request) -> Response:
        start = _number(request, "start", 0)
        end = min(_number(request, "end", start + 20), start + MAX_CALLS)
        return answer(self._calls().calls(_id(request), start, end))

    def tokens(self, request: Request) -> Response:
        span = [_number(request, name, 0) for name in ("call", "start", "end")]
        return answer(self._calls().tokens(_id(request), *span))

    def search(self, request: Request) -> Response:
        text = _text(request, "text")
        if not text:
            raise HTTPException(400, "text: expected something to look for")
        return answer(self._calls().search(_id(request), text))


# -- request parameters ------------------------------------------------------------------------------------------------


def _id(request: Request) -> int:
    id: int = request.path_params["id"]
    if id > MAX_NUMBER:
        raise NotFoundError(f"episode {id} is not in the pool")
    return id


def _number(request: Request, name: str, default: int) -> int:
    text = request.query_params.get(name)
    if text is None or text == "":
        return default
    if not (text.removeprefix("-").isascii() and text.removeprefix("-").isdecimal() and len(text) < 17):
        raise HTTPException(400, f"{name}: expected an integer, received {text[:40]!r}")
    number = int(text)
    if number < min(0, default):
        raise HTTPException(400, f"{name}: expected {min(0, default)} or more, received {number}")
    return number


def _bound(request: Request, name: str) -> float | None:
    text = request.query_params.get(name)
    if not text:
        return None
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise HTTPException(400, f"{name}: expected a number, received {text[:40]!r}")
    return number


def _choice(request: Request, name: str, choices: list[str]) -> str:
    text = request.query_params.get(name, "")
    if text and text not in choices:
        raise HTTPException(400, f"{name}: expected one of {', '.join(choices)}, received {text[:40]!r}")
    return text


def _text(request: Request, name: str) -> str:
    text = request.query_params.get(name, "")
    if len(text) > MAX_TEXT or "\0" in text:
        raise HTTPException(400, f"{name}: expected at most {MAX_TEXT} characters, none of them NUL")
    return text


# -- responses ---------------------------------------------------------------------------------------------------------


def answer(body: JsonValue, status: int = 200) -> Response:
    text = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # Text written by agents may contain lone surrogates.
    return Response(text.encode(errors="replace"), status, media_type="application/json")


def serve_static(request: Request) -> Response:
    return static_file(request.path_params["name"])


def static_file(name: str) -> Response:
    # Looked up in the directory listing: a requested name never becomes a path.
    path = next((path for path in STATIC.iterdir() if path.name == name and path.suffix in MEDIA_TYPES), None)
    if path is None:
        raise HTTPException(404, "there is no such file")
    return Response(path.read_bytes(), media_type=MEDIA_TYPES[path.suffix])


def _on_error(request: Request, error: Exception) -> Response:
    if isinstance(error, PoolMissing):
        return answer({"error": str(error), "reason": "pool"}, 503)
    return answer({"error": str(error)}, 404 if isinstance(error, NotFoundError) else 500)


def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return answer({"error": error.detail}, error.status_code)


def _on_bug(request: Request, error: Exception) -> Response:
    return answer({"error": f"the page failed ({type(error).__name__}); its log says where"}, 500)


HANDLERS = {M2ForgeError: _on_error, HTTPException: _on_http_error, Exception: _on_bug}
