"""What agents that are programs have in common: how they are found, what a sandbox shows of them, why they died."""

import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from m2forge.agents.attempt import DeathCause
from m2forge.agents.config import VersionConfig
from m2forge.errors import ConfigError
from m2forge.protocols import Command, Outcome, OutcomeReason
from m2forge.sandbox.backend import open_sandbox
from m2forge.sandbox.config import SandboxConfig
from m2forge.sandbox.image import HOST
from m2forge.sandbox.init_sandbox import PATH
from m2forge.sandbox.process import DEFAULT_PATH

NO_MEMORY = ("MemoryError", "bad_alloc", "out of memory", "Cannot allocate memory")
"""Phrases at the end of stderr that show a failed allocation."""
SYSTEM = tuple(map(Path, ("/bin", "/sbin", "/lib", "/lib64", "/usr")))
"""Folders that every image has its own of."""
MAX_LINKS = 16
VERSION_S = 60.0
"""How long a program may take to print its version."""


def from_here(command: Sequence[str]) -> tuple[str, ...]:
    """Make relative paths of existing files absolute, because an agent runs in another folder. A program without a
    slash is searched in PATH."""
    # A word may be a program's text, too long for a path, for which pathlib would raise.
    program, *arguments = (str(Path(word).absolute()) if os.path.isfile(word) else word for word in command)  # noqa: PTH113
    return (program if "/" in command[0] else command[0], *arguments)


def visible(config: SandboxConfig, command: Sequence[str], env: Mapping[str, str]) -> SandboxConfig:
    """A sandbox that shows an agent's program: what it is installed in, and the files that its command names. `env`:
    the configured variables."""
    if config.backend == "process":
        return config
    words = [Path(word) for word in from_here(command) if word.startswith("/") and os.path.isfile(word)]  # noqa: PTH113
    if "/" not in command[0] and config.image == HOST:
        found = shutil.which(command[0], path=_search_path(env, config.inherits))
        words += [Path(found)] if found else []
    shown = [Path(folder).absolute() for folder in config.folders]
    for path in [part for word in words for part in _installation(word)]:
        if not any(path.is_relative_to(each) for each in (*shown, *SYSTEM)):
            shown.append(path)
    return config.model_copy(update={"folders": tuple(map(str, shown))})


def inside_path(config: SandboxConfig, env: Mapping[str, str], own: str = PATH) -> dict[str, str]:
    """The variable PATH of a program: the folders of this process's that `config` shows, before `own`, the image's."""
    if config.backend == "process" or "PATH" in env:
        return {}
    folders = _search_path(env, config.inherits).split(":")
    shown = [folder for folder in folders if any(Path(folder).is_relative_to(each) for each in config.folders)]
    return {"PATH": ":".join([*shown, own])} if shown else {}


def _search_path(env: Mapping[str, str], inherits: Sequence[str]) -> str:
    return env.get("PATH") or (os.environ.get("PATH") if "PATH" in inherits else None) or DEFAULT_PATH


def _installation(program: Path) -> Iterator[Path]:
    """What a program needs to be found and to start, along all links that lead to it: its virtual environment,
    `node_modules` or `bin`, else the file alone."""
    for _ in range(MAX_LINKS):
        packages = next((parent for parent in reversed(program.parents) if parent.name == "node_modules"), None)
        environment = next((parent for parent in program.parents if (parent / "pyvenv.cfg").is_file()), None)
        if packages is not None:
            yield packages
        elif environment is not None:
            yield environment
            yield from _base_python(environment)
        else:
            yield program.parent if program.parent.name == "bin" else program
        if not program.is_symlink():
            return
        program = Path(os.path.normpath(program.parent / program.readlink()))


def _base_python(environment: Path) -> Iterator[Path]:
    """The installation that a virtual environment is based on, unless that is a home folder."""
    for line in (environment / "pyvenv.cfg").read_text(errors="replace").splitlines():
        name, _, value = line.partition("=")
        prefix = Path(value.strip()).parent
        if name.strip() == "home" and not Path.home().is_relative_to(prefix):
            yield prefix


async def require_inside(
    config: SandboxConfig,
    command: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    version: VersionConfig | None = None,
    preset: str = "",
) -> None:
    """Raise if no sandbox can be opened, or if the program is not in it or prints another version."""
    sandbox = await open_sandbox(config)
    try:
        if command:
            look = ("sh", "-c", 'command -v -- "$1"', "sh", from_here(command)[0])
            outcome = await sandbox.run(Command(look, env or {}))
            if outcome.status == 1 or (outcome.status == 127 and not outcome.stderr.num_bytes):
                raise ConfigError(
                    f"agent.command: {command[0]!r} is not in the sandbox; install it in the image, or name its folder "
                    "in agent.sandbox.folders"
                )
        if version is not None:
            outcome = await sandbox.run(
                Command(from_here(version.command), env or {}, timeout_s=VERSION_S, merges_stderr=True)
            )
            _require_text(version, outcome.stdout.text().strip(), preset)
    finally:
        await sandbox.close()


def require_program(command: Sequence[str], env: Mapping[str, str], inherits: Sequence[str]) -> None:
    """Raise if the first word of an agent's command names no program. `env`: the configured variables; `inherits`:
    names of those that the program inherits."""
    path = _search_path(env, inherits)
    program = from_here(command)[0]
    if shutil.which(program, path=path) is None:
        where = "is not an executable file" if "/" in program else f"is not in PATH ({path})"
        raise ConfigError(f"agent.command: {command[0]!r} {where}; install it, or name the program by its path")


def require_version(version: VersionConfig, env: Mapping[str, str], inherits: Sequence[str], preset: str = "") -> None:
    """Raise if a program prints another version than the configuration, or its preset, is written for."""
    require_program(version.command, env, inherits)
    passed_on = {name: os.environ[name] for name in inherits if name in os.environ}
    with tempfile.TemporaryDirectory() as home:
        own = {"PATH": DEFAULT_PATH} | passed_on | {name: text for name, text in env.items() if name == "PATH"}
        try:
            done = subprocess.run(
                from_here(version.command),
                env=own | {"HOME": home},
                cwd=home,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=VERSION_S,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ConfigError(f"agent.version: `{shlex.join(version.command)}` cannot be run: {error}") from error
    _require_text(version, done.stdout.decode(errors="replace").strip(), preset)


def _require_text(version: VersionConfig, printed: str, preset: str) -> None:
    if version.text not in printed:
        raise ConfigError(
            f"agent.version: expected {version.text!r} from `{shlex.join(version.command)}`, received "
            f"{printed[-200:]!r}; {f'the preset {preset} is written for the former: ' if preset else ''}install that "
            "version, or set agent.version.text to yours"
        )


def death_cause(outcome: Outcome) -> DeathCause:
    """Why a worker died. An allocation over the memory limit fails in the program itself, so the end of its stderr
    shows it."""
    if outcome.reason is OutcomeReason.MEMORY:
        return DeathCause.LIMIT
    if outcome.status == -signal.SIGKILL or outcome.reason not in (OutcomeReason.EXITED, OutcomeReason.SIGNALLED):
        return DeathCause.LOST
    last_stderr = outcome.stderr.text()[-1000:]
    return DeathCause.LIMIT if any(words in last_stderr for words in NO_MEMORY) else DeathCause.EXITED
