"""HTTP responses: the status of an error, and the ASGI events that send a body."""

import json
from collections.abc import Mapping, Sequence

from m2forge.errors import EngineError, ExistsError, M2ForgeError, NotFoundError
from m2forge.gateway.episode import BudgetError, ClosedError
from m2forge.gateway.exchange import AskError
from m2forge.gateway.journal import JournalError
from m2forge.gateway.limits import Refusal, Send
from m2forge.gateway.openai_body import TOO_FAST
from m2forge.records import JsonValue

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
    if isinstance(error, Refusal):
        return error.status
    return next((status for kind, status in _STATUSES if isinstance(error, kind)), 400)


def field_of(error: M2ForgeError) -> str | None:
    return error.field if isinstance(error, AskError) else None


def code_of(error: M2ForgeError) -> str | None:
    if isinstance(error, Refusal) and error.status == 429:
        return TOO_FAST
    return error.code if isinstance(error, AskError) else None


def error_headers(error: M2ForgeError) -> Pairs:
    retry_after_s = error.retry_after_s if isinstance(error, Refusal) else None
    headers = [_NO_RETRY] if status_of(error) in _RETRIED_STATUSES and retry_after_s is None else []
    if isinstance(error, Refusal):
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
