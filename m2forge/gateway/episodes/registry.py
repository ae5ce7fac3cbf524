"""All episodes of a gateway by id and by key, written to a folder of journals and restored after a restart.

A key is returned once, when its episode is created, and stored as a hash.

With journals, memory holds the open episodes and the most recently closed ones. Others keep only id and key hash there
and are reloaded on demand, for a late reward or a retry. While an `Episode` object is referenced, no second one is
created for its id. Startup reads only the journals of open episodes (`closed_journal`).

Idle episodes expire: they are closed, and further calls with their keys are refused.
"""

import asyncio
import hashlib
import hmac
import logging
import re
import secrets
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal
from weakref import WeakValueDictionary

from m2forge.errors import ConfigError, ExistsError, M2ForgeError, RecordError
from m2forge.gateway.config import Budget
from m2forge.gateway.episodes.closed_journal import (
    COMPACT_SUFFIX,
    closed_path,
    find_journal,
    list_closed,
    write_compacted,
)
from m2forge.gateway.episodes.episode import Episode
from m2forge.gateway.episodes.journal import SUFFIX, Closed, Created, Entry, Journal, JournalError, sync_folder
from m2forge.records import Sampling, Task
from m2forge.text.format import ChatFormat

KEY_PREFIX = "m2f-"
MAX_CLOSED = 256
DAMAGED_SUFFIX = ".damaged"
"""Suffix added to the name of a journal that could not be read."""
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


