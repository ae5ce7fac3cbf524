"""Limits the number of connections by the API key of their last request.

    no key, or an invalid one            at most `max_keyless_connections` together
    the key of an episode                at most `max_connections_per_key`, and `max_connections` of all episodes
    the admin key                        not limited: the RL loop must always get through

A connection has no key until the head of its first request has arrived. When there are too many without a key, the
oldest idle one is closed, not the newest: a client that sends its head at once, as the RL loop does, keeps its
connection however many others are held open. When there are too many with a key, the oldest idle one of that key,
or of all keys, is closed; if all are busy, the request is refused: 429 for the key's limit, 503 for that of all keys.
"""

import hmac
import logging
import resource
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from m2forge.errors import ConfigError
from m2forge.gateway.config import GatewayConfig
from m2forge.gateway.limits import Refusal, read_key

REFUSAL: Final = "m2forge.refusal"
"""Key in an ASGI scope for the `Refusal` of a request that exceeds a connection limit."""
RETRY_AFTER_S = 1
"""Retry-After in seconds; busy connections become free when their responses end."""
FILES_PER_REQUEST = 2
"""File descriptors per request: the client's connection, and the engine's while the request runs."""
OTHER_FILES = 512
"""File descriptors reserved for journals, body workers and the admin's connections."""
LEAST_OTHER_FILES, LEAST_CONNECTION_FILES = 192, 16
"""Minimum file descriptors that a gateway works with; up to 128 journals stay open."""
_NOBODY, _ADMIN = "", "admin"

_log = logging.getLogger(__name__)


class Connection(Protocol):
    @property
    def is_idle(self) -> bool:
        """Whether no request waits for its response."""
        ...

    def hang_up(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Owners:
    """Maps API keys to owners: the admin, an episode's key hash, or none."""

    hash_key: Callable[[str], str]
    admin_hash: str | None
    is_episode: Callable[[str], bool]

    def find(self, key: str) -> str:
        if not key:
            return _NOBODY
        hashed = self.hash_key(key)
        if self.admin_hash is not None and hmac.compare_digest(hashed, self.admin_hash):
            return _ADMIN
        return hashed if self.is_episode(hashed) else _NOBODY


class ConnectionLimits:
    def __init__(self, config: GatewayConfig, owners: Owners) -> None:
        self._owners = owners
        self._max_keyless, self._max_per_key = config.max_keyless_connections, config.max_connections_per_key
        self._max_keyed = config.max_connections
        self._owner_of: dict[Connection, str] = {}
        """Owner of each connection, least recently used first."""
        self._of_owner: dict[str, dict[Connection, None]] = {}
        """Connections of each owner, in the same order."""

    def num_of(self, key: str) -> int:
        """Return the number of connections whose last request had this key; an empty key counts those without one."""
        return len(self._of_owner.get(self._owners.find(key), ()))

    def open(self, connection: Connection) -> None:
        self._move(connection, _NOBODY)
        keyless = self._of_owner[_NOBODY]
        if len(keyless) > self._max_keyless:
            oldest = next(iter(keyless))
            self._evict(next((other for other in keyless if other.is_idle and other is not connection), oldest))

    def ask(self, connection: Connection, headers: Sequence[tuple[bytes, bytes]]) -> Refusal | None:
        """Register a request with these headers. Returns the reason for refusing it, or None."""
        owner = self._owners.find(read_key(dict(headers)))
        self._move(connection, owner)
        if owner in (_NOBODY, _ADMIN):
            return None
        own = self._of_owner[owner]
        if len(own) > self._max_per_key and not self._evict_idle(own, connection):
            self._move(connection, _NOBODY)
            return Refusal(
                429,
                f"the episode has {self._max_per_key} connections that are busy, which is as many as it may have; "
                "wait for one, or raise gateway.max_connections_per_key",
                is_final=True,
                retry_after_s=RETRY_AFTER_S,
            )
        if self._num_keyed > self._max_keyed and not self._evict_idle(self._keyed(), connection):
            self._move(connection, _NOBODY)
            return Refusal(
                503,
                f"{self._max_keyed} connections of episodes are busy, which is as many as there may be; ask again, or "
                "raise gateway.max_connections",
                is_final=True,
                retry_after_s=RETRY_AFTER_S,
            )
        return None

    def close(self, connection: Connection) -> None:
        owner = self._owner_of.pop(connection, None)
        if owner is not None:
            own = self._of_owner[owner]
            del own[connection]
            if not own:
                del self._of_owner[owner]

    @property
    def _num_keyed(self) -> int:
        return len(self._owner_of) - sum(len(self._of_owner.get(owner, ())) for owner in (_NOBODY, _ADMIN))

    def _keyed(self) -> Iterable[Connection]:
        return (other for other, owner in self._owner_of.items() if owner not in (_NOBODY, _ADMIN))

    def _move(self, connection: Connection, owner: str) -> None:
        self.close(connection)
        self._owner_of[connection] = owner
        self._of_owner.setdefault(owner, {})[connection] = None

    def _evict_idle(self, connections: Iterable[Connection], but: Connection) -> bool:
        idle = next((other for other in connections if other.is_idle and other is not but), None)
        if idle is not None:
            self._evict(idle)
        return idle is not None

    def _evict(self, connection: Connection) -> None:
        # Free the slot at once; the protocol notices the disconnect later.
        self.close(connection)
        connection.hang_up()


def fit_open_files(config: GatewayConfig) -> GatewayConfig:
    """Raise the soft limit of open files and reduce the connection limits to what this process may hold open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = FILES_PER_REQUEST * config.max_connections + config.max_keyless_connections + OTHER_FILES
    if soft >= needed or soft == resource.RLIM_INFINITY:
        return config
    raised = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
    if raised >= needed:
        return config
    num_keyed, num_keyless = share_files(raised, config.max_connections, config.max_keyless_connections)
    _log.warning(
        "max_connections is %d instead of %d and max_keyless_connections %d instead of %d: this process may open %d "
        "files; raise the limit (ulimit -n %d)",
        *(num_keyed, config.max_connections, num_keyless, config.max_keyless_connections, raised, needed),
    )
    return config.model_copy(update={"max_connections": num_keyed, "max_keyless_connections": num_keyless})


def share_files(num_files: int, max_keyed: int, max_keyless: int) -> tuple[int, int]:
    """Return how many connections with and without a key fit into `num_files` open files. Raises ConfigError if there
    are too few for any gateway."""
    least = LEAST_OTHER_FILES + LEAST_CONNECTION_FILES
    if num_files < least:
        raise ConfigError(
            f"this process may open {num_files} files, and a gateway needs {least} or more; raise the limit (ulimit -n)"
        )
    room = num_files - min(OTHER_FILES, max(LEAST_OTHER_FILES, num_files // 2))
    num_keyless = min(max_keyless, max(room // 4, room - FILES_PER_REQUEST * max_keyed))
    return min(max_keyed, (room - num_keyless) // FILES_PER_REQUEST), num_keyless
