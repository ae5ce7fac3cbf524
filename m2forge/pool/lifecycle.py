"""States of episodes and units, and their allowed transitions.

A transition is one UPDATE that names its allowed source states, so that if two processes update the same row, one
succeeds and the other gets a row count of 0.

    episode   queued → running → finished → training → trained
              running → queued                 its worker died or the attempt failed: retry
              running → failed                 it failed too often
              finished → queued                its group is requeued
              training, trained → finished     the weights that it trained are lost
              queued, running, finished → dropped
    unit      open → ready → training → trained, and dropped from open and ready; ready: all finished and rewarded
"""

from collections.abc import Sequence
from enum import StrEnum

from sqlalchemy import Column, ColumnElement, Connection, func, literal_column, update

from m2forge.errors import M2ForgeError
from m2forge.pool.tables import episode_table, unit_table


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
    """At least one episode is not finished or has no reward yet."""
    READY = "ready"
    TRAINING = "training"
    TRAINED = "trained"
    DROPPED = "dropped"


class Origin(StrEnum):
    LOOP = "loop"
    DEPLOYED = "deployed"
    """Recorded from a deployed agent, which the loop does not run."""


class DropReason(StrEnum):
    NO_SIGNAL = "no_signal"
    """All rewards of the group are equal."""
    STALE = "stale"
    STRAGGLER = "straggler"
    FAILED = "failed"
    """An episode reached its limit of failed attempts or worker deaths."""
    NOT_ADMITTED = "not_admitted"
    """The group is a deployed agent's and the configuration does not admit those."""


class StateError(M2ForgeError, RuntimeError):
    """A transition that the current state does not allow."""


class LeaseLostError(StateError):
    """A worker's attempt is no longer the episode's current one: another replaced it, or the episode was dropped."""


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
    """Move the episodes whose state allows it; returns how many."""
    allowed = _among(episode_table.c.state, EPISODE_SOURCES[to])
    return connection.execute(update(episode_table).where(*where, allowed).values(state=to, **values)).rowcount


def move_units(connection: Connection, to: UnitState, *where: ColumnElement[bool], **values: object) -> int:
    allowed = _among(unit_table.c.state, UNIT_SOURCES[to])
    return connection.execute(update(unit_table).where(*where, allowed).values(state=to, **values)).rowcount


def _among(state: Column[str], sources: Sequence[str]) -> ColumnElement[bool]:
    """Test an expression instead of the column, so that the database finds rows by the other conditions and does not
    scan the index of states."""
    return func.coalesce(state, "").in_(sources)


def in_state(column: Column[str], state: StrEnum) -> ColumnElement[bool]:
    """Test for a state that has an index of its own, which the database considers for a constant only, not for a
    parameter."""
    return column == literal_column(f"'{state}'")
