"""The tables of a pool, the same on SQLite and PostgreSQL.

    queue     one row: the pool's counters and the policy version that it follows
    unit      what is ordered and trained as one: a group or a single episode
    episode   one attempt at a task and its outcome; earlier failed attempts are only counted
    call      what each completion call adds to those before it (pool/stored.py)
    batch     units taken for one optimizer step
    tally     number of units by difficulty that were submitted, trained, requeued, or dropped for each reason
    fork      one row while the sampler may serve a version that the trainer lost: the step where it left the lineage
    note      one row: the state from which filling the queue resumes; apart from the counters, since it is long

Transactions lock rows in this order to avoid deadlocks: queue, units by queue position, episodes by id, tally.
"""

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    text,
)

SCHEMA_VERSION = 5
QUEUE_ID = 1

metadata = MetaData()

# SQLite assigns ids only where the type is exactly INTEGER.
_Id = BigInteger().with_variant(Integer, "sqlite")

queue_table = Table(
    "queue",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("schema_version", Integer, nullable=False),
    Column("vocab_size", BigInteger, nullable=False),
    Column("next_place", BigInteger, nullable=False),
    Column("num_taken", BigInteger, nullable=False),
    Column(
        "epoch",
        BigInteger,
        nullable=False,
        comment="number of restores; a batch claimed in an earlier epoch is refused",
    ),
    Column("lineage", String, comment="lineage of the current weights; NULL before the first step"),
    Column("step", Integer, nullable=False, comment="policy step of the last commit"),
    Column("durable_step", Integer, nullable=False, comment="policy step of the newest checkpoint"),
)

unit_table = Table(
    "unit",
    metadata,
    Column("id", _Id, primary_key=True),
    Column("place", BigInteger, unique=True, comment="queue position; NULL until a deployed unit is admitted"),
    Column("is_queued", Boolean, nullable=False),
    Column("is_owed", Boolean, nullable=False, comment="dropped and not yet replaced by another task of its stage"),
    Column("group_name", String, nullable=False, index=True),
    Column("origin", String, nullable=False),
    Column("stage", String, comment="curriculum stage; NULL for units outside of it"),
    Column("domain", String, nullable=False),
    Column("difficulty", Double, nullable=False),
    Column("task", Text, nullable=False, comment="JSON"),
    Column("context", Integer, comment="maximum tokens of prompt plus completion; NULL: the model's limit"),
    Column("state", String, nullable=False),
    Column("reason", String, comment="why it was dropped"),
    Column("size", Integer, nullable=False),
    Column("num_unfinished", Integer, nullable=False),
    Column("num_unrewarded", Integer, nullable=False),
    Column("num_requeues", Integer, nullable=False),
    Column("num_skips", Integer, nullable=False, comment="consecutive groups without signal that it replaces"),
    Column("oldest_step", Integer),
    Column("taken_before", BigInteger, nullable=False, comment="number of units taken before its submission"),
    Column("lag", BigInteger),
    Column("batch", BigInteger, index=True),
    Column("lineage", String),
    Column("step", Integer, comment="policy step that it trained, or the step at which it was dropped"),
    Column("num_bytes", BigInteger, nullable=False),
    Column("num_tokens", BigInteger, comment="tokens of its episodes, set when it is ready; NULL in earlier versions"),
    Index("unit_by_step", "state", "step", "num_bytes"),
)
# A partial index: to the query planner an index that includes trained units looks as good, but it is slower.
Index(
    "queued_by_place",
    unit_table.c.place,
    sqlite_where=text("is_queued = 1"),
    postgresql_where=unit_table.c.is_queued,
)
# Without this index the planner scans units by id, and reads every trained one before the first of these.
Index(
    "complete_by_id",
    unit_table.c.id,
    sqlite_where=text("state = 'open' AND num_unfinished = 0"),
    postgresql_where=text("state = 'open' AND num_unfinished = 0"),
)
Index("owed_by_place", unit_table.c.place, sqlite_where=text("is_owed = 1"), postgresql_where=unit_table.c.is_owed)

episode_table = Table(
    "episode",
    metadata,
    Column("id", _Id, primary_key=True),
    Column("name", String, nullable=False, unique=True),
    Column("unit", BigInteger, nullable=False, index=True),
    Column("state", String, nullable=False),
    Column("attempt", Integer, nullable=False, comment="number of the current attempt; 0 before the first"),
    Column("num_failures", Integer, nullable=False, comment="number of failed attempts"),
    Column("num_deaths", Integer, nullable=False, comment="number of attempts whose worker died"),
    Column("worker", String, nullable=False),
    Column("lease_until_s", Double),
    Column("started_s", Double),
    Column("finished_s", Double),
    Column("num_calls", Integer, nullable=False),
    Column("num_tokens", BigInteger, nullable=False),
    Column("num_bytes", BigInteger, nullable=False),
    Column("oldest_step", Integer),
    Column("failure", Text),
    Column("reward_total", Double),
    Column("reward", Text, comment="JSON, including the verifier's evidence"),
    Column("step_rewards", Text, comment="JSON"),
    Column("artifacts", Text, nullable=False, comment="JSON: artifacts by name"),
    Index("episode_by_state", "state", "id"),
)
# As for units.
Index(
    "queued_by_id",
    episode_table.c.id,
    sqlite_where=text("state = 'queued'"),
    postgresql_where=text("state = 'queued'"),
)
Index(
    "running_by_id",
    episode_table.c.id,
    sqlite_where=text("state = 'running'"),
    postgresql_where=text("state = 'running'"),
)

call_table = Table(
    "call",
    metadata,
    Column("episode", BigInteger, primary_key=True, autoincrement=False),
    Column("attempt", Integer, primary_key=True, autoincrement=False),
    Column("ordinal", Integer, primary_key=True, autoincrement=False),
    Column("data", LargeBinary, nullable=False),
    # Stores the calls of one episode contiguously, whenever they were inserted.
    sqlite_with_rowid=False,
)

batch_table = Table(
    "batch",
    metadata,
    Column("id", _Id, primary_key=True),
    Column("epoch", BigInteger, nullable=False),
    Column("num_units", Integer, nullable=False),
    Column("is_open", Boolean, nullable=False),
    Column("lineage", String, comment="NULL until committed, and after a restore that lost its weights"),
    Column("step", Integer),
    UniqueConstraint("lineage", "step"),
)

tally_table = Table(
    "tally",
    metadata,
    Column("kind", String, primary_key=True),
    Column("difficulty", Double, primary_key=True, comment="midpoint of the difficulty bin"),
    Column("num_units", BigInteger, nullable=False),
)

fork_table = Table(
    "fork",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("step", Integer, nullable=False, comment="tokens of later steps count as sampled at this step"),
)

note_table = Table(
    "note",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("text", Text, nullable=False),
)
