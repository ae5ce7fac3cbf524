"""The loop's client of the gateway's admin routes: creates API keys for attempts, fetches and deletes their records.

The gateway may be killed and restarted at any time; requests sent meanwhile are retried. Attempts are many and the loop
is one process, so an attempt costs two small requests and its share of a batched third one.
"""

import asyncio
import json
import logging
import time
from collections.abc import Iterable
from dataclasses import asdict
from types import TracebackType
from typing import Any, Self

from m2forge.errors import EngineError
from m2forge.gateway.config import Budget, SamplingConfig
from m2forge.http_client import HttpClient, encode_json
from m2forge.protocols import Endpoint
from m2forge.records import JsonValue, Task
from m2forge.tree.codec import decode_tree
from m2forge.tree.token_tree import TokenTree

PATIENCE_S = 120.0
"""How long requests are retried while the gateway does not respond."""
ANSWER_S = 30.0
RETRY_S = 0.1
MAX_AT_ONCE = 32
"""Maximum concurrent requests; more would queue in the gateway instead."""
FORGET_S = 0.2
"""How long deletions are collected before they are sent in one request."""
OK, CREATED, NOT_FOUND, AWAY = 200, 201, 404, 503

_log = logging.getLogger(__name__)


class RefusedError(EngineError):
    """The gateway is up and refused a request."""


class GatewayAdmin:
    def __init__(self, url: str, key: str) -> None:
        self.url = url
        self._http = HttpClient(url, key=key)
        self._seats = asyncio.Semaphore(MAX_AT_ONCE)
        self._forgotten: list[str] = []
        self._forgetting: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._forgetting is not None:
            if kind is not None:
                # After an error it does not wait: the next loop deletes what is left when it takes over.
                self._forgetting.cancel()
            await asyncio.gather(self._forgetting, return_exceptions=True)
        self._http.close()

    async def wait_until_up(self) -> None:
        """Wait until the gateway and the sampler behind it serve."""
        await self._ask("GET", "/health")

    async def open(
        self,
        id: str,
        task: Task,
        group: str,
        budget: Budget,
        sampling: SamplingConfig | None = None,
        context: int | None = None,
    ) -> Endpoint:
        """Open an episode and return its endpoint. The gateway sends the key once and refuses an id that exists."""
        body: dict[str, JsonValue] = {"id": id, "task_id": task.id, "group": group, "context": context}
        body["task"] = asdict(task)
        body["budget"] = budget.model_dump(exclude_none=True)
        if sampling is not None:
            body["sampling"] = sampling.model_dump()
        response = await self._ask("POST", "/episodes", body, (CREATED,))
        return Endpoint(self.url, json.loads(response)["key"])

    async def show(self, id: str) -> dict[str, Any] | None:
        """The response of `GET /episodes/ID`; None if there is no such episode."""
        response: dict[str, Any] = json.loads(await self._ask("GET", f"/episodes/{id}", None, (OK, NOT_FOUND)))
        return response if "id" in response else None

    async def num_failed(self, id: str) -> int:
        """Number of the episode's calls that failed in the engine or the gateway, or were aborted."""
        return int(json.loads(await self._ask("GET", f"/episodes/{id}"))["num_failed"])

    async def close(self, id: str) -> TokenTree:
        """Close the episode to further calls; returns the recorded calls."""
        # Long episodes take long to decode, so this runs off the event loop.
        return await asyncio.to_thread(decode_tree, await self._ask("POST", f"/episodes/{id}/take", {}))

    async def forget(self, ids: Iterable[str]) -> None:
        """Delete episodes, whose keys the gateway then refuses; ids that do not exist are ignored."""
        await self._ask("DELETE", "/episodes", {"ids": list(ids)})

    def forget_soon(self, id: str) -> None:
        """Delete a closed episode in the background, batched with others."""
        self._forgotten.append(id)
        if self._forgetting is None:
            self._forgetting = asyncio.create_task(self._forget_all())

    async def _forget_all(self) -> None:
        try:
            while self._forgotten:
                await asyncio.sleep(FORGET_S)
                ids, self._forgotten = self._forgotten, []
                await self.forget(ids)
        except EngineError as error:
            _log.warning("%d episodes stay with the gateway: %s", len(ids), error)
        finally:
            self._forgetting = None

    async def _ask(
        self, method: str, path: str, body: dict[str, JsonValue] | None = None, allowed: tuple[int, ...] = (OK,)
    ) -> bytes:
        data = b"" if body is None else encode_json(body)
        until_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                async with self._seats:
                    response = await self._http.request(method, path, data, timeout_s=ANSWER_S)
            except OSError as error:
                problem = str(error) or type(error).__name__
            else:
                if response.status in allowed:
                    return response.content
                problem = _reason(response.status, response.content)
                if response.status != AWAY:
                    raise RefusedError(f"{method} {path}: the gateway refused: {problem}")
            if time.monotonic() > until_s:
                raise EngineError(f"{method} {path}: the gateway at {self.url} does not serve: {problem}")
            await asyncio.sleep(RETRY_S)


def _reason(status: int, content: bytes) -> str:
    try:
        response: Any = json.loads(content)
        return str(response["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"status {status}"
