"""States of episodes and of units, and the only ways from one to another.

A change of state is one UPDATE that names the states it may come from, so that of two processes that want the same row
one gets it and the other is told so.

    episode   queued → running → finished → training → trained
              running → queued                 its worker died or it broke: another attempt
              running → failed                 it broke too often
              finished → queued                its group is requeued
              training, trained → finished     the weights that it trained are gone
              queued, running, finished → dropped
    unit      open → ready → training → trained, and dropped from open and ready; ready: all finished and rewarded
"""

from collections.abc import Sequence
from enum import StrEnum

from sqlalchemy import Column, ColumnElement, Connection, func, update

from m2forge.errors import M2ForgeError
from m2forge.pool.schema import episode_table, unit_table


class EpisodeState(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    TRAINING = "training"
    TRAINED = "trained"
    DROPPED = "dropped"


class UnitState(StrEnum):
    OPEN = "open"
    """Some episode is not finished, or has no reward yet."""
    READY = "ready"
    TRAINING = "training"
    TRAINED = "trained"
    DROPPED = "dropped"


class Origin(StrEnum):
    LOOP = "loop"
    DEPLOYED = "deployed"
    """By an agent that somebody else runs."""


class DropReason(StrEnum):
    NO_SIGNAL = "no_signal"
    """All rewards of the group are equal."""
    STALE = "stale"
    STRAGGLER = "straggler"
    FAILED = "failed"
    """An episode broke as often as it may."""
    NOT_ADMITTED = "not_admitted"
    """A deployed agent's episode where those are not trained."""


class StateError(M2ForgeError, RuntimeError):
    """A change that the present state does not allow."""


class LeaseLostError(StateError):
    """A worker's attempt that is no longer the episode's: another one took its place, or the episode was given up."""


EPISODE_SOURCES = {
    EpisodeState.QUEUED: (EpisodeState.RUNNING, EpisodeState.FINISHED),
    EpisodeState.RUNNING: (EpisodeState.QUEUED,),
    EpisodeState.FINISHED: (EpisodeState.RUNNING, EpisodeState.TRAINING, EpisodeState.TRAINED),
    EpisodeState.FAILED: (EpisodeState.RUNNING,),
    EpisodeState.TRAINING: (EpisodeState.FINISHED,),
    EpisodeState.TRAINED: (EpisodeState.TRAINING,),
    EpisodeState.DROPPED: (EpisodeState.QUEUED, EpisodeState.RUNNING, EpisodeState.FINISHED),
}
UNIT_SOURCES = {
    UnitState.OPEN: (UnitState.OPEN, UnitState.READY),
    UnitState.READY: (UnitState.OPEN, UnitState.TRAINING, UnitState.TRAINED),
    UnitState.TRAINING: (UnitState.READY,),
    UnitState.TRAINED: (UnitState.TRAINING,),
    UnitState.DROPPED: (UnitState.OPEN, UnitState.READY),
}


def move_episodes(connection: Connection, to: EpisodeState, *where: ColumnElement[bool], **values: object) -> int:
    """Move the episodes that may be moved, and say how many there were."""
    allowed = _among(episode_table.c.state, EPISODE_SOURCES[to])
    return connection.execute(update(episode_table).where(*where, allowed).values(state=to, **values)).rowcount


def move_units(connection: Connection, to: UnitState, *where: ColumnElement[bool], **values: object) -> int:
    allowed = _among(unit_table.c.state, UNIT_SOURCES[to])
    return connection.execute(update(unit_table).where(*where, allowed).values(state=to, **values)).rowcount


def _among(state: Column[str], sources: Sequence[str]) -> ColumnElement[bool]:
    """Asked of a value and not of the column, so that rows are found by what else they are asked for, and not by
    walking through all that are in the state."""
    return func.coalesce(state, "").in_(sources)
