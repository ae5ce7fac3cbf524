"""Secret keys of servers: generated at random, or read from a private file or a pipe.

A key is never passed in a command line or an environment variable: every process of the same user can read those in
/proc, and agents are such processes. It is passed in a file that only its owner may read, or through a pipe, which is
empty once the server has read it. `--key-file <(command)` is such a pipe too.
"""

import os
import secrets
import stat
from pathlib import Path

from m2forge.errors import ConfigError

OTHERS = 0o077
"""Permission bits of group and others."""
MAX_KEY_BYTES = 4096
_NUM_BYTES = 24


def make_key() -> str:
    return secrets.token_urlsafe(_NUM_BYTES)


def read_key_file(path: Path) -> str:
    """The key in a file, without surrounding whitespace."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if stat.S_ISREG(mode) and mode & OTHERS:
                raise ConfigError(
                    f"{path}: other users may access this key (mode {stat.S_IMODE(mode):04o}); run chmod 600 {path}"
                )
            content = file.read(MAX_KEY_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: the key cannot be read ({error.strerror}); give a file that holds it") from error
    return check_key(content.decode("latin-1").strip(), str(path))


def check_key(key: str, origin: str) -> str:
    if not key or len(key) > MAX_KEY_BYTES or not all("!" <= sign <= "~" for sign in key):
        raise ConfigError(
            f"{origin}: expected a key that a header can carry: 1 to {MAX_KEY_BYTES} ASCII characters without spaces"
        )
    return key


def refuse_key_variable(name: str, option: str) -> None:
    """Raise if a key is in the environment: if it were ignored, the server would silently use another key."""
    if name in os.environ:
        raise ConfigError(
            f"the environment variable {name} is set, but other processes can read the environment, so no key is read "
            f"from there: unset it, write the key to a file of mode 0600 and give that file as {option}"
        )
