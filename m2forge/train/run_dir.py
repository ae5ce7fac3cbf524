"""The directory of a run: created on the first start, checked on resume, locked by one process at a time.

It holds the resolved configuration. A resumed run must have the same configuration, except for the machine, the
checkpoint settings, the metrics writers, which weights to export, the URLs of an RL run's vLLM or SGLang servers, and
phases that have not begun.
"""

import fcntl
import logging
import stat
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from m2forge.config import Config, TomlValue, build, current_keys, dump, write_resolved
from m2forge.errors import ConfigError, ExistsError, M2ForgeError
from m2forge.files import write_atomic

CONFIG_FILE, LOCK_FILE = "config.toml", "lock"
FAILURE_FILE = "failure.txt"
"""The error that ended the run's last process, in one line; absent while a process runs and after an interrupt."""
MODE = 0o700
"""A run's directory is private to its owner: it holds the pool and what agents and models wrote."""
MUTABLE_KEYS = ("train.machine", "train.checkpoint", "train.metrics", "eval.export", "cluster", "engine.server.url")
"""Config tables and keys that may change on resume."""
IMPLIED = {"train.router_bias": "balanced", "agent.sandbox.backend": "process"}
"""Values that older runs used implicitly, before their configuration recorded the key."""

_log = logging.getLogger(__name__)


@contextmanager
def hold_run(run_dir: Path) -> Iterator[None]:
    """Lock `run_dir` against training by other processes; the lock ends with the process, however it ends. An error
    that leaves the block is recorded in the directory, until the next process holds it."""
    make_private(run_dir)
    with (run_dir / LOCK_FILE).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ExistsError(f"{run_dir} is being used by another process; wait for it, or end it first") from error
        failure = run_dir / FAILURE_FILE
        failure.unlink(missing_ok=True)
        try:
            yield
        except Exception as error:
            kind = "" if isinstance(error, M2ForgeError) else f"{type(error).__name__}: "
            # A full disk must not hide the error that it caused.
            with suppress(OSError):
                write_atomic(failure, f"{kind}{error}\n")
            raise


def make_private(run_dir: Path) -> None:
    """Create a run's directory with owner-only permissions; if it exists with wider ones, restrict them."""
    run_dir.mkdir(mode=MODE, parents=True, exist_ok=True)
    mode = stat.S_IMODE(run_dir.stat().st_mode)
    if mode & ~MODE:
        run_dir.chmod(MODE)
        _log.warning("%s was accessible to other users (mode %04o); changed to %04o", run_dir, mode, MODE)


def open_run(run_dir: Path, config: Config, phase: int | None, mutable: Sequence[str] = MUTABLE_KEYS) -> None:
    """Write the configuration of a new run, or check that of a resumed run whose last begun phase is `phase`.
    `mutable`: tables and keys that may change on resume."""
    make_private(run_dir)
    refuse_changes(run_dir, config, phase, mutable)
    write_resolved(config, run_dir / CONFIG_FILE)


def refuse_changes(run_dir: Path, config: Config, phase: int | None, mutable: Sequence[str] = MUTABLE_KEYS) -> None:
    """Raise if the run in `run_dir`, whose last begun phase is `phase`, cannot resume with `config`."""
    path = run_dir / CONFIG_FILE
    if phase is None or not path.exists():
        return
    before = _read_run(type(config), path)
    after = flat_keys(tomllib.loads(dump(config)))
    changed = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
    changed = [key for key in changed if not key.startswith(tuple(mutable)) and not _is_future_phase(key, phase)]
    if changed:
        key = changed[0]
        raise ConfigError(
            f"{run_dir} was started with {key} = {before.get(key)!r}, now it is {after.get(key)!r}; "
            "resume with the same configuration, or start a run of another name"
        )


def _read_run(kind: type[Config], path: Path) -> dict[str, TomlValue]:
    """The configuration that a run was started with, under current keys; keys that were added since have the values
    that the run used implicitly."""
    written = current_keys(kind, tomllib.loads(path.read_text(encoding="utf-8")))
    try:
        defaults = flat_keys(tomllib.loads(dump(build(kind, written))))
    except ConfigError:
        # It holds keys or values that are no longer valid, so that it differs from any valid configuration.
        defaults = {}
    implied = {key: value for key, value in IMPLIED.items() if key in defaults}
    return defaults | implied | flat_keys(written)


def _is_future_phase(key: str, phase: int) -> bool:
    """Whether a key belongs to a phase that has not begun."""
    parts = key.split(".")
    return parts[0] == "phases" and int(parts[1]) > phase


def flat_keys(value: TomlValue, path: str = "") -> dict[str, TomlValue]:
    """Each leaf of a TOML value by its dotted key."""
    if isinstance(value, dict):
        pairs = list(value.items())
    elif isinstance(value, list):
        pairs = [(str(index), item) for index, item in enumerate(value)]
    else:
        return {path: value}
    nested = (flat_keys(item, f"{path}.{name}" if path else name) for name, item in pairs)
    return {key: leaf for found in nested for key, leaf in found.items()}
