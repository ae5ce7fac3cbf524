"""The page of a folder of runs as an ASGI application: their list, and the page of each below its own path.

    GET /  /static/NAME             the list, and the curves of chosen runs in common charts
    GET /api/runs                   the rows of the list
    GET /runs/ID/…                  the page of one run, as `m2forge page RUN` serves it; `app.py` lists its routes

IDs come from the list (`run_list.py`): a requested one is looked up there and never becomes a path.
"""

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from m2forge.page.app import HANDLERS, Guard, answer, run_app, serve_static, static_file
from m2forge.page.run import Run
from m2forge.page.run_list import RunList

LIST_URL = "../../"
"""The list, from the page of a run."""


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
