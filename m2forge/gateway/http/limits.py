"""Reads a request's key, headers and body within limits, or raises a `HTTPError` with its HTTP status; sends responses.

431   headers too large        408   body too slow
413   body too large           400   body is not JSON, or nested too deeply
415   body is compressed
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import Any, TypeAlias

from m2forge.errors import EngineError, ExistsError, M2ForgeError, NotFoundError
from m2forge.gateway.config import GatewayConfig
from m2forge.gateway.dialects.openai.chat import TOO_FAST
from m2forge.gateway.dialects.types import BadRequestError
from m2forge.gateway.episodes.episode import BudgetError, ClosedError
from m2forge.gateway.episodes.journal import JournalError
from m2forge.records import JsonValue
from m2forge.text.message import parse_json

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers: TypeAlias = Mapping[bytes, bytes]

PASSED_OVER = 4
"""An oversized body of up to this many times the limit is drained, so that the connection can stay open."""
_BEARER = "bearer "
_MAX_ATTEMPT = 1_000_000


class HTTPError(M2ForgeError):
    """A request that is answered with an HTTP error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        allowed: str | None = None,
        is_final: bool = False,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.allowed = allowed
        """The methods that the route accepts, if another was used."""
        self.is_final = is_final
        """Whether to close the connection, because later bytes on it could still belong to the body."""
        self.retry_after_s = retry_after_s
        """Seconds after which a retry may succeed; None if it would not."""


class ClientDisconnected(Exception):
    """The client disconnected before its request was complete or answered."""


def read_headers(scope: Scope, max_bytes: int) -> Headers:
    """Return headers by lower-case name, the last of each."""
    pairs: list[tuple[bytes, bytes]] = scope["headers"]
    size = len(scope["raw_path"]) + len(scope["query_string"]) + sum(len(name) + len(value) for name, value in pairs)
    if size > max_bytes:
        raise HTTPError(431, f"the headers exceed {max_bytes} bytes; send fewer", is_final=True)
    return dict(pairs)


def read_key(headers: Headers) -> str:
    """Return the API key sent the OpenAI or Anthropic way; empty if there is none."""
    sent = headers.get(b"authorization", b"").decode("latin-1")
    if sent[: len(_BEARER)].lower() == _BEARER:
        return sent[len(_BEARER) :].strip()
    return headers.get(b"x-api-key", b"").decode("latin-1").strip()


def read_retry(headers: Headers) -> tuple[int, str]:
    """Return the attempt number that the client reports, 0 for the first, and its idempotency key."""
    retry_count = headers.get(b"x-stainless-retry-count", b"")
    attempt = min(int(retry_count), _MAX_ATTEMPT) if retry_count.isdigit() and len(retry_count) < 10 else 0
    return attempt, headers.get(b"idempotency-key", b"").decode("latin-1")


async def read_body(headers: Headers, receive: Receive, config: GatewayConfig) -> bytes:
    if headers.get(b"content-encoding", b"identity").lower() != b"identity":
        raise HTTPError(415, "the body is compressed; send it as it is", is_final=True)
    length = headers.get(b"content-length", b"")
    if length.isdigit() and (len(length) > 18 or int(length) > config.max_body_bytes):
        # A client that reads only after sending would miss the response if the connection were closed early.
        is_final = len(length) > 18 or int(length) > PASSED_OVER * config.max_body_bytes
        raise _too_large(config, is_final=is_final)
    message = await _receive_within(receive, config) if length or b"transfer-encoding" in headers else {}
    body = message.get("body", b"")
    if not message.get("more_body", False):
        if len(body) > config.max_body_bytes:
            raise _too_large(config)
        return bytes(body)
    try:
        async with asyncio.timeout(config.read_timeout_s):
            return await _read_on(bytearray(body), receive, config)
    except TimeoutError:
        raise _too_slow(config) from None


