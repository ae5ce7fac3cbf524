"""What a client may send: its key, headers and body, each within bounds, or a `Refusal` with its status.

431   headers that are too large        408   a body that takes too long
413   a body that is too large          400   a body that is no JSON, or nested too deeply
415   a body that is compressed
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, TypeAlias

from m2forge.errors import M2ForgeError
from m2forge.gateway.config import GatewayConfig
from m2forge.records import JsonValue
from m2forge.text.json_value import parse_json

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers: TypeAlias = Mapping[bytes, bytes]

PASSED_OVER = 4
"""A body so many times larger than it may be is read to its end, and passed over."""
_BEARER = "bearer "
_MAX_ATTEMPT = 1_000_000


class Refusal(M2ForgeError):
    """A request that is answered with an error of HTTP."""

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
        """The method that the route takes, where another was used."""
        self.is_final = is_final
        """Whether the connection ends with it, because what follows on it cannot be told apart from the body."""
        self.retry_after_s = retry_after_s
        """When a retry may succeed; None where it would not."""


class Gone(Exception):
    """The client hung up before it had said what it wants."""


def read_headers(scope: Scope, max_bytes: int) -> Headers:
    """By their names in lower case, the last one of each."""
    pairs: list[tuple[bytes, bytes]] = scope["headers"]
    size = len(scope["raw_path"]) + len(scope["query_string"]) + sum(len(name) + len(value) for name, value in pairs)
    if size > max_bytes:
        raise Refusal(431, f"the headers exceed {max_bytes} bytes; send fewer", is_final=True)
    return dict(pairs)


def read_key(headers: Headers) -> str:
    """The key that a client sent, in OpenAI's way or in Anthropic's; empty if it sent none."""
    sent = headers.get(b"authorization", b"").decode("latin-1")
    if sent[: len(_BEARER)].lower() == _BEARER:
        return sent[len(_BEARER) :].strip()
    return headers.get(b"x-api-key", b"").decode("latin-1").strip()


def read_retry(headers: Headers) -> tuple[int, str]:
    """Which attempt a client says this is, 0 for the first, and the token that it gives all attempts."""
    told = headers.get(b"x-stainless-retry-count", b"")
    attempt = min(int(told), _MAX_ATTEMPT) if told.isdigit() and len(told) < 10 else 0
    return attempt, headers.get(b"idempotency-key", b"").decode("latin-1")


async def read_body(headers: Headers, receive: Receive, config: GatewayConfig) -> bytes:
    if headers.get(b"content-encoding", b"identity").lower() != b"identity":
        raise Refusal(415, "the body is compressed; send it as it is", is_final=True)
    told = headers.get(b"content-length", b"")
    if told.isdigit() and (len(told) > 18 or int(told) > config.max_body_bytes):
        # A client that sends first and reads then would not see the answer on a connection that was closed meanwhile.
        is_final = len(told) > 18 or int(told) > PASSED_OVER * config.max_body_bytes
        raise _too_large(config, is_final=is_final)
    message = await _receive_within(receive, config) if told or b"transfer-encoding" in headers else {}
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
    """The object that the body is."""
    try:
        value = parse_json(body.decode("utf-8"), max_depth)
    except UnicodeDecodeError as error:
        raise Refusal(400, f"the body is no UTF-8: byte {error.start} cannot be read") from None
    except json.JSONDecodeError as error:
        raise Refusal(400, f"the body is no JSON: {error.msg} at character {error.pos}") from None
    except UnicodeEncodeError:
        raise Refusal(400, "the body holds half of a surrogate pair, which is no Unicode") from None
    except ValueError as error:
        raise Refusal(400, f"the body cannot be taken: {_brief(str(error))}") from None
    if not isinstance(value, dict):
        raise Refusal(400, f"the body is {type(value).__name__}, expected an object")
    return value


async def _receive_within(receive: Receive, config: GatewayConfig) -> MutableMapping[str, Any]:
    try:
        async with asyncio.timeout(config.read_timeout_s):
            message = await receive()
    except TimeoutError:
        raise _too_slow(config) from None
    if message["type"] == "http.disconnect":
        raise Gone
    return message


async def _read_on(body: bytearray, receive: Receive, config: GatewayConfig) -> bytes:
    while True:
        if len(body) > config.max_body_bytes:
            raise _too_large(config)
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Gone
        body += message.get("body", b"")
        if not message.get("more_body", False):
            if len(body) > config.max_body_bytes:
                raise _too_large(config)
            return bytes(body)


def _too_large(config: GatewayConfig, *, is_final: bool = True) -> Refusal:
    return Refusal(413, f"the body exceeds {config.max_body_bytes} bytes; send less", is_final=is_final)


def _too_slow(config: GatewayConfig) -> Refusal:
    return Refusal(408, f"the body did not come within {config.read_timeout_s:g} s; send it at once", is_final=True)


def _brief(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:199]}…"
