"""Importance ratios of an episode's tokens, if the run keeps those of the step that trained it."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sqlalchemy import Connection, select

from m2forge.errors import NotFoundError
from m2forge.forge.ratio import path_of, read_ratios
from m2forge.page.episode_list import JOINED, SHOWN, summary
from m2forge.pool.schema import episode_table
from m2forge.pool.state import EpisodeState
from m2forge.records import FloatArray


@dataclass(frozen=True, slots=True)
class EpisodeRatios:
    by_call: Mapping[int, FloatArray] = field(default_factory=dict)
    """log r of the tokens that each call sampled."""
    absence: str | None = None
    """Why there are no ratios."""


class Ratios:
    """Caches the last file read, since users browse the episodes of a step."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._key: tuple[int, int] | None = None
        self._read: Mapping[str, FloatArray] | None = None

    def of_episode(self, connection: Connection, episode: int) -> EpisodeRatios:
        query = select(*SHOWN).select_from(JOINED).where(episode_table.c.id == episode)
        row = connection.execute(query).one_or_none()
        if row is None:
            raise NotFoundError(f"episode {episode} is not in the pool; retention may have removed it")
        if row.state != EpisodeState.TRAINED:
            return EpisodeRatios(absence="it has not been trained")
        found = self._of_step(row.unit_step)
        if found is None:
            return EpisodeRatios(absence=f"those of step {row.unit_step} are not kept")
        names = {call: f"{summary(row)['name']}/{call}" for call in range(row.num_calls)}
        by_call = {call: found[name] for call, name in names.items() if name in found}
        return EpisodeRatios(by_call, None if by_call else f"step {row.unit_step} refused its calls")

    def _of_step(self, step: int) -> Mapping[str, FloatArray] | None:
        with self._lock:
            try:
                # A step that was run again has a different file.
                key = (step, path_of(self._folder, step).stat().st_mtime_ns)
            except OSError:
                return None
            if key != self._key:
                self._key, self._read = key, read_ratios(self._folder, step)
            return self._read
