"""Differences between SQLite and PostgreSQL: opening, beginning a transaction, dialect-specific SQL.

SQLite is opened with a write-ahead log. A transaction that will write begins as a write transaction, since one that
upgrades later may find the database changed and fail. The writer truncates the log once it exceeds its limit;
otherwise overlapping readers would keep it growing.

PostgreSQL may restart or drop connections. A transaction that was not committed then leaves nothing behind, and
`outlast` repeats it. Where the connection breaks during COMMIT, the server knows whether it committed (`txid_status`).
"""

import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy import Connection, Engine, Row, Select, Table, create_engine, event, insert, make_url, text, update
from sqlalchemy.dialects import sqlite
from sqlalchemy.engine.interfaces import DBAPIConnection, DBAPICursor
from sqlalchemy.exc import DBAPIError, NoSuchModuleError, OperationalError
from sqlalchemy.pool import ConnectionPoolEntry

from m2forge.errors import ConfigError, M2ForgeError
from m2forge.files import sync_path
from m2forge.pool.config import PoolConfig
from m2forge.pool.tables import call_table, queue_table

if TYPE_CHECKING:
    import psycopg

T = TypeVar("T")
_log = logging.getLogger(__name__)

PAGE_BYTES = 16384
"""Page size of SQLite, large enough for a few calls."""
_DRIVER = "postgresql+psycopg"
_SCHEMA_LOCK = 0x6D32706F
"""Id of PostgreSQL's advisory lock held while tables are created."""
_BOUND_LOG_EVERY = 64
"""Write transactions between two checks of the log's size."""
_RETRY_S = 0.01
"""Delay between retries to set up a file that other processes set up at the same time."""
_FIRST_DELAY_S, _MAX_DELAY_S = 0.05, 2.0
"""Delays before a transaction is repeated: the first, which doubles, and the longest."""
_NOT_READY = ("57P03", "53300")
"""SQLSTATE of a server that starts or shuts down, and of one that has no connection left."""

_TRANSACTION, _LAST = "m2forge_transaction", "m2forge_last"
"""Keys under which a connection holds its transaction's number, if it was read before the end, and its last statement,
if that is sent with COMMIT."""
_DIVISION_BY_ZERO, _UNIQUE_VIOLATION = "22012", "23505"
_ADD_CALLS = insert(call_table)
_NUMBER = "SELECT txid_current_if_assigned()"
_COPY_CALLS = "COPY call (episode, attempt, ordinal, data) FROM STDIN (FORMAT BINARY)"
# Days since noon of 24 November 4714 BC; 2440587.5 is the epoch.
_SQLITE_NOW = text("SELECT (julianday('now') - 2440587.5) * 86400.0")
_POSTGRES_NOW = text("SELECT CAST(extract(epoch FROM clock_timestamp()) AS double precision)")


class PoolError(M2ForgeError, OSError):
    """The database cannot be reached or does not respond."""


class ConnectionLostError(PoolError):
    """The connection was lost, or not made; nothing of the transaction is stored, so that it may be repeated."""


class ChangedError(M2ForgeError):
    """A row that a transaction's last or only statement relies on has changed; nothing of the transaction is stored."""


