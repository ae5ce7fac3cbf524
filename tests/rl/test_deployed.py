"""Deployed agents' episodes: opened and rewarded by an operator, stored in the pool once, and trained."""

import asyncio
import json
import signal
import stat
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
from sqlalchemy import select

from m2forge.gateway.config import GatewayConfig
from m2forge.model.config_file import read_config
from m2forge.pool.lifecycle import Origin, UnitState
from m2forge.pool.pool import Pool, PoolWriter
from m2forge.pool.stored import StoredEpisode, StoredUnit, read_roles, read_units
from m2forge.pool.tables import unit_table
from m2forge.records import Domain, JsonValue, Task
from m2forge.reward.config import AdvantageConfig
from m2forge.rl.config import RLConfig
from m2forge.rl.deployed import DeployedEpisodes
from m2forge.rl.gateway_admin import GatewayAdmin
from m2forge.rl.layout import Layout
from m2forge.rl.trainer import make_trees
from tests.gateway.dialogue import minimax
from tests.gateway.live import ADMIN_KEY, live
from tests.rl.ring import AGENT, command_of, started
from tests.rl.scene import make_config, make_model

TASK = Task("mail-7", Domain.AGENT, "Answer the mail.")
QUESTION: dict[str, JsonValue] = {
    "model": "any",
    "messages": [{"role": "user", "content": "Answer the mail."}],
    "max_tokens": 8,
}
DEADLINE_S = 500.0


class Operator:
    """Opens, closes and rewards episodes by the admin's routes, and makes the calls of their agents."""

    def __init__(self, url: str, key: str) -> None:
        self._http = httpx2.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=60.0)

    def close(self) -> None:
        self._http.close()

    def post(self, path: str, body: dict[str, JsonValue], key: str | None = None) -> dict[str, JsonValue]:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        answer = self._http.post(path, json=body, headers=headers)
        assert answer.is_success, answer.text
        response: dict[str, JsonValue] = answer.json()
        return response

    def play(
        self,
        id: str,
        reward: float | None,
        group: str = "mail",
        task: Task = TASK,
        temperature: float = 1.0,
        asks: Sequence[dict[str, JsonValue]] = (QUESTION,),
    ) -> None:
        """An episode of one call, or of one per body of `asks`, from its opening to its reward."""
        body: dict[str, JsonValue] = {"id": id, "group": group, "task": asdict(task), "budget": {"max_calls": 4}}
        key = str(self.post("/episodes", body)["key"])
        for question in asks:
            self.post("/v1/chat/completions", question | {"temperature": temperature}, key)
        self.post(f"/episodes/{id}/close", {})
        if reward is not None:
            self.reward(id, reward)

    def reward(self, episode: str, value: float, **fields: JsonValue) -> None:
        self.post(f"/episodes/{episode}/reward", {"value": value, **fields})

    def wait_until_up(self) -> None:
        until_s = time.monotonic() + DEADLINE_S
        while self._http.get("/health").status_code != 200:
            assert time.monotonic() < until_s
            time.sleep(0.05)


def stored(pool: Pool, *where: object) -> list[StoredEpisode]:
    """The deployed agents' episodes of the pool."""
    return [episode for unit in units_of(pool, *where) for episode in unit.episodes]


def units_of(pool: Pool, *where: object) -> list[StoredUnit]:
    unit = unit_table.c
    with pool.database.read() as connection:
        query = select(unit.id).where(unit.origin == Origin.DEPLOYED, *where)  # type: ignore[arg-type]
        ids = list(connection.execute(query).scalars())
        return list(read_units(connection, ids, pool.vocab_size))


