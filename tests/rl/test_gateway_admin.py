"""What the loop asks of a gateway: few requests, each of which may be repeated."""

import asyncio
import socket
from pathlib import Path

import pytest

from m2forge.errors import EngineError
from m2forge.gateway.config import Budget, GatewayConfig
from m2forge.gateway.episodes.closed_journal import journal_ids
from m2forge.records import Domain, Task
from m2forge.rl.gateway_admin import GatewayAdmin
from tests.gateway.dialogue import minimax
from tests.gateway.episodes.test_retry_http import BODY, post
from tests.gateway.live import ADMIN_KEY, live

TASK = Task("task", Domain.AGENT, "Look.")


def test_an_attempt_is_opened_taken_and_let_go_with_others(tmp_path: Path) -> None:
    names = [f"g0-{index}-1" for index in range(100)]

    with live(minimax(), config=GatewayConfig(port=0, journal=str(tmp_path))) as gateway:

        async def scene() -> None:
            async with GatewayAdmin(gateway.url, ADMIN_KEY) as admin:
                await admin.wait_until_up()
                budget = Budget(max_calls=1)
                made = await asyncio.gather(*(admin.open(name, TASK, "group", budget) for name in names))
                with pytest.raises(EngineError, match=r"refused.*exists"):
                    await admin.open(names[0], TASK, "group", budget)
                status = (await asyncio.to_thread(post, gateway, made[0].key, BODY)).status_code
                assert (status, made[0].url) == (200, gateway.url)
                trees = [await admin.close(name) for name in names[:2]]
                assert [len(tree.samples) for tree in trees] == [1, 0]
                await admin.delete([names[-1], "never there"])
                assert len(journal_ids(tmp_path)) == len(names) - 1
                for name in names[:-1]:
                    admin.delete_soon(name)
            # They are gone when it is closed.
            assert not journal_ids(tmp_path)

        asyncio.run(scene())


def test_a_gateway_that_stays_away_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("m2forge.rl.gateway_admin.RETRY_FOR_S", 0.2)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens

        async def scene() -> None:
            async with GatewayAdmin(f"http://127.0.0.1:{taken.getsockname()[1]}", "key") as admin:
                with pytest.raises(EngineError, match="is not available"):
                    await admin.wait_until_up()

        asyncio.run(scene())
