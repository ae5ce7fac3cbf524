"""Clients of the gateways' admin routes: create API keys for attempts, fetch and delete their records.

`GatewayAdmin` is the client of one gateway, `Gateways` of all that a run has. Every process of the run finds the
gateway of an episode from its id alone: the sum of the numbers in it, modulo the number of gateways. So attempts of a
group, and groups of one attempt, take turns; and an attempt that is retried, whose id counts retries, goes to another.

A gateway may be killed and restarted at any time; requests sent meanwhile are retried. Attempts are many and the loop
is one process, so an attempt costs three small requests and its share of a batched fourth one.
"""

import asyncio
import json
import logging
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from types import TracebackType
from typing import Any, Self

from m2forge.agents.attempt import Overrides, Recorded
from m2forge.errors import EngineError
from m2forge.gateway.config import Budget
from m2forge.http_client import HttpClient, encode_json
from m2forge.protocols import Endpoint
from m2forge.records import JsonValue, Sampling, Task
from m2forge.tree.codec import decode_tree
from m2forge.tree.token_tree import TokenTree

RETRY_FOR_S = 120.0
"""Seconds for which requests are retried while the gateway does not respond."""
ANSWER_S = 30.0
RETRY_S = 0.1
MAX_AT_ONCE = 32
"""Maximum concurrent requests; more would queue in the gateway instead."""
DELETE_S = 0.2
"""Seconds for which deletions are collected before they are sent in one request."""
LOOP_EPISODE_ID = re.compile(r"g\d+-\d+-\d+|check-.*")
"""Matches the ids of the loop's own episodes at the gateway: attempts of the pool and of evaluations. All other ids
belong to deployed agents."""
OK, CREATED, NOT_FOUND, UNAVAILABLE = 200, 201, 404, 503

_log = logging.getLogger(__name__)


class RefusedError(EngineError):
    """The gateway is up and refused a request."""


class GatewayAdmin:
    """See `Gateway`."""

    def __init__(
        self,
        url: str | Callable[[], str],
        key: str,
        *,
        budget: Budget | None = None,
        sampling: Sampling | None = None,
    ) -> None:
        """`url`: of the gateway, or a function that returns it, if the gateway may move. `budget` and `sampling`: the
        defaults of attempts, which an attempt's overrides replace."""
        self._budget, self._sampling = budget or Budget(), sampling
        self._http = HttpClient(url, key=key)
        self._seats = asyncio.Semaphore(MAX_AT_ONCE)
        self._to_delete: list[str] = []
        self._deleting: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return self._http.url

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._deleting is not None:
            if kind is not None:
                # After an error it does not wait: the next loop deletes what is left when it takes over.
                self._deleting.cancel()
            await asyncio.gather(self._deleting, return_exceptions=True)
        self._http.close()

    async def wait_until_up(self, id: str = "") -> None:
        """Wait until the gateway and the sampler behind it serve. `id`: of any attempt."""
        await self._request("GET", "/health")

    async def open(self, id: str, task: Task, group: str, overrides: Overrides) -> Endpoint:
        """Open an episode and return its endpoint. The gateway sends the key once and refuses an id that exists."""
        body: dict[str, JsonValue] = {"id": id, "task_id": task.id, "group": group, "context": overrides.context}
        body["task"] = asdict(task)
        body["budget"] = self._budget.model_dump(exclude_none=True)
        sampling = overrides.sampling or self._sampling
        if sampling is not None:
            body["sampling"] = asdict(sampling)
        response = await self._request("POST", "/episodes", body, (CREATED,))
        return Endpoint(self.url, json.loads(response)["key"])

    async def show(self, id: str) -> dict[str, Any] | None:
        """The response of `GET /episodes/ID`; None if there is no such episode."""
        response: dict[str, Any] = json.loads(await self._request("GET", f"/episodes/{id}", None, (OK, NOT_FOUND)))
        return response if "id" in response else None

    async def num_failed(self, id: str) -> int:
        """Number of the episode's calls that failed in the engine or the gateway, or were aborted."""
        return int(json.loads(await self._request("GET", f"/episodes/{id}"))["num_failed"])

    async def close(self, id: str) -> Recorded:
        """Close the episode to further calls; returns the recorded calls with their conversations."""
        described = json.loads(await self._request("POST", f"/episodes/{id}/close", {"with_calls": True}))
        return Recorded(await self.take(id), tuple(described["messages"]), tuple(described["calls"]))

    async def take(self, id: str) -> TokenTree:
        """Close the episode to further calls; returns the recorded calls as tokens alone."""
        # Long episodes take long to decode, so this runs off the event loop.
        return await asyncio.to_thread(decode_tree, await self._request("POST", f"/episodes/{id}/take", {}))

    async def delete(self, ids: Iterable[str]) -> None:
        """Delete episodes, whose keys the gateway then refuses; ids that do not exist are ignored."""
        await self._request("DELETE", "/episodes", {"ids": list(ids)})

    def delete_soon(self, id: str) -> None:
        """Delete a closed episode in the background, batched with others."""
        self._to_delete.append(id)
        if self._deleting is None:
            self._deleting = asyncio.create_task(self._delete_all())

    async def _delete_all(self) -> None:
        try:
            while self._to_delete:
                await asyncio.sleep(DELETE_S)
                ids, self._to_delete = self._to_delete, []
                await self.delete(ids)
        except EngineError as error:
            _log.warning("%d episodes were not deleted from the gateway: %s", len(ids), error)
        finally:
            self._deleting = None

    async def _request(
        self, method: str, path: str, body: dict[str, JsonValue] | None = None, allowed: tuple[int, ...] = (OK,)
    ) -> bytes:
        data = b"" if body is None else encode_json(body)
        until_s = time.monotonic() + RETRY_FOR_S
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
                if response.status != UNAVAILABLE:
                    raise RefusedError(f"{method} {path}: the gateway refused: {problem}")
            if time.monotonic() > until_s:
                raise EngineError(f"{method} {path}: the gateway at {self.url} is not available: {problem}")
            await asyncio.sleep(RETRY_S)


def home_of(id: str, num_gateways: int) -> int:
    """Index of the gateway that has the episode of this id."""
    return sum(int(digits) for digits in re.findall(r"\d+", id)) % num_gateways


class Gateways:
    """See `Gateway`."""

    def __init__(self, admins: Sequence[GatewayAdmin]) -> None:
        """`admins`: of each gateway, in the order of their indices."""
        self.admins = tuple(admins)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for admin in self.admins:
            await admin.__aexit__(kind, error, trace)

    def _of(self, id: str) -> GatewayAdmin:
        return self.admins[home_of(id, len(self.admins))]

    async def wait_until_up(self, id: str) -> None:
        await self._of(id).wait_until_up()

    async def open(self, id: str, task: Task, group: str, overrides: Overrides) -> Endpoint:
        return await self._of(id).open(id, task, group, overrides)

    async def num_failed(self, id: str) -> int:
        return await self._of(id).num_failed(id)

    async def close(self, id: str) -> Recorded:
        return await self._of(id).close(id)

    async def delete(self, ids: Iterable[str]) -> None:
        parts: dict[GatewayAdmin, list[str]] = {}
        for id in ids:
            parts.setdefault(self._of(id), []).append(id)
        await asyncio.gather(*(admin.delete(part) for admin, part in parts.items()))

    def delete_soon(self, id: str) -> None:
        self._of(id).delete_soon(id)


def _reason(status: int, content: bytes) -> str:
    try:
        response: Any = json.loads(content)
        return str(response["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"status {status}"