def test_a_run_trains_what_an_operator_has_rewarded(tmp_path: Path) -> None:
    model = make_model(tmp_path / "scene")
    config = make_config(
        model,
        num_steps=1000,
        agent={
            "command": [sys.executable, str(AGENT)],
            "timeout_s": 60.0,
            "budget": {"max_calls": 1, "max_tokens": 8},
            "sandbox": {"inherits": ["PATH"], "timeout_s": 1000.0},
        },
        pool={"admit_deployed": True, "window": {"queue": 4, "no_signal": "train"}},
        # Operators get the address of the first.
        cluster={"gateways": 2},
    )
    layout, until_s = Layout(tmp_path / "run"), time.monotonic() + DEADLINE_S
    with started(command_of(config, tmp_path), tmp_path / "log") as loop:
        while not layout.gateway.exists():
            assert loop.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < until_s
            time.sleep(0.05)
        assert stat.S_IMODE(layout.gateway.stat().st_mode) == 0o600
        with closing(Operator(**json.loads(layout.gateway.read_text()))) as operator:
            operator.wait_until_up()
            operator.play("mail-a", 1.0)
            operator.play("mail-b", None)
            with pytest.raises(AssertionError, match="a number from -1 to 1"):
                operator.reward("mail-b", 7.0)
            operator.reward("mail-b", 0.25)
        with Pool(layout.pool(config.pool), read_config(model).vocab_size) as pool:
            while not (trained := stored(pool, unit_table.c.state == UnitState.TRAINED)):
                assert loop.poll() is None, (tmp_path / "log").read_text()
                assert time.monotonic() < until_s
                time.sleep(0.05)
            assert [episode.name.split(".")[1] for episode in trained] == ["mail-a", "mail-b"]
            assert [episode.reward.total for episode in trained if episode.reward is not None] == [1.0, 0.25]
            assert all(episode.task == TASK and len(episode.calls) == 1 for episode in trained)
            with pool.database.read() as connection:
                query = select(unit_table.c.stage).where(unit_table.c.origin == Origin.DEPLOYED)
                assert connection.execute(query).scalars().all() == ["only"], "the slot of a task of its domain"
        left = [path.name for path in layout.journal.rglob("mail-*")]
        loop.send_signal(signal.SIGTERM)
        loop.wait(60)
    assert not left, "what the pool has is let go"
    assert not layout.gateway.exists(), "the key opens nothing any more"


Look = Callable[[], int]


def looking(folder: Path, scene: Callable[[Operator, Pool, Look], None], **fields: object) -> None:
    """Run `scene` beside a gateway; it has the loop look at what was closed, each time as a loop that starts again."""
    format = minimax()
    gateway_config = GatewayConfig(port=0, journal=str(folder / "journal"))
    config = make_config(folder, **{"pool": {"admit_deployed": True}} | fields)
    pool_config = Layout(folder).pool(config.pool)
    with live(format, config=gateway_config) as gateway, Pool(pool_config, format.tokenizer.vocab_size) as pool:

        def poll() -> int:
            return asyncio.run(look_once(config, folder / "journal", gateway.url, pool))

        with closing(Operator(gateway.url, ADMIN_KEY)) as operator:
            scene(operator, pool, poll)


async def look_once(config: RLConfig, journal: Path, url: str, pool: Pool) -> int:
    async with GatewayAdmin(url, ADMIN_KEY) as admin, PoolWriter(pool) as writer:
        return await DeployedEpisodes(config, journal, admin, pool, writer).poll()


def ids_of(pool: Pool) -> list[str]:
    return [episode.name.split(".")[1] for episode in stored(pool)]


@pytest.mark.parametrize("moment", ["before it stores", "before it deletes", "while it deletes"])
def test_a_loop_that_dies_stores_each_episode_exactly_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    delete = GatewayAdmin.delete

    async def die(admin: GatewayAdmin, ids: list[str]) -> None:
        if moment == "while it deletes":
            await delete(admin, ids[:1])
        raise ArithmeticError("dead")

    def die_at_once(*given: object) -> None:
        raise ArithmeticError("dead")

    def scene(operator: Operator, pool: Pool, poll: Look) -> None:
        operator.play("a", 1.0)
        operator.play("b", None)
        operator.play("c", 0.0)
        with monkeypatch.context() as patch, pytest.raises(ArithmeticError):
            if moment == "before it stores":
                patch.setattr(Pool, "add_deployed", die_at_once)
            else:
                patch.setattr(GatewayAdmin, "delete", die)
            poll()
        if moment != "before it stores":
            # Rewarded late, it must not take the place of one that is stored: it waits for another.
            operator.reward("b", 0.5)
            assert (poll(), ids_of(pool)) == (0, ["a", "c"])
            operator.play("d", 0.75)
            assert (poll(), ids_of(pool)) == (1, ["a", "c", "b", "d"])
        else:
            assert (poll(), ids_of(pool)) == (1, ["a", "c"])
            operator.reward("b", 0.5)
        left = sorted(path.name.partition("~")[0] for path in (tmp_path / "journal" / "closed").iterdir())
        assert left == (["b"] if moment == "before it stores" else [])
        assert poll() == 0
        # An id that is free again is another episode.
        operator.play("a", 1.0, group="again")
        operator.play("c", 0.0, group="again")
        assert poll() == 1
        assert ids_of(pool).count("a") == 2

    looking(tmp_path, scene)


