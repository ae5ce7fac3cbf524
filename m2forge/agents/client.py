"""The completion client of the agent loop: messages and tools in, the policy's reply out."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from m2forge.errors import EngineError, FormatError, RequestError
from m2forge.http_client import HttpClient, Response, encode_json
from m2forge.protocols import Endpoint
from m2forge.records import JsonValue
from m2forge.text.message import Message, Tool, message_from_openai, message_to_openai, tool_to_openai

RETRY_S = 0.25
"""Delay before the first retry; doubled before each further one."""
NUM_ATTEMPTS = 5


@dataclass(frozen=True, slots=True)
class Reply:
    id: str
    """The server's id of this completion."""
    message: Message
    is_cut: bool
    """Whether the finish reason is "length"."""
    num_prompt: int
    """Number of prompt tokens."""
    num_sampled: int


class CompletionClient(Protocol):
    async def complete(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Reply:
        """Raises RequestError if the request is refused, also for a spent budget; EngineError if no server responds."""
        ...


class ChatClient:
    """Client of OpenAI's chat completions API, as a gateway serves it.

    Failed requests are retried with a header that marks the retry, so that the gateway does not sample twice.
    """

    def __init__(self, endpoint: Endpoint, *, max_tokens: int | None = None, temperature: float | None = None) -> None:
        self._http, self._model = HttpClient(endpoint.url, key=endpoint.key), endpoint.model
        options = {"max_tokens": max_tokens, "temperature": temperature}
        self._options: dict[str, JsonValue] = {name: value for name, value in options.items() if value is not None}

    async def complete(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Reply:
        body: dict[str, JsonValue] = {
            "model": self._model,
            "messages": [_message_body(message) for message in messages],
        }
        if tools:
            body["tools"] = [tool_to_openai(tool) for tool in tools]
        return _read_reply(await self._post(body | self._options))

    async def close(self) -> None:
        self._http.close()

    async def _post(self, body: dict[str, JsonValue]) -> JsonValue:
        """Has no timeout: a request may queue for long, and the loop has a timeout of its own."""
        data, failure = encode_json(body), ""
        for attempt in range(NUM_ATTEMPTS):
            if attempt:
                await asyncio.sleep(RETRY_S * 2 ** (attempt - 1))
            try:
                headers = {"x-stainless-retry-count": str(attempt)}
                response = await self._http.request("POST", "/v1/chat/completions", data, headers=headers)
            except OSError as error:
                failure = f"{type(error).__name__}: {error}"
                continue
            if response.status < 500:
                return _read_body(response)
            failure = f"status {response.status}: {response.text[:500]}"
        raise EngineError(f"{self._http.url} did not respond in {NUM_ATTEMPTS} attempts; the last: {failure}")


def _message_body(message: Message) -> dict[str, JsonValue]:
    body = message_to_openai(message)
    return body if message.content or not message.tool_calls else body | {"content": None}


def _read_body(response: Response) -> JsonValue:
    if response.status >= 400:
        raise RequestError(f"the server refused the request: status {response.status}: {response.text[:500]}")
    try:
        data: JsonValue = json.loads(response.content)
    except ValueError as error:
        raise EngineError(f"expected JSON from the server, received {response.text[:200]!r}") from error
    return data


def _read_reply(data: JsonValue) -> Reply:
    try:
        assert isinstance(data, dict)
        choice, usage = data["choices"][0], data["usage"]
        return Reply(
            id=str(data["id"]),
            message=message_from_openai(choice["message"]),
            is_cut=choice["finish_reason"] == "length",
            num_prompt=int(usage["prompt_tokens"]),
            num_sampled=int(usage["completion_tokens"]),
        )
    except (AssertionError, KeyError, IndexError, TypeError, ValueError, FormatError) as error:
        raise EngineError(
            f"the server's response is not a chat completion ({type(error).__name__}: {error})"
        ) from error
