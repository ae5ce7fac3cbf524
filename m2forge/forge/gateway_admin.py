"""The gateway's admin routes, for the loop: keys made for attempts, and what they recorded fetched and let go.

The gateway may be killed and started again at any time; what was asked meanwhile is asked again, so every request here
may be repeated. Attempts are many and the loop is one process, so an attempt costs two small requests and its part of a
third one.
"""

import asyncio
import json
import logging
import time
from collections.abc import Iterable
from dataclasses import asdict
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from m2forge.errors import EngineError
from m2forge.gateway.config import Budget, SamplingConfig
from m2forge.protocols import Endpoint
from m2forge.records import JsonValue, Task
from m2forge.rollout.streaming import Connections
from m2forge.tree.codec import decode_tree
from m2forge.tree.token_tree import TokenTree

PATIENCE_S = 120.0
"""How long a gateway may be away before the loop gives up."""
ANSWER_S = 30.0
RETRY_S = 0.1
IDLE_S = 2.0
"""How long a connection is kept for the next request; the gateway closes its own after 5 s."""
MAX_AT_ONCE = 32
"""Requests under way: more would wait in the gateway instead."""
FORGET_S = 0.2
"""What is to be forgotten is collected for so long."""
OK, CREATED, NOT_FOUND, AWAY = 200, 201, 404, 503

_log = logging.getLogger(__name__)


class RefusedError(EngineError):
    """The gateway serves, and refused a request."""


class GatewayAdmin:
    def __init__(self, url: str, key: str) -> None:
        self.url = url
        place = urlsplit(url)
        self._connections = Connections(place.hostname or "", place.port or 80, is_secure=False, idle_s=IDLE_S)
        lines = f"Host: {place.netloc}\r\nAuthorization: Bearer {key}\r\nContent-Type: application/json\r\n"
        self._headers = f"{lines}Content-Length: "
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
                # Who is interrupted does not wait: what is left is forgotten when the next loop takes over.
                self._forgetting.cancel()
            await asyncio.gather(self._forgetting, return_exceptions=True)
        self._connections.close()

    async def wait_until_up(self) -> None:
        """Until it serves, and the sampler behind it."""
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
        """An episode's key, told once: one that exists already was opened by a loop that died, and is of no use."""
        body: dict[str, JsonValue] = {"id": id, "task_id": task.id, "group": group, "context": context}
        body["task"] = asdict(task)
        body["budget"] = budget.model_dump(exclude_none=True)
        if sampling is not None:
            body["sampling"] = sampling.model_dump()
        told = await self._ask("POST", "/episodes", body, (CREATED,))
        return Endpoint(self.url, json.loads(told)["key"])

    async def show(self, id: str) -> dict[str, Any] | None:
        """What `GET /episodes/ID` says; None where there is no such episode."""
        told: dict[str, Any] = json.loads(await self._ask("GET", f"/episodes/{id}", None, (OK, NOT_FOUND)))
        return told if "id" in told else None

    async def num_failed(self, id: str) -> int:
        """Calls of the episode that the engine or the gateway failed, or that were aborted."""
        return int(json.loads(await self._ask("GET", f"/episodes/{id}"))["num_failed"])

    async def close(self, id: str) -> TokenTree:
        """No more calls; what was recorded."""
        # Long episodes take long to decode; the event loop serves other attempts meanwhile.
        return await asyncio.to_thread(decode_tree, await self._ask("POST", f"/episodes/{id}/take", {}))

    async def forget(self, ids: Iterable[str]) -> None:
        """What was recorded is stored elsewhere, or of no use; keys are refused from now on. Those that are not there
        are forgotten already."""
        await self._ask("DELETE", "/episodes", {"ids": list(ids)})

    def forget_soon(self, id: str) -> None:
        """The same, together with others and without waiting for it; for what is closed."""
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
        data = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\n{self._headers}{len(data)}\r\n\r\n".encode()
        until_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                status, content = await self._send(head, data)
            except OSError as error:
                problem = str(error) or type(error).__name__
            else:
                if status in allowed:
                    return content
                problem = _reason(status, content)
                if status != AWAY:
                    raise RefusedError(f"{method} {path}: the gateway refused: {problem}")
            if time.monotonic() > until_s:
                raise EngineError(f"{method} {path}: the gateway at {self.url} does not serve: {problem}")
            await asyncio.sleep(RETRY_S)

    async def _send(self, head: bytes, body: bytes) -> tuple[int, bytes]:
        async with self._seats, asyncio.timeout(ANSWER_S):
            answer = await self._connections.take()
            try:
                answer.ask(head, body)
                return await answer.begin(), await answer.read_all()
            finally:
                self._connections.give_back(answer)


def _reason(status: int, content: bytes) -> str:
    try:
        told: Any = json.loads(content)
        return str(told["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"status {status}"
