"""Configuration of the pool: the database, the window (how far training may leave submission order), and retention.

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
    """The order in which units are trained; `pool/window.py` specifies it."""

    unit: Literal["group", "episode"] = "group"
    """What is queued and taken as one unit: a group or a single episode."""
    queue: Count = 256
    """N: maximum number of queued units; more are refused until some are taken."""
    window: Count | Share = 0.3
    """W: a number of units, as an integer, or a share of N. 1 is strict FIFO; the share 1.0, or N, takes any finished
    unit."""
    max_staleness: Annotated[int, Field(ge=0)] | None = None
    """Maximum number of versions between a unit's oldest token and the weights it trains; a staler unit is given up.
    None: N and W alone bound it. A token of a lost version counts as sampled where that version left the lineage.
    """
    stale: Literal["drop", "requeue"] = "drop"
    """What to do with a unit that is too stale."""
    straggler: Literal["wait", "requeue", "drop"] = "wait"
    """What to do with a head that keeps a batch waiting longer than `straggler_s`. requeue: its group restarts at the
    end of the queue. drop: its group is dropped."""
    straggler_s: Seconds = 600.0
    """A head is a straggler once its first episode started this long ago and the trainer has seen it unfinished this
    long."""
    no_signal: Literal["skip", "train"] = "skip"
    """What to do with a group whose rewards are all equal, so that its advantages are zero. skip: another task of its
    stage and domain replaces it."""
    max_skips: Count = 32
    """Maximum consecutive skipped groups for one slot of a batch; the next group is trained even if its rewards are
    equal. Otherwise a domain in which every group passes, or none, would stop training, since batches wait for their
    quotas."""
    signal_spread: Annotated[float, Field(ge=0)] = 0.0
    """Rewards that differ by no more than this count as equal."""

    @property
    def size(self) -> int:
        """W in units."""
        return self.window if isinstance(self.window, int) else max(1, round(self.window * self.queue))


class RetentionConfig(Config):
    """How many trained and dropped units to retain for inspection. Units that a restored checkpoint may need are
    always retained."""

    versions: Count | None = 64
    """Number of last policy versions whose units are retained; None retains all."""
    num_bytes: Count | None = None
    """Limit on the bytes of recorded calls; None sets no limit."""
    sweep_episodes: Count = 64
    """Maximum episodes deleted per sweep, so that no other transaction waits for it."""


class PoolConfig(Config):
    url: str = "sqlite:///pool.db"
    """`sqlite:///PATH` or `postgresql://USER@HOST/DATABASE`; a password comes from PGPASSWORD or the password file."""
    sync: Literal["system", "disk"] = "system"
    """When SQLite counts a transaction as written. system: once the operating system has it, which survives the death
    of this process. disk: once it is on disk, which survives a power loss. PostgreSQL decides this itself."""
    wal_bytes: Count = 64 << 20
    """Approximate size of SQLite's write-ahead log at which the writer waits for readers and truncates it."""
    busy_timeout_s: Seconds = 60.0
    """Seconds to wait for another process's transaction."""
    reconnect_s: Seconds = 300.0
    """Seconds for which a running process repeats a transaction while PostgreSQL restarts or drops its connections. A
    run does not start without its database."""
    lease_s: Seconds = 60.0
    """A worker counts as dead once another process has observed its lease unrenewed for this long."""
    max_failures: Count = 3
    """Number of failed attempts of an episode at which its group is dropped."""
    max_deaths: Count = 100
    """Number of worker deaths in an episode's attempts at which its group is dropped. A death says little about the
    episode, but an episode that kills every worker must not be retried forever."""
    admit_deployed: bool = False
    """Whether groups of deployed agents' episodes, which the loop did not start, are trained once they are rewarded."""
    deployed_s: Seconds = 604800.0
    """A deployed agent's episode is deleted if its group is not completely rewarded within this time of its opening."""
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
            raise ValueError(
                "url must hold no password, which the run would store in its config.toml; set PGPASSWORD instead"
            )
        if parts.scheme == "sqlite" and not parts.path.strip("/"):
            raise ValueError("url must name a file: processes share the pool, so it cannot live in memory")
        return self
