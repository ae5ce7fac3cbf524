"""Secret keys of servers: made at random, or read from a private file or a pipe.

A key never stands in a command line or an environment variable: every process of the same user reads those of all
others in /proc, and agents are such processes. It travels as the content of a file that only its owner may read, or
through a pipe, which is empty once the server has read it. `--key-file <(command)` is such a pipe too.
"""

import os
import secrets
import stat
from pathlib import Path

from m2forge.errors import ConfigError

OTHERS = 0o077
"""The permissions of everybody but a file's owner."""
MAX_KEY_BYTES = 4096
_NUM_BYTES = 24


def make_key() -> str:
    return secrets.token_urlsafe(_NUM_BYTES)


def read_key_file(path: Path) -> str:
    """The key that a file holds; blanks and line ends around it do not count."""
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
    """End with an error where a key stands in the environment: ignored, it would leave the server with another key."""
    if name in os.environ:
        raise ConfigError(
            f"the environment variable {name} is set, but other processes can read the environment, so no key is read "
            f"from there: unset it, write the key to a file of mode 0600 and give that file as {option}"
        )
