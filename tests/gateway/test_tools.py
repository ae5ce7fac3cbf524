"""The tools of an episode's task: served under its key alone, bounded, and there again after a restart."""

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest

from m2forge.gateway.config import Budget, GatewayConfig
from m2forge.records import Domain, JsonValue, Task
from tests.gateway.dialogue import minimax
from tests.gateway.live import Live, live

TASK = Task("t", Domain.AGENT, "Look.", 1.0, {"family": "none", "secret": 123456789})
CALL = {"name": "look", "arguments": {"key": "3G"}}
TOGETHER = 4


class Host:
    """Answers with what it was asked; calls of `together` when `TOGETHER` of them have begun."""

    def __init__(self) -> None:
        self._all = asyncio.Barrier(TOGETHER)

    async def tools(self, task: Task) -> Sequence[Mapping[str, JsonValue]]:
        return [{"type": "function", "function": {"name": "look", "parameters": {}}}]

    async def call(self, task: Task, name: str, arguments: JsonValue) -> str:
        if name == "together":
            await self._all.wait()
        return f"{name} {arguments} {task == TASK}"


def call(gateway: Live, key: str, body: object, path: str = "/call") -> tuple[int, JsonValue]:
    headers = {"Authorization": f"Bearer {key}"}
    response = httpx2.post(f"{gateway.url}/v1/tools{path}", json=body, headers=headers, timeout=60)
    return response.status_code, response.json()


def open_episode(gateway: Live, task: Task | None = TASK, budget: Budget | None = None) -> str:
    return gateway.run(lambda: gateway.episodes.create("t", task=task, budget=budget))[1]


@pytest.mark.slow
def test_an_episode_s_tools_are_listed_and_called_under_its_key() -> None:
    with live(minimax(), tool_host=Host()) as gateway:
        key = open_episode(gateway)
        listed = httpx2.get(f"{gateway.url}/v1/tools", headers={"x-api-key": key})
        assert listed.json()["tools"][0]["function"]["name"] == "look"
        assert call(gateway, key, CALL) == (200, {"content": "look {'key': '3G'} True"})
        assert call(gateway, key, {"name": "look", "arguments": None})[1] == {"content": "look None True"}
        # The calls of one turn run at once: each ends when all have begun.
        with ThreadPoolExecutor(TOGETHER) as threads:
            found = threads.map(lambda n: call(gateway, key, {"name": "together", "arguments": n}), range(TOGETHER))
            assert [status for status, _ in found] == [200] * TOGETHER
        assert gateway.episodes.find(key).num_calls == 0  # type: ignore[union-attr]  # it is there


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"arguments": {}}, 400),
        ({"name": "look", "arguments": {}, "task": 1}, 400),
        ({"name": 3, "arguments": {}}, 400),
        ([1], 400),
        ({"name": "look", "arguments": "x" * 2000}, 413),
    ],
)
def test_a_call_that_is_no_call_is_refused(body: object, status: int) -> None:
    with live(minimax(), config=GatewayConfig(port=0, max_tool_bytes=1000), tool_host=Host()) as gateway:
        assert call(gateway, open_episode(gateway), body)[0] == status


def test_calls_without_key_task_or_host_are_refused() -> None:
    with live(minimax(), config=GatewayConfig(port=0, max_tool_calls=2), tool_host=Host()) as gateway:
        assert call(gateway, "m2f-wrong", CALL)[0] == 401
        assert call(gateway, open_episode(gateway, task=None), CALL)[0] == 404
        key = open_episode(gateway)
        assert [call(gateway, key, CALL)[0] for _ in range(3)] == [200, 200, 429]
        assert call(gateway, open_episode(gateway, budget=Budget(max_s=1e-6)), CALL)[0] == 429
        closed = open_episode(gateway)
        gateway.run(lambda: gateway.episodes.find(closed).close())  # type: ignore[union-attr]  # it is there
        assert call(gateway, closed, CALL)[0] == 403
    with live(minimax()) as gateway:
        assert call(gateway, open_episode(gateway), CALL)[0] == 404


def test_a_restarted_gateway_serves_the_tools_of_open_episodes(tmp_path: Path) -> None:
    config = GatewayConfig(port=0, journal=str(tmp_path))
    with live(minimax(), config=config, tool_host=Host()) as gateway:
        key = open_episode(gateway)
    with live(minimax(), config=config, tool_host=Host()) as gateway:
        assert call(gateway, key, CALL) == (200, {"content": "look {'key': '3G'} True"})
