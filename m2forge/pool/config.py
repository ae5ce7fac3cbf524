"""Where episodes are kept, how far training may depart from the order of submission, and what is kept how long.

[pool]
url = "sqlite:///runs/forge/pool.db"

[pool.window]
queue = 256
window = 0.3

[pool.retention]
versions = 16
"""

from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from m2forge.config import Config

Count = Annotated[int, Field(gt=0, le=1 << 31)]
Seconds = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(gt=0, le=1)]


class WindowConfig(Config):
    """The order in which units are trained; `pool/window.py` states it."""

    unit: Literal["group", "episode"] = "group"
    """What is queued and taken as one."""
    queue: Count = 256
    """N: units that are queued at once; more are refused until some are taken."""
    window: Count | Share = 0.3
    """W: units, as an integer, or a share of N. 1 is strict FIFO; the share 1.0, or N, takes whatever is finished."""
    max_staleness: Annotated[int, Field(ge=0)] | None = None
    """Versions that may lie between a unit's oldest token and the weights it trains; a staler one is given up. None
    leaves the bound to N and W. A token of a lost version counts as sampled where that left the lineage."""
    stale: Literal["drop", "requeue"] = "drop"
    """What becomes of a unit that is too stale."""
    straggler: Literal["wait", "requeue", "drop"] = "wait"
    """What becomes of a head that keeps a batch waiting for longer than `straggler_s`. Requeued, its whole group starts
    again at the end of the queue; dropped, its whole group goes."""
    straggler_s: Seconds = 600.0
    """Seconds since the first episode of the head began, and that the trainer has seen it unfinished."""
    no_signal: Literal["skip", "train"] = "skip"
    """What becomes of a group whose rewards are all equal, which teaches nothing: skipped, it is replaced by another
    task of its stage and domain."""
    max_skips: Count = 32
    """Groups that are skipped in a row for one slot of a batch; the next one is trained even if its rewards are equal.
    A domain in which every group passes, or none, would otherwise stop training, since batches wait for their quotas.
    """
    signal_spread: Annotated[float, Field(ge=0)] = 0.0
    """Rewards that differ by no more than this are equal."""

    @property
    def size(self) -> int:
        """W in units."""
        return self.window if isinstance(self.window, int) else max(1, round(self.window * self.queue))


class RetentionConfig(Config):
    """How much of what was trained or dropped stays to be looked at. What a restored checkpoint may need stays."""

    versions: Count | None = 64
    """Policy versions back; None keeps all."""
    num_bytes: Count | None = None
    """Of recorded calls; None sets no limit."""
    sweep_episodes: Count = 64
    """Episodes that one sweep deletes at most, so that nobody waits for it."""


class PoolConfig(Config):
    url: str = "sqlite:///pool.db"
    """`sqlite:///PATH`, or `postgresql://USER@HOST/DATABASE`. A password comes from PGPASSWORD or the password file."""
    sync: Literal["system", "disk"] = "system"
    """When SQLite counts a transaction as written. system: when the operating system has it, which outlives this
    process. disk: when the disk has it, which outlives a loss of power. PostgreSQL decides this itself."""
    wal_bytes: Count = 64 << 20
    """SQLite's log may grow to about this before the writer waits for readers and empties it."""
    busy_timeout_s: Seconds = 60.0
    """Seconds to wait for another process's transaction."""
    lease_s: Seconds = 60.0
    """A worker whose lease another process has seen unrenewed for so long is taken for dead."""
    max_failures: Count = 3
    """Attempts of an episode that may break; then its group is dropped."""
    max_deaths: Count = 100
    """Attempts of an episode whose workers may die. A worker's death says little about the episode, but one that kills
    every worker must not go on for ever."""
    admit_deployed: bool = False
    """Whether groups of deployed agents' episodes, which the loop did not start, are trained once they are rewarded."""
    deployed_s: Seconds = 604800.0
    """A deployed agent's episode is given up where its whole group is not rewarded so long after it was opened."""
    difficulty_bin: Annotated[float, Field(gt=0)] = 1.0
    """Width of the bins by which submitted, trained and dropped units are counted."""
    window: WindowConfig = WindowConfig()
    retention: RetentionConfig = RetentionConfig()

    @model_validator(mode="after")
    def _check(self) -> Self:
        parts = urlsplit(self.url)
        if parts.scheme not in ("sqlite", "postgresql"):
            raise ValueError(f"url must begin with sqlite:/// or postgresql://, received {parts.scheme!r}")
        if parts.password:
            raise ValueError("url must hold no password, which would be written down; set PGPASSWORD instead")
        if parts.scheme == "sqlite" and not parts.path.strip("/"):
            raise ValueError("url must name a file: processes share the pool, so it cannot live in memory")
        return self