class Database:
    def __init__(self, config: PoolConfig, on_loss: Callable[[], None] = lambda: None) -> None:
        """`on_loss`: called each time the database is found unreachable."""
        url = make_url(config.url)
        self._on_loss = on_loss
        self._is_closing = threading.Event()
        self.is_sqlite = url.get_backend_name() == "sqlite"
        self.display_url = url.render_as_string(hide_password=True)
        self._wal_bytes, self._reconnect_s = config.wal_bytes, config.reconnect_s
        self._num_writes = 0
        self._path: Path | None = None
        try:
            if self.is_sqlite:
                self._path = Path(str(url.database))
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self.engine = create_engine(url, connect_args={"timeout": config.busy_timeout_s})
                event.listen(self.engine, "connect", _SetUp(config))
                event.listen(self.engine, "begin", _begin)
            else:
                wait_ms = round(config.busy_timeout_s * 1000)
                options = f"-c lock_timeout={wait_ms}"
                url = url.set(drivername=_DRIVER)
                arguments = {"options": options, "cursor_factory": _binary_cursor()}
                # No ping before each transaction: one that finds its connection closed is repeated.
                self.engine = create_engine(url, connect_args=arguments)
        except (ModuleNotFoundError, NoSuchModuleError) as error:
            raise ConfigError(
                "pool.url names a PostgreSQL database, but its driver is not installed; "
                "run pip install 'm2forge[postgres]'"
            ) from error
        except OSError as error:
            raise PoolError(f"{self.display_url}: its folder cannot be created ({error.strerror})") from error
        self._writing: Engine = self.engine.execution_options(m2forge_writes=True)
        self._alone: Engine = self.engine.execution_options(isolation_level="AUTOCOMMIT")

    @contextmanager
    def write(self, *, is_idempotent: bool = False) -> Iterator[Connection]:
        """One write transaction, committed when the block ends and rolled back if it raises. `is_idempotent`: it may
        be repeated after a commit, too."""
        with self._named(), self._writing.connect() as connection, connection.begin() as transaction:
            connection.info.pop(_TRANSACTION, None)
            connection.info.pop(_LAST, None)
            yield connection
            number = None if is_idempotent else self._transaction_number(connection)
            try:
                if _LAST in connection.info:
                    _commit_with(connection, *connection.info.pop(_LAST))
                transaction.commit()
            except DBAPIError as error:
                if is_idempotent or not self._is_lost(error) or not self._has_committed(number):
                    raise
                transaction.close()
        self._num_writes += 1
        if self.is_sqlite and self._num_writes % _BOUND_LOG_EVERY == 0:
            self.bound_log()

    def execute_alone(self, statement: str, values: Mapping[str, object]) -> Row[Any]:
        """Execute one statement as a transaction, in one round trip to PostgreSQL, and return its row. A caller may
        repeat it after it has committed. Raises `ChangedError` on a division by zero or an existing key."""
        with self._named(), self._alone.connect() as connection:
            try:
                return connection.exec_driver_sql(statement, dict(values)).one()
            except DBAPIError as error:
                if getattr(error.orig, "sqlstate", None) in (_DIVISION_BY_ZERO, _UNIQUE_VIOLATION):
                    raise ChangedError("a row is not in the expected state") from error
                raise

    @contextmanager
    def read(self) -> Iterator[Connection]:
        with self._named(), self.engine.begin() as connection:
            yield connection

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except DBAPIError as error:
            # The driver's message only: SQLAlchemy adds the statement and its parameters, which contain agents' text.
            kind = ConnectionLostError if self._is_lost(error) else PoolError
            raise kind(f"{self.display_url}: the database failed: {error.orig}") from error

    def _is_lost(self, error: DBAPIError) -> bool:
        if self.is_sqlite:
            return False
        state = getattr(error.orig, "sqlstate", None)
        # A connection that cannot be made has no SQLSTATE.
        is_refused = isinstance(error, OperationalError) and state is None
        return error.connection_invalidated or is_refused or state in _NOT_READY

    def _transaction_number(self, connection: Connection) -> int | None:
        """PostgreSQL's number of a transaction that has written."""
        if self.is_sqlite:
            return None
        known: int | None = connection.info.pop(_TRANSACTION, None)
        return known or connection.execute(text(_NUMBER)).scalar_one()

    def _has_committed(self, number: int | None) -> bool:
        """Whether a transaction committed although its connection was lost; waits until the database reports it."""

        def query() -> bool:
            with self.read() as connection:
                status = connection.execute(text("SELECT txid_status(:number)"), {"number": number}).scalar_one()
            if status == "in progress":
                raise ConnectionLostError(f"{self.display_url}: the database still ends a lost connection")
            return bool(status == "committed")

        return number is None or self.outlast(query)

    def outlast(self, work: Callable[[], T], limit_s: float | None = None) -> T:
        """Run `work`, one transaction, again for as long as the connection is lost, at most `limit_s` (by default
        `reconnect_s`)."""
        limit_s, lost_s, delay_s = self._reconnect_s if limit_s is None else limit_s, 0.0, _FIRST_DELAY_S
        began_s: float | None = None
        while True:
            try:
                result = work()
            except ConnectionLostError as error:
                self._on_loss()
                began_s = time.monotonic() if began_s is None else began_s
                lost_s = time.monotonic() - began_s
                if lost_s >= limit_s or self._is_closing.is_set():
                    raise PoolError(f"{error} (tried for {lost_s:.0f} s)" if lost_s else f"{error}") from error
                if delay_s == _FIRST_DELAY_S:
                    _log.warning("%s; trying again for up to %.0f s", error, limit_s)
                self._is_closing.wait(delay_s)
                delay_s = min(2 * delay_s, _MAX_DELAY_S)
                continue
            if began_s is not None:
                _log.warning("%s: reached again after %.1f s", self.display_url, time.monotonic() - began_s)
            return result

    def stop_waiting(self) -> None:
        """Have transactions whose connection is lost fail at once, for a process that ends."""
        self._is_closing.set()

    def log_bytes(self) -> int:
        """Size of SQLite's write-ahead log; 0 for PostgreSQL."""
        if self._path is None:
            return 0
        log = self._path.with_name(f"{self._path.name}-wal")
        return log.stat().st_size if log.exists() else 0

    def bound_log(self) -> None:
        """Truncate SQLite's log if it exceeds its limit, waiting for readers."""
        if self.log_bytes() <= self._wal_bytes:
            return
        with self._named(), self.engine.connect() as connection:
            raw = connection.connection.driver_connection
            assert isinstance(raw, sqlite3.Connection)
            is_busy = raw.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
        if is_busy:
            _log.warning(
                "%s: a reader prevents the truncation of the write-ahead log; it has %d bytes",
                self.display_url,
                self.log_bytes(),
            )

    def now_s(self, connection: Connection) -> float:
        """Seconds since the epoch by the database's clock, which all its processes share."""
        query = _SQLITE_NOW if self.is_sqlite else _POSTGRES_NOW
        return float(connection.execute(query).scalar_one())

    def flush(self) -> None:
        """Wait until every committed transaction is on disk, even where `sync` leaves that to the operating system.
        SQLite's own checkpoints sync what they move out of the log, so only the log needs a sync."""
        if self._path is not None:
            log = self._path.with_name(f"{self._path.name}-wal")
            if log.exists():
                sync_path(log)
            sync_path(self._path.parent)
            return
        with self.write() as connection:
            connection.execute(text("SET LOCAL synchronous_commit TO on"))
            connection.execute(update(queue_table).values(id=queue_table.c.id))

    def reclaim(self, num_pages: int = 1024) -> None:
        """Return up to `num_pages` pages of deleted rows to the file system; PostgreSQL does so itself."""
        if self.is_sqlite:
            with self._named(), self.engine.connect() as connection:
                raw = connection.connection.driver_connection
                assert isinstance(raw, sqlite3.Connection)
                raw.execute(f"PRAGMA incremental_vacuum({num_pages})").fetchall()

    def lock_schema(self, connection: Connection) -> None:
        """Lock table creation, so that one of several processes creates the tables and the others find them."""
        if not self.is_sqlite:
            connection.execute(text(f"SELECT pg_advisory_xact_lock({_SCHEMA_LOCK})"))

    def tune(self, connection: Connection) -> None:
        """Store calls uncompressed and inline in their row, because they are already dense and small enough."""
        if not self.is_sqlite:
            connection.execute(text(f"ALTER TABLE {call_table.name} ALTER COLUMN data SET STORAGE EXTERNAL"))
            connection.execute(text(f"ALTER TABLE {call_table.name} SET (toast_tuple_target = 8160)"))

    def close(self) -> None:
        self.engine.dispose()


