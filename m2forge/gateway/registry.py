"""All episodes of a gateway, by id and by key; written down in a folder of journals, and found again after a restart.

A key is told once, when its episode is made, and kept as a hash.

Where there are journals, memory holds the episodes that are open and the last ones that were closed. Of the others it
holds id and hash, and whoever asks for one has it read again: for a late reward, or a retry. As long as anybody holds
an episode, it is that one and no second. A start reads the journals of open episodes alone (`closed_journal`).

Episodes that are asked for nothing expire: they are closed, and their keys are refused.
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
from m2forge.gateway.closed_journal import COMPACT_SUFFIX, closed_path, find_journal, list_closed, write_compacted
from m2forge.gateway.config import Budget
from m2forge.gateway.entry import Closed, Created, Entry
from m2forge.gateway.episode import Episode
from m2forge.gateway.journal import SUFFIX, Journal, JournalError, sync_folder
from m2forge.records import Sampling, Task
from m2forge.text.format import ChatFormat

KEY_PREFIX = "m2f-"
MAX_CLOSED = 256
DAMAGED_SUFFIX = ".damaged"
"""Behind the name of a journal that could not be read."""
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
        """`budget`: of episodes that are made without one. `folder`: of the journals; without it nothing is kept, and
        nothing leaves memory. `vocab_size`: of the network, where it knows more ids than its tokenizer. `clock`: by it
        records are dated; `monotonic`: by it budgets of time are spent. `max_closed`: closed episodes that stay in
        memory though they could be read again."""
        self._format, self._restores_thinking, self._clock = format, restores_thinking, clock
        self._vocab_size, self._monotonic = vocab_size, monotonic
        self._budget, self._folder = budget or Budget(), folder
        self._sync: Literal["system", "disk"] = sync
        self._by_id: dict[str, Episode] = {}
        """In memory."""
        self._closed: OrderedDict[str, None] = OrderedDict()
        """Of these, the closed ones, the last that were asked for at the end."""
        self._max_closed = max_closed
        self._held: WeakValueDictionary[str, Episode] = WeakValueDictionary()
        """Those that somebody holds."""
        self._id_of_key: dict[str, str] = {}
        """By the hashes of keys: episodes in memory, and those that can be read again."""
        self._key_of_id: dict[str, str] = {}
        self._uncompacted: dict[str, None] = {}
        """Closed episodes whose journals still hold texts that no request can return."""
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
        """An episode and its key, which is told this once and kept as a hash. `sampling`: takes the place of what its
        requests ask for. `task`: whose tools it may call. `context`: tokens of prompt and completion together, where
        the model allows as many."""
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
        """The episode of a key. How long it takes tells nothing about keys: their hashes are compared, and whole."""
        hashed = hash_key(key)
        id = self._id_of_key.get(hashed)
        episode = None if id is None else self.get(id)
        return episode if episode is not None and hmac.compare_digest(episode.key_hash, hashed) else None

    def is_key(self, hashed: str) -> bool:
        """Whether it is the hash of an episode's key."""
        return hashed in self._id_of_key

    def knows(self, id: str) -> bool:
        """Whether there is such an episode, in memory or in a journal."""
        return id in self._key_of_id

    def get(self, id: str) -> Episode | None:
        """The episode of that id; one that has left memory is read again."""
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
        """Let an episode go from memory, key and all; its journal stays."""
        self._uncompacted.pop(id, None)
        key_hash = self._key_of_id.pop(id, None)
        if key_hash is not None:
            del self._id_of_key[key_hash]
        self._let_go(id)

    def delete(self, id: str) -> None:
        """Let an episode go for good: its journal too. What of it is in flight cannot be committed any more."""
        key_hash, episode = self._key_of_id.get(id), self._by_id.get(id) or self._held.get(id)
        self.forget(id)
        if episode is not None:
            episode.close()
            if episode.journal is not None:
                episode.journal.delete()
        elif key_hash is not None and self._folder is not None:
            find_journal(self._folder, id, key_hash).unlink(missing_ok=True)

    def expire(self, after_s: float) -> int:
        """Close the episodes that were asked for nothing for so long; how many."""
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
                # A full disk ends no gateway; the next round tries again.
                _log.warning("%s: not expired (%s)", episode.id, error)
        return num_expired

    async def compact_next(self) -> bool:
        """Compact the journal of one closed episode, in another thread; False if there is none to compact."""
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
                partial.unlink()  # a late reward came, or the episode was deleted
        except (OSError, M2ForgeError) as error:
            if id in self._uncompacted:  # else the episode was deleted meanwhile
                _log.warning("%s: the journal is not compacted (%s)", path.name, error)
                del self._uncompacted[id]
        return True

    def _swap(self, id: str, path: Path, partial: Path) -> None:
        whole = path.with_suffix(COMPACT_SUFFIX)
        partial.rename(whole)
        path.unlink()
        if self._sync == "disk":
            sync_folder(path.parent)
        episode = self._by_id.get(id) or self._held.get(id)
        if episode is not None and episode.journal is not None:
            episode.journal.switch(whole)
        del self._uncompacted[id]

    def _is_running(self, id: str) -> bool:
        episode = self._by_id.get(id) or self._held.get(id)
        return episode is not None and bool(episode.num_running)

    def __iter__(self) -> Iterator[Episode]:
        """Those in memory."""
        return iter(self._by_id.values())

    def __len__(self) -> int:
        """How many are in memory."""
        return len(self._by_id)

    def _on_close(self, episode: Episode) -> None:
        self._file_closed(episode)
        self._keep_closed(episode)

    def _file_closed(self, episode: Episode) -> None:
        """Put the journal where a start does not read it. Where that fails the next start does it."""
        if self._folder is None or episode.journal is None or episode.id not in self._key_of_id:
            return
        try:
            episode.journal.move(closed_path(self._folder, episode.id, episode.key_hash))
        except JournalError as error:
            _log.warning("%s", error)
            return
        self._uncompacted[episode.id] = None

    def _keep_closed(self, episode: Episode) -> None:
        """It stays in memory while it is one of the last."""
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
            self._restore_whole(path)
        except (RecordError, JournalError) as error:
            self._set_aside(path, path.name.removesuffix(SUFFIX), error)

    def _set_aside(self, path: Path, id: str, error: RecordError | JournalError) -> None:
        """One journal that cannot be read costs its own episode and no other: agents that hold its key are refused."""
        aside = path.with_name(f"{path.name}{DAMAGED_SUFFIX}")
        self.forget(id)
        try:
            path.replace(aside)
        except OSError as failure:
            _log.warning("%s; its episode is lost, and the journal cannot be set aside (%s)", error, failure.strerror)
            return
        _log.warning("%s; the journal is set aside as %s, and its episode is lost", error, aside.name)

    def _restore_whole(self, path: Path) -> None:
        journal, entries = Journal.open(path, sync=self._sync)
        if not entries:
            # Made by a process that ended before it had told anybody the key.
            path.unlink()
            return
        if any(isinstance(entry, Closed) for entry in entries):
            # Its process ended before it had moved the journal, or could not.
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
    """Raises ConfigError where journals cannot be written at all: every call would fail later."""
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
        raise RecordError(f"{path}: begins with {begin}, expected the episode's making")
    return first


def hash_key(key: str) -> str:
    """Keys are 256 random bits, so a plain hash cannot be searched."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