def test_the_gateways_copies_are_deleted_once_the_pool_is_safe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_left = list[tuple[int, int]]()
    flush = Pool.flush

    def note(pool: Pool) -> None:
        flush(pool)
        num_left.append((len(list((tmp_path / "journal" / "closed").iterdir())), len(stored(pool))))

    def scene(operator: Operator, pool: Pool, poll: Look) -> None:
        operator.play("a", 1.0)
        operator.play("b", 0.0)
        assert poll() == 1
        assert num_left == [(2, 2)]
        assert not list((tmp_path / "journal" / "closed").iterdir())

    monkeypatch.setattr(Pool, "flush", note)
    looking(tmp_path, scene)


def test_rewards_of_calls_are_credited_to_them(tmp_path: Path) -> None:
    def scene(operator: Operator, pool: Pool, poll: Look) -> None:
        operator.play("a", 1.0)
        operator.play("b", None)
        operator.reward("b", 0.5, call=0)
        assert poll() == 0, "it has no reward for the whole yet"
        operator.reward("b", -0.25)
        operator.reward("b", 0.125, id="second thought")
        assert poll() == 1
        first, second = stored(pool)
        assert first.step_rewards == (1.0,)
        assert second.step_rewards == (0.375,)
        assert second.reward is not None
        assert (second.reward.perf, second.reward.total) == (-0.125, 0.375)

    looking(tmp_path, scene)


def test_side_calls_of_deployed_agents_are_not_trained(tmp_path: Path) -> None:
    tool: JsonValue = {"type": "function", "function": {"name": "send", "parameters": {"type": "object"}}}
    title: dict[str, JsonValue] = QUESTION | {"messages": [{"role": "user", "content": "A title for it."}]}

    def scene(operator: Operator, pool: Pool, poll: Look) -> None:
        for id, reward in (("a", 1.0), ("b", 0.0)):
            operator.play(id, reward, asks=[QUESTION | {"tools": [tool]}, title])
        assert poll() == 1
        assert [read_roles(episode.artifacts) for episode in stored(pool)] == [["main", "side"]] * 2
        units = units_of(pool)
        trained = make_trees(units, AdvantageConfig(), pool.vocab_size)
        assert [sample.name.rpartition("/")[2] for tree in trained for sample in tree.samples] == ["0", "0"]
        trained = make_trees(units, AdvantageConfig(side_calls=True), pool.vocab_size)
        assert [sample.name.rpartition("/")[2] for tree in trained for sample in tree.samples] == ["0", "1", "0", "1"]

    looking(tmp_path, scene)


@pytest.mark.parametrize(
    ("problem", "first", "second"),
    [
        ("different tasks", {}, {"task": replace(TASK, id="mail-8")}),
        ("a greedy choice has no log-probability", {}, {"temperature": 0}),
        ("no stage of the curriculum has the domain coding", *[{"task": replace(TASK, domain=Domain.CODING)}] * 2),
        ("without a task or a group", {"group": ""}, {"group": ""}),
    ],
)
def test_an_untrainable_group_stays_with_a_warning_until_too_old(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, problem: str, first: dict[str, Any], second: dict[str, Any]
) -> None:
    def scene(operator: Operator, pool: Pool, poll: Look) -> None:
        operator.play("a", 1.0, **first)
        operator.play("b", 0.0, **second)
        assert poll() == 0
        assert problem in caplog.text
        assert len(list((tmp_path / "journal" / "closed").iterdir())) == 2
        assert not stored(pool)

    looking(tmp_path, scene)


def test_an_episode_of_an_unrewarded_group_is_deleted_in_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def scene(operator: Operator, pool: Pool, poll: Look) -> None:
        operator.play("a", 1.0)
        time.sleep(0.05)
        assert poll() == 0
        assert "deleted untrained" in caplog.text
        assert not list((tmp_path / "journal" / "closed").iterdir())

    looking(tmp_path, scene, pool={"admit_deployed": True, "deployed_s": 0.05})