def add_up(connection: Connection, table: Table, rows: Sequence[Mapping[str, object]], column: str) -> None:
    """Insert rows; where the key exists, add to its `column`."""
    if not rows:
        return
    keys = [key.name for key in table.primary_key]
    if connection.dialect.name == "sqlite":
        insert = sqlite.insert(table)
        statement = insert.on_conflict_do_update(keys, set_={column: table.c[column] + insert.excluded[column]})
        connection.execute(statement, rows)
    else:
        from sqlalchemy.dialects import postgresql  # a process whose pool is SQLite does not load it

        pg_insert = postgresql.insert(table)
        pg_statement = pg_insert.on_conflict_do_update(
            index_elements=keys, set_={column: table.c[column] + pg_insert.excluded[column]}
        )
        connection.execute(pg_statement, rows)


def add_calls(connection: Connection, rows: Sequence[tuple[int, int, int, bytes]]) -> None:
    """Insert calls, each its episode, attempt, ordinal and data; PostgreSQL copies them, which costs a third."""
    if not rows:
        return
    columns = [column.name for column in call_table.c]
    if connection.dialect.name == "sqlite":
        connection.execute(_ADD_CALLS, [dict(zip(columns, row, strict=True)) for row in rows])
        return
    with _driver(connection, _COPY_CALLS) as raw, raw.cursor().copy(_COPY_CALLS) as copy:
        copy.set_types(("int8", "int4", "int4", "bytea"))
        for row in rows:
            copy.write_row(row)


Query = tuple[Select[Any], Mapping[str, object]]
"""A query that lives as long as the program, as it is compiled once, and its parameters."""


