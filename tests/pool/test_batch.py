"""What the trainer gets and what it does not: groups given up, versions, weights that are restored, retention."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import select, text

from m2forge.errors import RecordError
from m2forge.pool import batch as batches
from m2forge.pool.config import PoolConfig, RetentionConfig
from m2forge.pool.lifecycle import DropReason, StateError
from m2forge.pool.pool import Pool
from m2forge.pool.queue import REQUEUED, SUBMITTED, TRAINED, dropped
from m2forge.pool.stored import StoredUnit, read_units
from m2forge.pool.tables import fork_table, unit_table
from m2forge.records import Domain
from tests.pool.scene import VOCAB_SIZE, Clock, play, play_all, task, version, windowed

# -- claims ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_enabled", [False, True])
def test_a_claim_is_not_held_up_by_garbage_collection(
    config: PoolConfig, monkeypatch: pytest.MonkeyPatch, is_enabled: bool
) -> None:
    """Others wait for its locks. Afterwards the collector is as it was, also after an error."""
    seen: list[bool] = []

    def claim(*given: Any) -> object:
        seen.append(gc.isenabled())
        return claim_batch(*given)

    claim_batch: Callable[..., object] = batches.claim
    monkeypatch.setattr(batches, "claim", claim)
    with Pool(config, VOCAB_SIZE) as pool:
        pool.put([(task(), 1)])
        play_all(pool)
        try:
            (gc.enable if is_enabled else gc.disable)()
            assert pool.claim(1, version(0)) is not None
            assert gc.isenabled() == is_enabled
            with pytest.raises(RecordError):
                pool.claim(0, version(0))
            assert gc.isenabled() == is_enabled
        finally:
            gc.enable()
    assert seen == [False, False]


# -- groups that are given up ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_groups_without_signal_are_skipped_counted_and_make_room(config: PoolConfig) -> None:
    with Pool(windowed(config, queue=2), VOCAB_SIZE) as pool:
        pool.put([(task(0, difficulty=0.2), 2), (task(1), 2)])
        leases = pool.lease("worker", 4)
        for lease, total in zip(leases, (1.0, 1.0, 1.0, 0.0), strict=True):
            play(pool, lease, total)
        assert pool.queue_positions(9) == [(1, "ready")]
        assert pool.tally().counts[dropped(DropReason.NO_SIGNAL)] == {0.5: 1}
        assert pool.room() == 1
    with Pool(windowed(config, queue=8, no_signal="train"), VOCAB_SIZE) as pool:
        pool.put([(task(2), 2)])
        for lease in pool.lease("worker", 2):
            play(pool, lease, 1.0)
        assert pool.queue_positions(9) == [(1, "ready"), (2, "ready")]


def test_stale_groups_are_dropped_or_requeued_whole(config: PoolConfig) -> None:
    clock = Clock()
    with Pool(windowed(config, max_staleness=2), VOCAB_SIZE, clock=clock) as pool:
        pool.put([(task(0, difficulty=7.0), 2), (task(1), 2)])
        leases = pool.lease("worker", 4)
        for lease, step in zip(leases, (1, 9, 9, 9), strict=True):
            play(pool, lease, float(lease.episode % 2), step=step)
        claimed = pool.claim(1, version(4))
        assert claimed is not None
        assert [unit.position for unit in pool.fetch(claimed)] == [1]
        assert pool.tally().counts[dropped(DropReason.STALE)] == {7.5: 1}
        assert pool.counts()["dropped"] == 2
    with Pool(windowed(config, max_staleness=2, stale="requeue"), VOCAB_SIZE) as pool:
        pool.put([(task(2), 2)])
        play_all(pool, step=1)
        assert pool.claim(1, version(4)) is None
        assert pool.queue_positions(9) == [(3, "open")]
        assert [lease.name for lease in pool.lease("worker", 2)] == ["g2-0-2", "g2-1-2"]


@pytest.mark.parametrize("policy", ["wait", "drop", "requeue"])
def test_a_stuck_head_waits_goes_or_starts_again_as_a_whole(config: PoolConfig, policy: str) -> None:
    clock = Clock()
    with Pool(windowed(config, queue=4, window=2, straggler=policy), VOCAB_SIZE, clock=clock, monotonic=clock) as pool:
        pool.put([(task(0, difficulty=5.0), 2), (task(1), 2), (task(2), 2)])
        leases = pool.lease("worker", 6)
        for lease in leases[1:]:
            play(pool, lease, float(lease.episode % 2))
        assert pool.claim(2, version(0)) is None
        assert [place for place, _ in pool.queue_positions(9)] == [0, 1, 2]
        clock.now_s += 601
        pool.renew(leases[:1])
        claimed = pool.claim(2, version(0))
        if policy == "wait":
            assert claimed is None
            return
        assert claimed is not None
        assert [unit.position for unit in pool.fetch(claimed)] == [1, 2]
        tally = pool.tally()
        counts = pool.counts()
        if policy == "drop":
            assert tally.counts[dropped(DropReason.STRAGGLER)] == {5.5: 1}
            assert tally.mean_difficulty(dropped(DropReason.STRAGGLER)) == 5.5
            assert counts["dropped"] == 2
        else:
            # Also the attempt that had ended: to keep it would favour quick ones.
            assert (tally.total(REQUEUED), counts["queued"], pool.queue_positions(9)) == (1, 2, [(3, "open")])
        assert pool.renew(leases[:1]) == leases[:1]


def test_a_batch_holds_what_fits_into_its_tokens(config: PoolConfig) -> None:
    """A token counts once for each attempt; a unit is never cut."""
    with Pool(windowed(config, queue=6, window=6), VOCAB_SIZE) as pool:
        domains = [Domain.AGENT, Domain.AGENT, Domain.CODING, Domain.AGENT, Domain.CODING]
        pool.put([(task(n, domain=domain), 2) for n, domain in enumerate(domains)])
        leases = pool.lease("worker", 10)
        for lease in leases[:8]:
            play(pool, lease, float(lease.episode % 2), num_calls=1)
        # Each attempt: 20 tokens sent and 20 sampled.
        assert pool.claim_within(321, 5, version(0)) is None, "the fourth unit fits, the fifth is not known"
        claimed = pool.claim_within(239, 5, version(0))
        assert claimed is not None
        assert [unit.position for unit in pool.fetch(claimed)] == [0, 1]
        pool.restore(version(0))
        claimed = pool.claim_within(160, 4, version(0), lambda num: {"agent": num - num // 2, "coding": num // 2})
        assert claimed is not None
        assert [unit.position for unit in pool.fetch(claimed)] == [0, 2]
        pool.commit(claimed, version(1))
        alone = pool.claim_within(1, 1, version(1))
        assert alone is not None
        pool.commit(alone, version(2))
        assert pool.batch_sizes("run") == [2, 1]
        pool.restore(version(1))
        assert pool.batch_sizes("run") == [2]
        assert pool.batch_sizes("other") == []


# -- versions ----------------------------------------------------------------------------------------------------------


def test_a_batch_is_committed_once_and_a_step_has_one(config: PoolConfig) -> None:
    with Pool(config, VOCAB_SIZE) as pool:
        pool.put([(task(n), 2) for n in range(3)])
        play_all(pool)
        first, second = pool.claim(1, version(0)), pool.claim(1, version(0))
        assert first is not None
        assert second is not None
        pool.commit(first, version(1))
        for batch, step in ((first, 2), (second, 1)):
            with pytest.raises(StateError, match="committed"):
                pool.commit(batch, version(step))
        with pytest.raises(StateError, match="follows the weights of 'run'"):
            pool.commit(second, version(2, "other"))
        pool.restore(version(1))
        with pytest.raises(StateError, match="before the pool was restored; claim another batch"):
            pool.commit(second, version(2))
        assert pool.queue_positions(9) == [(1, "ready"), (2, "ready")]


def test_what_the_restored_weights_have_not_learnt_returns(config: PoolConfig) -> None:
    with Pool(windowed(config, queue=4), VOCAB_SIZE) as pool:
        pool.put([(task(n), 2) for n in range(4)])
        play_all(pool)
        for step in range(3):
            claimed = pool.claim(1, version(step))
            assert claimed is not None
            pool.commit(claimed, version(step + 1))
        under_way = pool.claim(1, version(3))
        assert under_way is not None
        pool.put([(task(4), 2)])
        restored = pool.restore(version(1))
        assert (restored.num_returned, restored.num_deleted) == (3, 0)
        assert pool.queue_positions(9) == [(1, "ready"), (2, "ready"), (3, "ready"), (4, "open")]
        assert pool.tally().total(TRAINED) == 1
        with pytest.raises(StateError, match="before the pool was restored"):
            pool.commit(under_way, version(2))
        claimed = pool.claim(3, version(1))
        assert claimed is not None
        assert [unit.lag for unit in pool.fetch(claimed)] == [3, 3, 3]
        pool.commit(claimed, version(2))
        # Other weights have learnt nothing of it.
        assert pool.restore(version(0, "fork")).num_returned == 4
        assert pool.counts()["trained"] == 0


def test_old_episodes_are_deleted_gradually_after_a_checkpoint(config: PoolConfig) -> None:
    kept = config.model_copy(update={"retention": RetentionConfig(versions=2, sweep_episodes=2)})
    with Pool(kept, VOCAB_SIZE) as pool:
        pool.put([(task(n), 2) for n in range(6)])
        play_all(pool)
        for step in range(5):
            claimed = pool.claim(1, version(step))
            assert claimed is not None
            pool.commit(claimed, version(step + 1))
        assert pool.sweep() == 0, "no checkpoint yet"
        pool.mark_durable(version(2))
        assert [pool.sweep() for _ in range(3)] == [2, 2, 0]
        pool.mark_durable(version(5))
        assert [pool.sweep() for _ in range(2)] == [2, 0]
        assert sum(pool.counts().values()) == 6
        assert pool.tally().total(SUBMITTED) == 6
        restored = pool.restore(version(1))
        assert (restored.num_returned, restored.num_deleted) == (2, 2)


def test_bytes_may_be_the_limit(config: PoolConfig) -> None:
    with Pool(config, VOCAB_SIZE) as pool:
        pool.put([(task(n), 2) for n in range(4)])
        play_all(pool)
        for step in range(4):
            claimed = pool.claim(1, version(step))
            assert claimed is not None
            num_bytes = sum(len(call) for unit in pool.fetch(claimed) for e in unit.episodes for call in e.calls)
            pool.commit(claimed, version(step + 1))
        pool.mark_durable(version(4))
    kept = config.model_copy(update={"retention": RetentionConfig(versions=None, num_bytes=2 * num_bytes + 100)})
    with Pool(kept, VOCAB_SIZE) as pool:
        assert [pool.sweep() for _ in range(2)] == [4, 0]


def test_tokens_of_a_lost_version_count_from_their_branch_point(config: PoolConfig) -> None:
    """Steps 2 and 3 are lost; their numbers come again with other weights."""
    with Pool(windowed(config, queue=16, window=16, max_staleness=2), VOCAB_SIZE) as pool:
        pool.put([(task(n), 1) for n in range(9)])
        leases = pool.lease("worker", 7)
        for step in (1, 2, 3):
            play(pool, leases[step], 1.0)
            claimed = pool.claim(1, version(step - 1))
            assert claimed is not None
            pool.commit(claimed, version(step))
        play(pool, leases[0], 1.0, step=3)  # stored before the restore
        pool.restore(version(1))
        play(pool, leases[4], 1.0, step=3)  # in flight then
        pool.rejoin(pool.epoch() - 1)  # a weight update that began before the restore
        (late,) = pool.lease("worker", 1)
        play(pool, late, 1.0, step=3)  # begun before the sampler had the restored weights
        pool.rejoin(pool.epoch())
        play(pool, leases[5], 1.0, step=2)  # of either branch
        (fresh,) = pool.lease("worker", 1)
        play(pool, fresh, 1.0, step=2)
        counted = {unit.episodes[0].name: unit.oldest_step for unit in read_all(pool)}
        lost = (leases[0], leases[4], leases[5], late)
        assert {lease.name: counted[lease.name] for lease in lost} == {lease.name: 1 for lease in lost}
        assert counted[fresh.name] == 2
        # Two steps behind is as stale as may be; three is too stale, whatever number the lost step had.
        stale, num_returned = dropped(DropReason.STALE), 2
        assert pool.claim(1, version(3)) is not None
        assert pool.tally().total(stale) == num_returned, "they were sampled at step 0"
        assert pool.claim(1, version(4)) is not None
        assert pool.tally().total(stale) == num_returned + len(lost) - 1


def test_a_pool_of_before_gets_what_it_lacks(config: PoolConfig) -> None:
    with Pool(config, VOCAB_SIZE) as pool:
        pool.put([(task(0), 2), (task(1), 2), (task(2), 2)])
        for lease in pool.lease("worker", 4):
            play(pool, lease, float(lease.episode % 2))
        with pool.database.write() as connection:
            fork_table.drop(connection)
            connection.execute(text("ALTER TABLE unit DROP COLUMN num_tokens"))
    with Pool(config, VOCAB_SIZE) as pool:
        assert play_all(pool) == 2
        with pool.database.read() as connection:
            unit = unit_table.c
            num_tokens = connection.execute(select(unit.num_tokens).order_by(unit.id)).scalars().all()
        assert [num is None for num in num_tokens] == [True, True, False]
        # The first two are counted when they are claimed.
        claimed = pool.claim_within(2 * num_tokens[-1], 3, version(0))
        assert claimed is not None
        assert len(claimed.units) == 2


def read_all(pool: Pool) -> list[StoredUnit]:
    with pool.database.read() as connection:
        ids = connection.execute(select(unit_table.c.id)).scalars().all()
        return read_units(connection, ids, VOCAB_SIZE)