_log = logging.getLogger(__name__)


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
        monotonic: Callable[[], float] = time.monotonic,
        max_closed: int = MAX_CLOSED,
    ) -> None:
        """`budget`: default of new episodes. `folder`: of the journals; without it nothing is written, and nothing
        leaves memory. `vocab_size`: the network's, if it is larger than the tokenizer's. `clock`: dates records;
        `monotonic`: measures time budgets. `max_closed`: number of closed episodes held in memory though they could be
        reloaded."""
        self._format, self._restores_thinking, self._clock = format, restores_thinking, clock
        self._vocab_size, self._monotonic = vocab_size, monotonic
        self._budget, self._folder = budget or Budget(), folder
        self._sync: Literal["system", "disk"] = sync
        self._by_id: dict[str, Episode] = {}
        """Episodes in memory."""
        self._closed: OrderedDict[str, None] = OrderedDict()
        """Closed episodes in memory, most recently used last."""
        self._max_closed = max_closed
        self._held: WeakValueDictionary[str, Episode] = WeakValueDictionary()
        """Episodes that are still referenced anywhere."""
        self._id_of_key: dict[str, str] = {}
        """Ids by key hash, of episodes in memory and of those that can be reloaded."""
        self._key_of_id: dict[str, str] = {}
        self._uncompacted: dict[str, None] = {}
        """Closed episodes whose journals still contain texts that no request can return."""
        if folder is not None:
            _require_writable(folder)
            for id, key_hash, is_compact in list_closed(folder):
                self._know(id, key_hash)
                if not is_compact:
                    self._uncompacted[id] = None
            for path in sorted(folder.glob(f"*{SUFFIX}")):
                self._restore(path)

    def create(
        self,
        task_id: str = "",
        *,
        group: str = "",
        budget: Budget | None = None,
        sampling: Sampling | None = None,
        task: Task | None = None,
        context: int | None = None,
        id: str = "",
    ) -> tuple[Episode, str]:
        """Create an episode and return it with its key; only the key's hash is stored. `sampling`: overrides its
        requests' sampling parameters. `task`: whose tools it may call. `context`: maximum tokens of prompt plus
        completion, if the model allows as many."""
        id = id or f"ep_{secrets.token_hex(8)}"
        if not _ID.fullmatch(id):
            raise RecordError(f"episode: id: expected up to 64 letters, digits, '_' and '-', received {id[:80]!r}")
        if id in self._key_of_id:
            raise ExistsError(f"episode {id} exists; choose another id")
        key = KEY_PREFIX + secrets.token_urlsafe(32)
        spends = budget or self._budget
        created = Created(id, task_id, group, hash_key(key), self._clock(), spends, sampling, task, context)
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
        """Return the episode of a key. Timing reveals nothing about keys, since whole hashes are compared."""
        hashed = hash_key(key)
        id = self._id_of_key.get(hashed)
        episode = None if id is None else self.get(id)
        return episode if episode is not None and hmac.compare_digest(episode.key_hash, hashed) else None

    def is_key(self, hashed: str) -> bool:
        """Return whether this is the hash of an episode's key."""
        return hashed in self._id_of_key

    def knows(self, id: str) -> bool:
        """Return whether the episode exists, in memory or in a journal."""
        return id in self._key_of_id

    def get(self, id: str) -> Episode | None:
        """Return the episode with this id, reloading it if it has left memory."""
        episode = self._by_id.get(id)
        if episode is None and id in self._key_of_id:
            episode = self._held.get(id) or self._read(id)
            if episode is None:
                return None
            self._by_id[id] = episode
        if episode is not None and episode.closed is not None:
            self._keep_closed(episode)
        return episode

    def forget(self, id: str) -> None:
        """Drop an episode and its key from memory; its journal stays."""
        self._uncompacted.pop(id, None)
        key_hash = self._key_of_id.pop(id, None)
        if key_hash is not None:
            del self._id_of_key[key_hash]
        self._let_go(id)

    def delete(self, id: str) -> None:
        """Delete an episode and its journal, without which its requests in flight can no longer commit."""
        key_hash, episode = self._key_of_id.get(id), self._by_id.get(id) or self._held.get(id)
        self.forget(id)
        if episode is not None:
            episode.close()
            if episode.journal is not None:
                episode.journal.delete()
        elif key_hash is not None and self._folder is not None:
            find_journal(self._folder, id, key_hash).unlink(missing_ok=True)

    def expire(self, after_s: float) -> int:
        """Close the episodes without a request for `after_s` seconds; return their number."""
        idle = [
            episode
            for episode in self._by_id.values()
            if episode.closed is None and not episode.num_running and episode.idle_s > after_s
        ]
        num_expired = 0
        for episode in idle:
            try:
                episode.close(f"expired after {after_s:g} s without a request")
                num_expired += 1
            except JournalError as error:
                # A full disk must not stop the gateway; the next round tries again.
                _log.warning("%s: not expired (%s)", episode.id, error)
        return num_expired

    async def compact_next(self) -> bool:
        """Compact the journal of one closed episode in another thread; False if there is none to compact."""
        id = next((id for id in self._uncompacted if not self._is_running(id)), None)
        if id is None or self._folder is None:
            return False
        path = closed_path(self._folder, id, self._key_of_id[id])
        try:
            size = path.stat().st_size
            partial = await asyncio.to_thread(write_compacted, path)
            if id in self._uncompacted and path.stat().st_size == size:
                self._swap(id, path, partial)
            else:
                partial.unlink()  # a late reward arrived, or the episode was deleted
        except (OSError, M2ForgeError) as error:
            if id in self._uncompacted:  # else the episode was deleted concurrently
                _log.warning("%s: the journal is not compacted (%s)", path.name, error)
                del self._uncompacted[id]
        return True

    def _swap(self, id: str, path: Path, partial: Path) -> None:
        compacted = path.with_suffix(COMPACT_SUFFIX)
        partial.rename(compacted)
        path.unlink()
        if self._sync == "disk":
            sync_folder(path.parent)
        episode = self._by_id.get(id) or self._held.get(id)
        if episode is not None and episode.journal is not None:
            episode.journal.switch(compacted)
        del self._uncompacted[id]

    def _is_running(self, id: str) -> bool:
        episode = self._by_id.get(id) or self._held.get(id)
        return episode is not None and bool(episode.num_running)

    def __iter__(self) -> Iterator[Episode]:
        """Iterate over the episodes in memory."""
        return iter(self._by_id.values())

    def __len__(self) -> int:
        """Return the number of episodes in memory."""
        return len(self._by_id)

    def _on_close(self, episode: Episode) -> None:
        self._file_closed(episode)
        self._keep_closed(episode)

    def _file_closed(self, episode: Episode) -> None:
        """Move the journal to where startup does not read it. If that fails, the next startup does it."""
        if self._folder is None or episode.journal is None or episode.id not in self._key_of_id:
            return
        try:
            episode.journal.move(closed_path(self._folder, episode.id, episode.key_hash))
        except JournalError as error:
            _log.warning("%s", error)
            return
        self._uncompacted[episode.id] = None

    def _keep_closed(self, episode: Episode) -> None:
        """Keep a closed episode in memory while it is among the most recently used."""
        if self._folder is None or episode.id not in self._by_id:
            return
        self._closed[episode.id] = None
        self._closed.move_to_end(episode.id)
        while len(self._closed) > self._max_closed:
            self._let_go(next(iter(self._closed)))

    def _let_go(self, id: str) -> None:
        episode = self._by_id.pop(id, None)
        self._closed.pop(id, None)
        if episode is not None and episode.journal is not None:
            episode.journal.release()

    def _restore(self, path: Path) -> None:
        try:
            self._restore_journal(path)
        except (RecordError, JournalError) as error:
            self._set_aside(path, path.name.removesuffix(SUFFIX), error)

    def _set_aside(self, path: Path, id: str, error: RecordError | JournalError) -> None:
        """Set aside an unreadable journal: only its own episode is lost, and requests with its key are refused."""
        aside = path.with_name(f"{path.name}{DAMAGED_SUFFIX}")
        self.forget(id)
        try:
            path.replace(aside)
        except OSError as failure:
            _log.warning("%s; its episode is lost, and the journal cannot be set aside (%s)", error, failure.strerror)
            return
        _log.warning("%s; the journal is set aside as %s, and its episode is lost", error, aside.name)

    def _restore_journal(self, path: Path) -> None:
        journal, entries = Journal.open(path, sync=self._sync)
        if not entries:
            # Created by a process that ended before it returned the key.
            path.unlink()
            return
        if any(isinstance(entry, Closed) for entry in entries):
            # The process ended before it moved the journal, or could not move it.
            created = _created(path, entries)
            self._know(created.id, created.key_hash)
            assert self._folder is not None
            try:
                journal.move(closed_path(self._folder, created.id, created.key_hash))
            except JournalError as error:
                _log.warning("%s; the closed journal stays where it is", error)
                return
            self._uncompacted[created.id] = None
        else:
            self._rebuild(path, journal, entries)

    def _read(self, id: str) -> Episode | None:
        assert self._folder is not None, "without journals nothing leaves memory"
        path = find_journal(self._folder, id, self._key_of_id[id])
        try:
            return self._rebuild(path, *Journal.open(path, sync=self._sync))
        except RecordError as error:
            self._set_aside(path, id, error)
            return None

    def _rebuild(self, path: Path, journal: Journal, entries: list[Entry]) -> Episode:
        episode = self._add(_created(path, entries), journal)
        episode.is_compacted = path.suffix == COMPACT_SUFFIX
        for entry in entries[1:]:
            episode.apply(entry)
        return episode

    def _add(self, created: Created, journal: Journal | None) -> Episode:
        episode = Episode(
            created,
            self._format,
            restores_thinking=self._restores_thinking,
            vocab_size=self._vocab_size,
            journal=journal,
            clock=self._clock,
            monotonic=self._monotonic,
            on_close=self._on_close,
        )
        self._by_id[episode.id] = self._held[episode.id] = episode
        self._know(created.id, created.key_hash)
        return episode

    def _know(self, id: str, key_hash: str) -> None:
        self._id_of_key[key_hash], self._key_of_id[id] = id, key_hash


def _require_writable(folder: Path) -> None:
    """Raises ConfigError if journals cannot be written at all, since every call would fail later."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"gateway.journal: nothing can be written to {folder} ({error.strerror}); make it writable for this user, "
            "or choose another folder"
        ) from error


def _created(path: Path, entries: list[Entry]) -> Created:
    first = entries[0] if entries else None
    if not isinstance(first, Created):
        begin = "nothing" if first is None else type(first).__name__
        raise RecordError(f"{path}: begins with {begin}, expected the entry that creates the episode")
    return first


def hash_key(key: str) -> str:
    """Keys are 256 random bits, so a plain hash cannot be brute-forced."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
