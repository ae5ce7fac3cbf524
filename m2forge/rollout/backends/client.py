"""HTTP client of an engine's server; failures become errors of this package.

`read_error` converts error responses. A server that cannot be reached, drops the connection or sends invalid JSON
raises an `EngineError` that names it. Completions are streamed line by line.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any

from m2forge.errors import ConfigError, EngineError, M2ForgeError
from m2forge.http_client import BrokenOffError, Connection, HttpClient, Response, UnreachableError, encode_json
from m2forge.records import JsonValue

ANSWER_S = 30.0
"""Timeout of requests that a server answers at once. Other requests have none: they may queue for long, and a prompt
has its own deadline."""
KEY_STATUSES = (401, 403)
_END = b"[DONE]"


class Client:
    def __init__(
        self,
        url: str | Callable[[], str],
        *,
        key: str | None = None,
        read_error: Callable[[object, int], M2ForgeError],
    ) -> None:
        """`url` and `key`: see `HttpClient`. `read_error` takes an error response's JSON, or else its text, and its
        status."""
        self._http, self._read_error = HttpClient(url, key=key), read_error

    @property
    def url(self) -> str:
        return self._http.url

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

    async def has_route(self, path: str) -> bool:
        """Whether the server accepts POST requests at `path`; found by a GET, which changes nothing there. Raises a
        ConfigError if it refuses the key."""
        response = await self._answer("GET", path, timeout_s=ANSWER_S)
        if response.status in KEY_STATUSES:
            error = self._response_error(path, response.status, response.content)
            raise ConfigError(f"{error}; give the server's API key (engine.server.key_env in a run)")
        return response.status != 404

    async def batches(
        self, path: str, body: JsonValue | bytes, deadline_s: float | None = None
    ) -> AsyncGenerator[list[bytes], None]:
        """Posts `body`, a value or encoded JSON; yields the response's non-blank lines, those received together in one
        list. Closing the iterator closes the connection. Raises TimeoutError when the loop's clock reaches
        `deadline_s`."""
        self._refuse_closed()
        data = body if isinstance(body, bytes) else encode_json(body)
        connection = await self._connect(deadline_s)
        timer = None
        if deadline_s is not None:
            timer = asyncio.get_running_loop().call_at(deadline_s, connection.fail, TimeoutError())
        try:
            self._http.send(connection, "POST", path, data)
            if await connection.receive_status() >= 400:
                raise self._response_error(path, connection.status, await connection.read_all())
            partial_line: list[bytes] = []
            while piece := await connection.read():
                end, *begun = piece.split(b"\n")
                partial_line.append(end)
                if begun:
                    # Split bytes, not text: strings in JSON may hold Unicode line separators, which end no line here.
                    lines = [line for line in (b"".join(partial_line), *begun[:-1]) if line.strip()]
                    partial_line = [begun[-1]]
                    if lines:
                        yield lines
            if (line := b"".join(partial_line)).strip():
                yield [line]
        except BrokenOffError as error:
            raise EngineError(f"{self.url} closed the connection before the response ended: {error}") from error
        finally:
            if timer is not None:
                timer.cancel()
            self._http.release(connection)

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
            raise EngineError(f"{self.url} sent invalid JSON: {text[:200]!r}") from error

    async def close(self) -> None:
        self._http.close()

    async def _send(
        self,
        method: str,
        path: str,
        body: JsonValue = None,
        parameters: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> str:
        data = b"" if body is None else encode_json(body)
        response = await self._answer(method, path, data, parameters, timeout_s)
        if response.status >= 400:
            raise self._response_error(path, response.status, response.content)
        return response.text

    async def _answer(
        self,
        method: str,
        path: str,
        data: bytes = b"",
        parameters: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Response:
        """The response, whatever its status."""
        self._refuse_closed()
        try:
            return await self._http.request(method, path, data, parameters=parameters, timeout_s=timeout_s)
        except UnreachableError as error:
            raise self._unreachable(error) from error
        except TimeoutError as error:
            raise EngineError(f"{self.url}{path}: no response within {timeout_s:g} s") from error
        except BrokenOffError as error:
            raise EngineError(f"{self.url} closed the connection before the response ended: {error}") from error

    async def _connect(self, deadline_s: float | None) -> Connection:
        """Raises TimeoutError if `deadline_s` comes before the timeout of connecting."""
        try:
            async with asyncio.timeout_at(deadline_s):
                return await self._http.connect()
        except UnreachableError as error:
            raise self._unreachable(error) from error

    def _refuse_closed(self) -> None:
        if self._http.is_closed:
            raise EngineError(f"the engine at {self.url} is closed; create another")

    def _unreachable(self, error: UnreachableError) -> EngineError:
        return EngineError(f"{self.url} cannot be reached ({error}); is the server running?")

    def _response_error(self, path: str, status: int, content: bytes) -> M2ForgeError:
        try:
            body: object = json.loads(content)
        except ValueError:
            body = content.decode(errors="replace")
        error = self._read_error(body, status)
        return type(error)(f"{self.url}{path}: {error}")
