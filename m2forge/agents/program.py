"""What agents that are programs have in common: how the command is found, and why its process died."""

import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from m2forge.agents.attempt import DeathCause
from m2forge.agents.config import VersionConfig
from m2forge.errors import ConfigError
from m2forge.protocols import Outcome, OutcomeReason
from m2forge.sandbox.process import DEFAULT_PATH

NO_MEMORY = ("MemoryError", "bad_alloc", "out of memory", "Cannot allocate memory")
"""Phrases at the end of stderr that show a failed allocation."""
VERSION_S = 60.0
"""How long a program may take to print its version."""


def from_here(command: Sequence[str]) -> tuple[str, ...]:
    """Make relative paths of existing files absolute, because an agent runs in another folder. A program without a
    slash is searched in PATH."""
    # A word may be a program's text, too long for a path, for which pathlib would raise.
    program, *arguments = (str(Path(word).absolute()) if os.path.isfile(word) else word for word in command)  # noqa: PTH113
    return (program if "/" in command[0] else command[0], *arguments)


def require_program(command: Sequence[str], env: Mapping[str, str], inherits: Sequence[str]) -> None:
    """Raise if the first word of an agent's command names no program. `env`: the configured variables; `inherits`:
    names of those that the program inherits."""
    path = env.get("PATH") or (os.environ.get("PATH") if "PATH" in inherits else None) or DEFAULT_PATH
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
    printed = done.stdout.decode(errors="replace").strip()
    if version.text not in printed:
        raise ConfigError(
            f"agent.version: expected {version.text!r} from `{shlex.join(version.command)}`, received "
            f"{printed[-200:]!r}; {f'the preset {preset} is written for the former: ' if preset else ''}install that "
            "version, or set agent.version.text to yours"
        )


def death_cause(outcome: Outcome) -> DeathCause:
    """Why a worker died. An allocation over the memory limit fails in the program itself, so the end of its stderr
    shows it."""
    if outcome.status == -signal.SIGKILL or outcome.reason not in (OutcomeReason.EXITED, OutcomeReason.SIGNALLED):
        return DeathCause.LOST
    last_stderr = outcome.stderr.text()[-1000:]
    return DeathCause.LIMIT if any(words in last_stderr for words in NO_MEMORY) else DeathCause.EXITED
