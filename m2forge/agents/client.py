"""The completion client of the agent loop: messages and tools in, the policy's reply out."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import httpx2

from m2forge.errors import EngineError, FormatError, RequestError
from m2forge.protocols import Endpoint
from m2forge.records import JsonValue
from m2forge.text.message import Message, Tool, message_from_openai, message_to_openai, tool_to_openai

CONNECT_S = 10.0
RETRY_S = 0.25
"""Delay before the first retry; doubled before each further one."""
NUM_ATTEMPTS = 5
_IDLE_S = 2.0
"""How long an idle connection is kept for the next call; servers close theirs after 5 s."""


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
        self._url, self._model = endpoint.url.rstrip("/"), endpoint.model
        options = {"max_tokens": max_tokens, "temperature": temperature}
        self._options: dict[str, JsonValue] = {name: value for name, value in options.items() if value is not None}
        self._http = httpx2.AsyncClient(
            headers={"Authorization": f"Bearer {endpoint.key}"},
            timeout=httpx2.Timeout(None, connect=CONNECT_S),  # The loop has its own timeout.
            limits=httpx2.Limits(max_connections=None, keepalive_expiry=_IDLE_S),
            trust_env=False,
            verify=self._url.startswith("https"),
        )

    async def complete(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Reply:
        body: dict[str, JsonValue] = {
            "model": self._model,
            "messages": [_message_body(message) for message in messages],
        }
        if tools:
            body["tools"] = [tool_to_openai(tool) for tool in tools]
        return _read_reply(await self._post(body | self._options))

    async def close(self) -> None:
        await self._http.aclose()

    async def _post(self, body: dict[str, JsonValue]) -> JsonValue:
        failure = ""
        for attempt in range(NUM_ATTEMPTS):
            if attempt:
                await asyncio.sleep(RETRY_S * 2 ** (attempt - 1))
            try:
                headers = {"x-stainless-retry-count": str(attempt)}
                response = await self._http.post(f"{self._url}/v1/chat/completions", json=body, headers=headers)
            except httpx2.HTTPError as error:
                failure = f"{type(error).__name__}: {error}"
                continue
            if response.status_code < 500:
                return _read_body(response)
            failure = f"status {response.status_code}: {response.text[:500]}"
        raise EngineError(f"{self._url} does not answer after {NUM_ATTEMPTS} attempts; the last: {failure}")


def _message_body(message: Message) -> dict[str, JsonValue]:
    body = message_to_openai(message)
    return body if message.content or not message.tool_calls else body | {"content": None}


def _read_body(response: httpx2.Response) -> JsonValue:
    if response.is_error:
        raise RequestError(f"the policy cannot be asked so: status {response.status_code}: {response.text[:500]}")
    try:
        data: JsonValue = response.json()
    except ValueError as error:
        raise EngineError(f"the server sent what is no JSON: {response.text[:200]!r}") from error
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
        raise EngineError(f"the server's answer cannot be read ({type(error).__name__}: {error})") from error
