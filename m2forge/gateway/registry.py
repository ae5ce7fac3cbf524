"""All episodes of a gateway, by id and by key; written down in a folder of journals, and found again after a restart.

A key is told once, when its episode is made, and kept as a hash.
"""

import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from m2forge.errors import ExistsError, RecordError
from m2forge.gateway.config import Budget
from m2forge.gateway.entry import Created
from m2forge.gateway.episode import Episode
from m2forge.gateway.journal import SUFFIX, Journal
from m2forge.text.format import ChatFormat

KEY_PREFIX = "m2f-"
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


class Episodes:
    def __init__(
        self,
        format: ChatFormat,
        *,
        restores_thinking: bool = True,
        vocab_size: int | None = None,
        budget: Budget | None = None,
        folder: Path | None = None,
        sync: Literal["system", "disk"] = "system",
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`budget`: of episodes that are made without one. `folder`: of the journals; without it nothing is kept.
        `vocab_size`: of the network, where it knows more ids than its tokenizer."""
        self._format, self._restores_thinking, self._clock = format, restores_thinking, clock
        self._vocab_size = vocab_size
        self._budget, self._folder = budget or Budget(), folder
        self._sync: Literal["system", "disk"] = sync
        self._by_id: dict[str, Episode] = {}
        self._by_key: dict[str, Episode] = {}
        for path in sorted(folder.glob(f"*{SUFFIX}")) if folder is not None else ():
            self._restore(path)

    def create(
        self, task_id: str = "", *, group: str = "", budget: Budget | None = None, id: str = ""
    ) -> tuple[Episode, str]:
        """An episode and its key, which is told this once and kept as a hash."""
        id = id or f"ep_{secrets.token_hex(8)}"
        if not _ID.fullmatch(id):
            raise RecordError(f"episode: id: expected up to 64 letters, digits, '_' and '-', received {id[:80]!r}")
        if id in self._by_id:
            raise ExistsError(f"episode {id} exists; choose another id")
        key = KEY_PREFIX + secrets.token_urlsafe(32)
        created = Created(id, task_id, group, hash_key(key), self._clock(), budget or self._budget)
        journal = None
        if self._folder is not None:
            journal = Journal.create(self._folder / f"{id}{SUFFIX}", sync=self._sync)
            try:
                journal.append(created)
            except BaseException:
                journal.path.unlink(missing_ok=True)
                raise
        return self._add(created, journal), key

    def find(self, key: str) -> Episode | None:
        """The episode of a key. How long it takes tells nothing about keys: their hashes are compared, and whole."""
        hashed = hash_key(key)
        episode = self._by_key.get(hashed)
        return episode if episode is not None and hmac.compare_digest(episode.key_hash, hashed) else None

    def get(self, id: str) -> Episode | None:
        return self._by_id.get(id)

    def forget(self, id: str) -> None:
        """Let an episode go from memory, key and all; its journal stays."""
        episode = self._by_id.pop(id, None)
        if episode is not None:
            del self._by_key[episode.key_hash]

    def __iter__(self) -> Iterator[Episode]:
        return iter(self._by_id.values())

    def __len__(self) -> int:
        return len(self._by_id)

    def _restore(self, path: Path) -> None:
        journal, entries = Journal.open(path, sync=self._sync)
        if not entries:
            # Made by a process that ended before it had told anybody the key.
            path.unlink()
            return
        created, *others = entries
        if not isinstance(created, Created):
            raise RecordError(f"{path}: begins with {type(created).__name__}, expected the episode's making")
        episode = self._add(created, journal)
        for entry in others:
            episode.apply(entry)

    def _add(self, created: Created, journal: Journal | None) -> Episode:
        episode = Episode(
            created,
            self._format,
            restores_thinking=self._restores_thinking,
            vocab_size=self._vocab_size,
            journal=journal,
            clock=self._clock,
        )
        self._by_id[episode.id] = self._by_key[episode.key_hash] = episode
        return episode


def hash_key(key: str) -> str:
    """Keys are 256 random bits, so a plain hash cannot be searched."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
