"""HTTP client of an engine's server; failures become errors of this package.

`read_error` converts error responses. A server that cannot be reached, drops the connection or sends invalid JSON
raises an `EngineError` that names it. Completions are streamed line by line (see `streaming`); other requests use a
general-purpose client.
"""

import asyncio
import base64
import json
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from typing import Any

import httpx2

from m2forge.errors import EngineError, M2ForgeError
from m2forge.records import JsonValue
from m2forge.rollout.backends.http_stream import Answer, BrokenOffError, Connections

CONNECT_S = 10.0
ANSWER_S = 30.0
"""Timeout of requests that a server answers at once. Other requests have none: they may queue for long, and a prompt
has its own deadline."""
IDLE_S = 2.0
"""Keep-alive time of an idle connection. These servers close theirs after 5 s; a request sent on a connection just
being closed would fail."""
_END = b"[DONE]"


class Client:
    def __init__(
        self,
        url: str,
        *,
        key: str | None = None,
        read_error: Callable[[object, int], M2ForgeError],
    ) -> None:
        """`key` is sent as a bearer token. `read_error` takes an error response's JSON, or else its text, and its
        status."""
        self.url, self._read_error, self._is_closed = url.rstrip("/"), read_error, False
        parts = httpx2.URL(self.url)
        headers = {"Host": parts.netloc.decode("ascii"), "Accept": "*/*", "Content-Type": "application/json"}
        if parts.userinfo:
            headers["Authorization"] = f"Basic {base64.b64encode(parts.userinfo).decode()}"
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self._head = b"POST %b HTTP/1.1\r\n" + lines.replace("%", "%%").encode() + b"Content-Length: %d\r\n\r\n"
        self._path = parts.raw_path.rstrip(b"/")
        is_secure = parts.scheme == "https"
        port = parts.port or (443 if is_secure else 80)
        self._connections = Connections(parts.host, port, is_secure=is_secure, idle_s=IDLE_S)
        # One connection per completion in flight: a limit here would be an invisible queue.
        self._http = httpx2.AsyncClient(
            base_url=self.url,
            headers={} if key is None else {"Authorization": f"Bearer {key}"},
            timeout=httpx2.Timeout(None, connect=CONNECT_S),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=IDLE_S),
            trust_env=False,
            verify=self.url.startswith("https"),  # loading the certificates takes 0.1 s
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

    async def batches(
        self, path: str, body: JsonValue | bytes, deadline_s: float | None = None
    ) -> AsyncGenerator[list[bytes], None]:
        """Posts `body`, a value or encoded JSON; yields the response's non-blank lines, those received together in one
        list. Closing the iterator closes the connection. Raises TimeoutError when the loop's clock reaches
        `deadline_s`."""
        if self._is_closed:
            raise EngineError(f"the engine at {self.url} is closed; make another")
        answer = await self._connect(deadline_s)
        timer = None
        if deadline_s is not None:
            timer = asyncio.get_running_loop().call_at(deadline_s, answer.fail, TimeoutError())
        try:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            answer.ask(self._head % (self._path + path.encode(), len(data)), data)
            if await answer.begin() >= 400:
                raise self._refusal(path, answer.status, await answer.read_all())
            rest: list[bytes] = []
            while piece := await answer.read():
                end, *begun = piece.split(b"\n")
                rest.append(end)
                if begun:
                    # Split bytes, not text: strings in JSON may hold Unicode line separators, which end no line here.
                    lines = [line for line in (b"".join(rest), *begun[:-1]) if line.strip()]
                    rest = [begun[-1]]
                    if lines:
                        yield lines
            if (line := b"".join(rest)).strip():
                yield [line]
        except BrokenOffError as error:
            raise EngineError(f"{self.url} broke off: {error}") from error
        finally:
            if timer is not None:
                timer.cancel()
            self._connections.give_back(answer)

    async def lines(self, path: str, body: JsonValue, deadline_s: float | None = None) -> AsyncGenerator[bytes, None]:
        """Yields the lines of `batches` one by one."""
        async with aclosing(self.batches(path, body, deadline_s)) as batches:
            async for batch in batches:
                for line in batch:
                    yield line

    async def events(self, path: str, body: JsonValue, deadline_s: float | None = None) -> AsyncGenerator[Any, None]:
        """Yields the JSON of server-sent events, without the final `[DONE]`."""
        async with aclosing(self.batches(path, body, deadline_s)) as batches:
            async for batch in batches:
                for line in batch:
                    if line.startswith(b"data:") and (data := line[5:].strip()) != _END:
                        yield self.parse(data)

    def parse(self, text: str | bytes) -> Any:
        try:
            return json.loads(text)
        except ValueError as error:
            raise EngineError(f"{self.url} sent what is no JSON: {text[:200]!r}") from error

    async def close(self) -> None:
        self._is_closed = True
        self._connections.close()
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
        with self._translated_errors():
            response = await self._http.request(method, path, json=body, params=parameters, timeout=timeout)
        if response.is_error:
            raise self._refusal(path, response.status_code, response.content)
        return response.text

    async def _connect(self, deadline_s: float | None) -> Answer:
        loop = asyncio.get_running_loop()
        connect_s = loop.time() + CONNECT_S
        is_late = deadline_s is not None and deadline_s < connect_s
        try:
            async with asyncio.timeout_at(deadline_s if is_late else connect_s):
                return await self._connections.take()
        except TimeoutError as error:
            if is_late:
                raise
            raise EngineError(f"{self.url} cannot be reached within {CONNECT_S:g} s; is the server running?") from error
        except OSError as error:
            raise EngineError(f"{self.url} cannot be reached ({error}); is the server running?") from error

    def _refusal(self, path: str, status: int, content: bytes) -> M2ForgeError:
        try:
            body: object = json.loads(content)
        except ValueError:
            body = content.decode(errors="replace")
        error = self._read_error(body, status)
        return type(error)(f"{self.url}{path}: {error}")

    @contextmanager
    def _translated_errors(self) -> Iterator[None]:
        if self._is_closed:
            raise EngineError(f"the engine at {self.url} is closed; make another")
        try:
            yield
        except httpx2.ConnectError as error:
            raise EngineError(f"{self.url} cannot be reached ({error}); is the server running?") from error
        except httpx2.HTTPError as error:
            raise EngineError(f"{self.url} broke off: {type(error).__name__}: {error}") from error