def begin_with(connection: Connection, locking: Query, *queries: Query) -> list[Sequence[Any]]:
    """Rows of a write transaction's first queries, of which `locking` locks a row. To PostgreSQL they and the beginning
    of the transaction are one round trip, in which it also returns the number that `Database.write` needs at the end:
    on a saturated machine each round trip waits twice for a core."""
    if connection.dialect.name == "sqlite":
        return [connection.execute(query, values).all() for query, values in (locking, *queries)]
    from psycopg.rows import namedtuple_row

    with _driver(connection, "BEGIN") as raw:
        with raw.pipeline():
            cursors = [raw.cursor(row_factory=namedtuple_row) for _ in queries]
            first, number = raw.cursor(row_factory=namedtuple_row), raw.cursor()
            first.execute(*_compiled(*locking))
            number.execute(_NUMBER)
            for cursor, query in zip(cursors, queries, strict=True):
                cursor.execute(*_compiled(*query))
        found: list[Sequence[Any]] = [cursor.fetchall() for cursor in (first, *cursors)]
        ((connection.info[_TRANSACTION],),) = number.fetchall()
    return found


def end_with(connection: Connection, statement: str, values: Mapping[str, object]) -> None:
    """Have `Database.write` send this statement and COMMIT to PostgreSQL in one round trip. A statement that divides by
    zero raises `ChangedError` there."""
    connection.info[_LAST] = (statement, values)


def _commit_with(connection: Connection, statement: str, values: Mapping[str, object]) -> None:
    try:
        with _driver(connection, statement) as raw, raw.pipeline():
            raw.execute(statement, values)
            raw.commit()
    except DBAPIError as error:
        if getattr(error.orig, "sqlstate", None) == _DIVISION_BY_ZERO:
            raise ChangedError("a row changed since it was read") from error
        raise


def _compiled(query: Select[Any], values: Mapping[str, object]) -> tuple[bytes, Mapping[str, object]]:
    statement, known = _text(query)
    return statement, {**known, **values}


@cache
def _text(query: Select[Any]) -> tuple[bytes, Mapping[str, object]]:
    compiled = query.compile(dialect=make_url(f"{_DRIVER}://").get_dialect()())
    return str(compiled).encode(), compiled.params


@contextmanager
def _driver(connection: Connection, statement: str) -> Iterator["psycopg.Connection[Any]"]:
    """The driver's connection, whose errors are raised as SQLAlchemy raises those of `statement`."""
    import psycopg

    raw = connection.connection.driver_connection
    assert isinstance(raw, psycopg.Connection)
    try:
        yield raw
    except psycopg.Error as error:
        is_closed = raw.closed
        if is_closed:
            connection.invalidate(error)
        known = DBAPIError.instance(statement, None, error, psycopg.Error, connection_invalidated=is_closed)
        raise known from error


def _binary_cursor() -> type[object]:
    """A cursor with binary results: as hex text, calls would be twice as long and slow to parse."""
    import psycopg

    class BinaryCursor(psycopg.Cursor[tuple[object, ...]]):
        def __init__(self, connection: psycopg.Connection[tuple[object, ...]], **options: Any) -> None:
            super().__init__(connection, **options)
            self.format = psycopg.pq.Format.BINARY

    return BinaryCursor


class _SetUp:
    """Sets up each connection to SQLite."""

    def __init__(self, config: PoolConfig) -> None:
        synchronous = "FULL" if config.sync == "disk" else "NORMAL"
        self._of_file = (f"page_size = {PAGE_BYTES}", "auto_vacuum = INCREMENTAL", "journal_mode = WAL")
        self._of_connection = (f"synchronous = {synchronous}", f"journal_size_limit = {config.wal_bytes}")
        self._wait_s = config.busy_timeout_s

    def __call__(self, connection: DBAPIConnection, _: ConnectionPoolEntry) -> None:
        # Otherwise the driver would begin transactions itself, and too late.
        connection.isolation_level = None
        cursor = connection.cursor()
        self._set_up_file(cursor)
        for pragma in self._of_connection:
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    def _set_up_file(self, cursor: DBAPICursor) -> None:
        """Set the pragmas of a new file only, because they would make opening it wait for writers. If several processes
        do so at the same time, SQLite immediately refuses all but one, whatever the timeout, so they retry."""
        until_s = time.monotonic() + self._wait_s
        while _journal(cursor) != "wal":
            try:
                for pragma in self._of_file:
                    cursor.execute(f"PRAGMA {pragma}")
                return
            except sqlite3.OperationalError as error:
                is_busy = error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY
                if not is_busy or time.monotonic() > until_s:
                    raise
                time.sleep(_RETRY_S)


def _journal(cursor: DBAPICursor) -> str:
    cursor.execute("PRAGMA journal_mode")
    (mode,) = cursor.fetchall()[0]
    return str(mode)


def _begin(connection: Connection) -> None:
    writes = connection.get_execution_options().get("m2forge_writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
