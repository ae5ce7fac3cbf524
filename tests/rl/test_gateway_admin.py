"""What the loop asks of a gateway: few requests, each of which may be repeated."""

import asyncio
import socket
from pathlib import Path

import pytest

from m2forge.agents.attempt import Overrides, Recorded
from m2forge.errors import EngineError
from m2forge.gateway.config import Budget, GatewayConfig
from m2forge.gateway.episodes.closed_journal import journal_ids
from m2forge.gateway.episodes.registry import Episodes
from m2forge.records import Domain, Task
from m2forge.rl.gateway_admin import GatewayAdmin
from tests.gateway.dialogue import minimax
from tests.gateway.episodes.test_closed_journal import compact_all
from tests.gateway.episodes.test_retry_http import BODY, post
from tests.gateway.live import ADMIN_KEY, live

TASK = Task("task", Domain.AGENT, "Look.")


@pytest.mark.slow
def test_an_attempt_is_opened_taken_and_let_go_with_others(tmp_path: Path) -> None:
    names = [f"g0-{index}-1" for index in range(100)]

    with live(minimax(), config=GatewayConfig(port=0, journal=str(tmp_path))) as gateway:

        async def scene() -> None:
            async with GatewayAdmin(gateway.url, ADMIN_KEY, budget=Budget(max_calls=1)) as admin:
                await admin.wait_until_up()
                made = await asyncio.gather(*(admin.open(name, TASK, "group", Overrides()) for name in names))
                with pytest.raises(EngineError, match=r"refused.*exists"):
                    await admin.open(names[0], TASK, "group", Overrides())
                status = (await asyncio.to_thread(post, gateway, made[0].key, BODY)).status_code
                assert (status, made[0].url) == (200, gateway.url)
                closed = [await admin.close(name) for name in names[:2]]
                assert [len(recorded.tree.samples) for recorded in closed] == [1, 0]
                assert [len(recorded.steps) for recorded in closed] == [1, 0]
                assert [message["role"] for message in closed[0].messages] == ["user", "assistant"]
                assert (await admin.take(names[0])).samples == closed[0].tree.samples
                await admin.delete([names[-1], "never there"])
                assert len(journal_ids(tmp_path)) == len(names) - 1
                for name in names[:-1]:
                    admin.delete_soon(name)
            # They are gone when it is closed.
            assert not journal_ids(tmp_path)

        asyncio.run(scene())


def test_a_close_without_its_messages_is_an_infra_error(tmp_path: Path) -> None:
    """The gateway compacts a closed journal and is killed before the answer arrives: the verifier would see nothing."""

    async def close(url: str) -> Recorded:
        async with GatewayAdmin(url, ADMIN_KEY) as admin:
            return await admin.close("g0-0-1")

    config = GatewayConfig(port=0, journal=str(tmp_path))
    with live(minimax(), config=config) as gateway:
        _, key = gateway.run(lambda: gateway.episodes.create("task", id="g0-0-1"))
        assert post(gateway, key, BODY).status_code == 200
        assert asyncio.run(close(gateway.url)).messages
    compact_all(Episodes(minimax(), folder=tmp_path))
    with live(minimax(), config=config) as gateway, pytest.raises(EngineError, match="messages of episode g0-0-1"):
        asyncio.run(close(gateway.url))


def test_a_gateway_that_stays_away_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("m2forge.rl.gateway_admin.RETRY_FOR_S", 0.2)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens

        async def scene() -> None:
            async with GatewayAdmin(f"http://127.0.0.1:{taken.getsockname()[1]}", "key") as admin:
                with pytest.raises(EngineError, match="is not available"):
                    await admin.wait_until_up()

        asyncio.run(scene())