def parse_body(body: bytes, max_depth: int) -> Mapping[str, JsonValue]:
    """Parse the body, which must be a JSON object."""
    try:
        value = parse_json(body.decode("utf-8"), max_depth)
    except UnicodeDecodeError as error:
        raise HTTPError(400, f"the body is no UTF-8: byte {error.start} cannot be read") from None
    except json.JSONDecodeError as error:
        raise HTTPError(400, f"the body is no JSON: {error.msg} at character {error.pos}") from None
    except UnicodeEncodeError:
        raise HTTPError(400, "the body holds half of a surrogate pair, which is no Unicode") from None
    except ValueError as error:
        raise HTTPError(400, f"invalid body: {_brief(str(error))}") from None
    if not isinstance(value, dict):
        raise HTTPError(400, f"the body is {type(value).__name__}, expected an object")
    return value


async def _receive_within(receive: Receive, config: GatewayConfig) -> MutableMapping[str, Any]:
    try:
        async with asyncio.timeout(config.read_timeout_s):
            message = await receive()
    except TimeoutError:
        raise _too_slow(config) from None
    if message["type"] == "http.disconnect":
        raise ClientDisconnected
    return message


async def _read_on(body: bytearray, receive: Receive, config: GatewayConfig) -> bytes:
    while True:
        if len(body) > config.max_body_bytes:
            raise _too_large(config)
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        body += message.get("body", b"")
        if not message.get("more_body", False):
            if len(body) > config.max_body_bytes:
                raise _too_large(config)
            return bytes(body)


def _too_large(config: GatewayConfig, *, is_final: bool = True) -> HTTPError:
    return HTTPError(413, f"the body exceeds {config.max_body_bytes} bytes; send less", is_final=is_final)


def _too_slow(config: GatewayConfig) -> HTTPError:
    return HTTPError(408, f"the body did not come within {config.read_timeout_s:g} s; send it at once", is_final=True)


def _brief(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:199]}…"


# -- responses ---------------------------------------------------------------------------------------------------------

Pairs = Sequence[tuple[bytes, bytes]]

_STATUSES: tuple[tuple[type[M2ForgeError], int], ...] = (
    (BudgetError, 429),
    (ClosedError, 403),
    (JournalError, 503),
    (EngineError, 503),
    (NotFoundError, 404),
    (ExistsError, 409),
)
_JSON = (b"content-type", b"application/json")
_NO_RETRY = (b"x-should-retry", b"false")
"""Tells the vendors' SDKs not to retry, which they otherwise do on some statuses."""
_CLOSE = (b"connection", b"close")
_RETRIED_STATUSES = (409, 429)
STREAM_HEADERS: Pairs = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


def id_headers(id: str) -> Pairs:
    """Return the headers in which OpenAI's and Anthropic's SDKs expect the request id."""
    sent = id.encode()
    return (b"x-request-id", sent), (b"request-id", sent)


def status_of(error: M2ForgeError) -> int:
    """Return the HTTP status of an error; errors that are not listed are the client's mistake."""
    if isinstance(error, HTTPError):
        return error.status
    return next((status for kind, status in _STATUSES if isinstance(error, kind)), 400)


def field_of(error: M2ForgeError) -> str | None:
    return error.field if isinstance(error, BadRequestError) else None


def code_of(error: M2ForgeError) -> str | None:
    if isinstance(error, HTTPError) and error.status == 429:
        return TOO_FAST
    return error.code if isinstance(error, BadRequestError) else None


def error_headers(error: M2ForgeError) -> Pairs:
    retry_after_s = error.retry_after_s if isinstance(error, HTTPError) else None
    headers = [_NO_RETRY] if status_of(error) in _RETRIED_STATUSES and retry_after_s is None else []
    if isinstance(error, HTTPError):
        headers += [(b"retry-after", b"%d" % retry_after_s)] if retry_after_s is not None else []
        headers += [_CLOSE] if error.is_final else []
        headers += [(b"allow", error.allowed.encode())] if error.allowed else []
    return headers


async def respond(send: Send, status: int, body: Mapping[str, JsonValue], headers: Pairs = ()) -> None:
    await respond_bytes(send, status, json.dumps(body).encode(), (_JSON, *headers))


async def respond_bytes(send: Send, status: int, body: bytes, headers: Pairs) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})
