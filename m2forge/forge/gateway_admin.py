"""The gateway's admin routes, for the loop: keys made for attempts, and what they recorded fetched and let go.

The gateway may be killed and started again at any time; what was asked meanwhile is asked again, so every request here
may be repeated.
"""

import asyncio
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import httpx2

from m2forge.errors import EngineError
from m2forge.gateway.config import Budget
from m2forge.protocols import Endpoint
from m2forge.records import JsonValue
from m2forge.tree.codec import decode_tree
from m2forge.tree.token_tree import TokenTree

PATIENCE_S = 120.0
"""How long a gateway may be away before the loop gives up."""
RETRY_S = 0.1
OK, CREATED, NOT_FOUND, AWAY = 200, 201, 404, 503


class GatewayAdmin:
    def __init__(self, url: str, key: str) -> None:
        self.url = url
        self._http = httpx2.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {key}"},
            timeout=30.0,
            limits=httpx2.Limits(max_connections=64, keepalive_expiry=2.0),
            trust_env=False,
            verify=False,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def wait_until_up(self) -> None:
        """Until it serves, and the sampler behind it."""
        await self._ask("GET", "/health")

    async def open(self, id: str, task_id: str, group: str, budget: Budget) -> Endpoint:
        """An episode's key, told once: one that exists already was opened by a loop that died, and is of no use."""
        spends = budget.model_dump(exclude_none=True)
        told = await self._ask(
            "POST", "/episodes", {"id": id, "task_id": task_id, "group": group, "budget": spends}, (CREATED,)
        )
        return Endpoint(self.url, told.json()["key"])

    async def close(self, id: str) -> TokenTree:
        """No more calls; what was recorded."""
        await self._ask("POST", f"/episodes/{id}/close", {})
        return decode_tree((await self._ask("GET", f"/episodes/{id}/tree")).content)

    async def forget(self, id: str) -> None:
        """What was recorded is stored elsewhere. One that is not there is forgotten already."""
        await self._ask("DELETE", f"/episodes/{id}", allowed=(OK, NOT_FOUND))

    async def _ask(
        self, method: str, path: str, body: Mapping[str, JsonValue] | None = None, allowed: tuple[int, ...] = (OK,)
    ) -> httpx2.Response:
        until_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                response = await self._http.request(method, path, json=body)
            except httpx2.TransportError as error:
                problem = str(error) or type(error).__name__
            else:
                if response.status_code in allowed:
                    return response
                problem = _reason(response)
                if response.status_code != AWAY:
                    raise EngineError(f"{method} {path}: the gateway refused: {problem}")
            if time.monotonic() > until_s:
                raise EngineError(f"{method} {path}: the gateway at {self.url} does not serve: {problem}")
            await asyncio.sleep(RETRY_S)


def _reason(response: httpx2.Response) -> str:
    try:
        told: Any = response.json()
        return str(told["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"status {response.status_code}"
