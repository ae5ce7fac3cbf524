"""A run's data pool, opened read-only: creates no tables and never takes a writer's lock.

SQLite is opened with `mode=ro` and `query_only`; PostgreSQL's transactions are read-only, their statements time out
after `STATEMENT_S`. A transaction lasts only while its rows are fetched, so that it does not block the writer's WAL
checkpoints. A pool that does not exist yet, or has no tables, raises `PoolMissing`; the page reports it and retries.
"""

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from sqlalchemy import Connection, Engine, create_engine, event, make_url
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import DBAPIError, NoSuchModuleError
from sqlalchemy.pool import ConnectionPoolEntry, NullPool

from m2forge.errors import M2ForgeError
from m2forge.pool.config import PoolConfig

BUSY_S = 5.0
STATEMENT_S = 20


class PoolMissing(M2ForgeError, LookupError):
    """There is no pool to read, as before the first task is queued."""


class PoolReader:
    def __init__(self, config: PoolConfig) -> None:
        self.config = config
        url = make_url(config.url)
        self._path = Path(str(url.database)) if url.get_backend_name() == "sqlite" else None
        self._engine: Engine | None = None

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A transaction with one consistent snapshot."""
        try:
            with self._open().begin() as connection:
                yield connection
        except DBAPIError as error:
            # Only the driver's message: SQLAlchemy adds the statement and its parameters, which hold agents' text.
            reason = str(error.orig).splitlines()
            raise PoolMissing(f"the pool cannot be read now ({reason[0] if reason else 'no reason given'})") from error

    def close(self) -> None:
        if self._engine is not None:
            self._engine.dispose()

    def _open(self) -> Engine:
        if self._path is not None and not self._path.is_file():
            raise PoolMissing("there is no pool yet; it is made when the run begins")
        if self._engine is None:
            self._engine = self._make_engine()
        return self._engine

    def _make_engine(self) -> Engine:
        if self._path is not None:
            engine = create_engine("sqlite://", creator=self._connect_sqlite, poolclass=NullPool)
            event.listen(engine, "begin", _begin)
            return engine
        options = (
            f"-c default_transaction_read_only=on -c statement_timeout={STATEMENT_S}s -c lock_timeout={STATEMENT_S}s"
        )
        try:
            url = make_url(self.config.url).set(drivername="postgresql+psycopg")
            engine = create_engine(url, connect_args={"options": options, "connect_timeout": 5}, pool_pre_ping=True)
        except (ModuleNotFoundError, NoSuchModuleError) as error:
            raise PoolMissing(
                "the run's pool is PostgreSQL's; run pip install 'm2forge[postgres]' to read it"
            ) from error
        event.listen(engine, "connect", _repeatable)
        return engine

    def _connect_sqlite(self) -> sqlite3.Connection:
        assert self._path is not None
        # Even a reader needs to create the WAL index beside the file. If the folder is read-only, there is no writer.
        is_fixed = not os.access(self._path.parent, os.W_OK) and not Path(f"{self._path}-wal").exists()
        uri = f"file:{quote(str(self._path))}?mode=ro{'&immutable=1' if is_fixed else ''}"
        # A connection is used by one thread at a time, but not always by the one that created it.
        connection = sqlite3.connect(uri, uri=True, timeout=BUSY_S, check_same_thread=False, isolation_level=None)
        connection.execute("PRAGMA query_only = ON")
        return connection


def _begin(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN")


def _repeatable(connection: DBAPIConnection, _: ConnectionPoolEntry) -> None:
    """One snapshot for all statements of a transaction, as in SQLite."""
    cursor = connection.cursor()
    cursor.execute("SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    cursor.close()
    connection.commit()
