"""Requests to the HTTP server of an engine, with their failures told as errors of this package.

What the server refuses is told by `read_error`; a server that cannot be reached, breaks off or sends what is no JSON is
an `EngineError` that names it.
"""

import json
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from typing import Any

import httpx2

from m2forge.errors import EngineError, M2ForgeError
from m2forge.records import JsonValue

CONNECT_S = 10.0
ANSWER_S = 30.0
"""For what a server answers at once. Elsewhere waiting has no limit: a request may queue for long, and a prompt carries
its own."""
IDLE_S = 2.0
"""How long a connection is kept for the next request. These servers close theirs after 5 s; one that they close just
when it is used again would break that request off."""
_END = b"[DONE]"


class Client:
    def __init__(
        self,
        url: str,
        *,
        key: str | None = None,
        read_error: Callable[[object, int], M2ForgeError],
    ) -> None:
        """`key` is sent as a bearer token. `read_error` takes the JSON, or else the text, and status of a refusal."""
        self.url, self._read_error, self._is_closed = url.rstrip("/"), read_error, False
        # As many connections as there are completions under way: a limit here would be a queue that nobody sees.
        self._http = httpx2.AsyncClient(
            base_url=self.url,
            headers={} if key is None else {"Authorization": f"Bearer {key}"},
            timeout=httpx2.Timeout(None, connect=CONNECT_S),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=IDLE_S),
            trust_env=False,
            verify=self.url.startswith("https"),  # reading the certificates takes a tenth of a second
        )

    async def get(self, path: str, parameters: Mapping[str, str] | None = None) -> str:
        return await self._send("GET", path, parameters=parameters, timeout_s=ANSWER_S)

    async def post(
        self,
        path: str,
        body: JsonValue = None,
        parameters: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> str:
        return await self._send("POST", path, body, parameters, timeout_s)

    async def lines(self, path: str, body: JsonValue) -> AsyncGenerator[bytes, None]:
        """The lines of the answer as they come, blank ones left out. Closing the iterator hangs up."""
        parts: list[bytes] = []
        with self._told():
            async with self._http.stream("POST", path, json=body) as response:
                if response.is_error:
                    await response.aread()
                    raise self._refusal(response)
                # Not by characters: text in JSON may hold line separators that end no line here.
                async for piece in response.aiter_bytes():
                    end, *rest = piece.split(b"\n")
                    parts.append(end)
                    for begin in rest:
                        if (line := b"".join(parts)).strip():
                            yield line
                        parts = [begin]
        if (line := b"".join(parts)).strip():
            yield line

    async def events(self, path: str, body: JsonValue) -> AsyncGenerator[Any, None]:
        """The JSON of server-sent events, up to the one that says it is the last."""
        async with aclosing(self.lines(path, body)) as lines:
            async for line in lines:
                if line.startswith(b"data:") and (data := line[5:].strip()) != _END:
                    yield self.parse(data)

    def parse(self, text: str | bytes) -> Any:
        try:
            return json.loads(text)
        except ValueError as error:
            raise EngineError(f"{self.url} sent what is no JSON: {text[:200]!r}") from error

    async def close(self) -> None:
        self._is_closed = True
        await self._http.aclose()

    async def _send(
        self,
        method: str,
        path: str,
        body: JsonValue = None,
        parameters: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> str:
        timeout = httpx2.Timeout(timeout_s, connect=CONNECT_S)
        with self._told():
            response = await self._http.request(method, path, json=body, params=parameters, timeout=timeout)
        if response.is_error:
            raise self._refusal(response)
        return response.text

    def _refusal(self, response: httpx2.Response) -> M2ForgeError:
        try:
            told: object = response.json()
        except ValueError:
            told = response.text
        error = self._read_error(told, response.status_code)
        return type(error)(f"{self.url}{response.url.path}: {error}")

    @contextmanager
    def _told(self) -> Iterator[None]:
        if self._is_closed:
            raise EngineError(f"the engine at {self.url} is closed; make another")
        try:
            yield
        except httpx2.ConnectError as error:
            raise EngineError(f"{self.url} cannot be reached ({error}); is the server running?") from error
        except httpx2.HTTPError as error:
            raise EngineError(f"{self.url} broke off: {type(error).__name__}: {error}") from error
