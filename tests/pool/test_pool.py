"""The way of episodes through the pool, on both databases."""

import time

import pytest
from sqlalchemy import select, update

from m2forge.errors import ConfigError, RecordError
from m2forge.pool.config import PoolConfig
from m2forge.pool.lifecycle import DropReason, EpisodeState, LeaseLostError, StateError
from m2forge.pool.pool import Pool
from m2forge.pool.queue import dropped
from m2forge.pool.record import Append
from m2forge.pool.stored import Outcome, Queued
from m2forge.pool.tables import SCHEMA_VERSION, episode_table, queue_table
from m2forge.records import Domain
from m2forge.tree.token_tree import TokenTree
from tests.pool.scene import (
    VOCAB_SIZE,
    Clock,
    calls,
    play,
    play_all,
    record,
    reward,
    task,
    version,
    windowed,
)


def test_a_group_goes_from_the_queue_to_the_trainer(config: PoolConfig) -> None:
    with Pool(config, VOCAB_SIZE) as pool:
        (group,) = pool.put([(task(3, difficulty=1.5), 2)])
        first, second = pool.lease("worker", 5)
        assert (first.name, second.name, first.group) == ("g0-0-1", "g0-1-1", group)
        made = calls(1, 3, step=4)
        record(pool, first, made)
        pool.finish(first, Outcome(artifacts={"log": "file:///log"}, failure="out of time"))
        assert pool.claim(1, version(7)) is None
        play(pool, second, 0.0)
        pool.reward(first, reward(1.0), (0.0, 0.25, 0.75))
        claimed = pool.claim(1, version(7))
        assert claimed is not None
        (unit,) = pool.fetch(claimed)
        episode = unit.episodes[0]
        tree = TokenTree(VOCAB_SIZE)
        for index, call in enumerate(made):
            tree.add(call, f"g0-0-1/{index}", episode="g0-0-1")
        assert episode.tree() == tree
        assert episode.episode().calls == tuple(made)
        assert (episode.task, episode.reward, episode.step_rewards) == (task(3, 1.5), reward(1.0), (0.0, 0.25, 0.75))
        assert (episode.failure, episode.artifacts) == ("out of time", {"log": "file:///log"})
        assert (unit.lag, unit.oldest_step, unit.group) == (0, 0, group)
        assert pool.counts()[EpisodeState.TRAINING] == 2
        pool.commit(claimed, version(8))
        assert pool.counts()[EpisodeState.TRAINED] == 2
        assert pool.claim(1, version(8)) is None


def test_the_pool_takes_by_the_window(config: PoolConfig) -> None:
    with Pool(windowed(config, queue=8, window=4), VOCAB_SIZE) as pool:
        pool.put([(task(n), 1) for n in range(8)])
        leases = pool.lease("worker", 8)
        for place in (1, 3, 4, 5):
            play(pool, leases[place], 1.0)
        assert pool.claim(3, version(0)) is None
        claimed = pool.claim(2, version(0))
        assert claimed is not None
        assert [unit.position for unit in pool.fetch(claimed)] == [1, 3]
        play(pool, leases[0], 1.0)
        claimed = pool.claim(3, version(0))
        assert claimed is not None
        assert [unit.position for unit in pool.fetch(claimed)] == [0, 4, 5]
        assert pool.queue_positions(9) == [(2, "open"), (6, "open"), (7, "open")]


def test_a_full_queue_refuses_and_says_how_much_fits(config: PoolConfig) -> None:
    with Pool(windowed(config, queue=3), VOCAB_SIZE) as pool:
        pool.put([(task(n), 2) for n in range(2)])
        with pytest.raises(StateError, match="room for 1 of 3"):
            pool.put([(task(2), 2), (task(3), 2)])
        assert pool.room() == 1
        with pytest.raises(RecordError, match="1 episode or more, received 0"):
            pool.put([(task(2), 0)])


def test_a_note_is_there_exactly_if_its_tasks_are(config: PoolConfig) -> None:
    with Pool(windowed(config, queue=2), VOCAB_SIZE) as pool:
        assert pool.note() is None
        pool.put([(task(0), 1)], "first")
        with pytest.raises(StateError, match="room for 1"):
            pool.put([(task(1), 1), (task(2), 1)], "refused")
        assert pool.note() == "first"
        pool.put([(task(1), 1)], "second")
    with Pool(config, VOCAB_SIZE) as pool:
        assert pool.note() == "second"


def test_a_pool_of_another_schema_is_refused(config: PoolConfig) -> None:
    with Pool(config, VOCAB_SIZE) as pool, pool.database.write() as connection:
        connection.execute(update(queue_table).values(schema_version=SCHEMA_VERSION - 1))
    with pytest.raises(ConfigError, match=f"schema_version is {SCHEMA_VERSION - 1}, expected {SCHEMA_VERSION}"):
        Pool(config, VOCAB_SIZE)


def test_quotas_fill_a_batch_by_domain(config: PoolConfig) -> None:
    with Pool(windowed(config, queue=4, window=4), VOCAB_SIZE) as pool:
        domains = [Domain.CODING, Domain.CODING, Domain.AGENT, Domain.CODING]
        pool.put([(task(n, domain=domain), 1) for n, domain in enumerate(domains)])
        play_all(pool)
        claimed = pool.claim(2, version(0), {"coding": 1, "agent": 1})
        assert claimed is not None
        assert [unit.position for unit in pool.fetch(claimed)] == [0, 2]


@pytest.mark.slow
def test_a_rare_label_is_found_beyond_window_and_queue_page(config: PoolConfig) -> None:
    with Pool(windowed(config, queue=64, window=2), VOCAB_SIZE) as pool:
        domains = [Domain.CODING] * 20 + [Domain.AGENT] + [Domain.CODING] * 5 + [Domain.AGENT]
        pool.put([(task(n, domain=domain), 2) for n, domain in enumerate(domains)], stage="early")
        play_all(pool)
        quotas = {"early/coding": 3, "early/agent": 1}
        taken = []
        while (claimed := pool.claim(4, version(0), quotas)) is not None:
            taken.append([unit.position for unit in pool.fetch(claimed)])
        assert taken == [[0, 1, 2, 20], [3, 4, 5, 26]], "the third batch waits: no other domain fills its share"


def test_a_dropped_unit_is_owed_until_its_domain_replaces_it(config: PoolConfig) -> None:
    with Pool(windowed(config, queue=1, max_skips=2), VOCAB_SIZE) as pool:
        pool.put([(task(), 2)], stage="early")
        for num_skips in (1, 2):
            for lease in pool.lease("worker", 2):
                play(pool, lease, 1.0)
            (missing,) = pool.unreplaced()
            assert (missing.stage, missing.domain, missing.num_units, missing.num_skips) == (
                "early",
                "agent",
                1,
                num_skips,
            )
            with pytest.raises(RecordError, match="expected a task of the domain agent"):
                pool.replace([(missing, task(1, domain=Domain.CODING), 2)])
            pool.replace([(missing, task(num_skips), 2)], note=f"note {num_skips}")
            assert (pool.unreplaced(), pool.note()) == ([], f"note {num_skips}")
            with pytest.raises(StateError, match="read `unreplaced` again"):
                pool.replace([(missing, task(1), 2)])
        for lease in pool.lease("worker", 2):
            play(pool, lease, 1.0)
        assert pool.queue_positions(1) == [(2, "ready")], "after so many skips it is trained as it is"
        assert pool.claim(1, version(0), {"early/agent": 1}) is not None


def test_a_groups_context_goes_with_its_leases_and_replacements(config: PoolConfig) -> None:
    limited = windowed(config, queue=8)
    with Pool(limited, VOCAB_SIZE) as pool:
        pool.put([Queued(task(0), 2, 512), (task(1), 2)], stage="only")
        first, *others = pool.lease("w", 4)
        assert [lease.context for lease in (first, *others)] == [512, 512, None, None]
        pool.interrupt(first, "its process died")
    with Pool(limited, VOCAB_SIZE) as pool:
        (again,) = pool.lease("w", 4)
        assert (again.episode, again.context) == (first.episode, 512)
        for lease in (again, others[0]):
            play(pool, lease, 0.0)
        (missing,) = pool.unreplaced()
        pool.replace([(missing, task(2), 2)])
        assert [lease.context for lease in pool.lease("w", 4)] == [512, 512]


def test_episodes_may_be_units_of_their_own(config: PoolConfig) -> None:
    with Pool(windowed(config, unit="episode", queue=4), VOCAB_SIZE) as pool:
        pool.put([(task(), 3)])
        leases = pool.lease("worker", 3)
        play(pool, leases[0], 1.0)
        claimed = pool.claim(1, version(0))
        assert claimed is not None
        assert [episode.name for unit in pool.fetch(claimed) for episode in unit.episodes] == ["g0-0-1"]
        # What is left of the group goes together.
        for attempt in (1, 2, 3):
            (lease,) = [lease for lease in pool.leases_of("worker") if lease.name == f"g0-1-{attempt}"]
            pool.fail(lease, "broken")
            pool.lease("worker", 1)
        counts = pool.counts()
        assert (counts["training"], counts["failed"], counts["dropped"]) == (1, 1, 1)


# -- attempts ----------------------------------------------------------------------------------------------------------


def test_a_dead_workers_episode_restarts_under_a_new_attempt(config: PoolConfig) -> None:
    clock = Clock()
    with Pool(config, VOCAB_SIZE, clock=clock, monotonic=clock) as pool:
        pool.put([(task(), 2)])
        old, other = pool.lease("dead", 2)
        record(pool, old, calls(0, 2))
        assert pool.requeue_expired() == []
        clock.now_s += 40
        assert pool.renew([other]) == []
        clock.now_s += 40
        assert [lease.name for lease in pool.requeue_expired()] == [old.name]
        assert pool.renew([old, other]) == [old]
        late = Append(old, old.writer(VOCAB_SIZE).write(calls(0, 1)[0]))
        (refusal,) = pool.append([late])
        assert isinstance(refusal, LeaseLostError)
        (new,) = pool.lease("alive", 1)
        assert (new.episode, new.name, new.num_calls) == (old.episode, "g0-0-2", 0)
        (refusal,) = pool.append([late])
        assert isinstance(refusal, LeaseLostError)
        assert "attempt 2" in str(refusal)
        for refused in (lambda: pool.finish(old, Outcome()), lambda: pool.fail(old, "late")):
            with pytest.raises(LeaseLostError):
                refused()
        play(pool, new, 1.0)
        play(pool, other, 0.0)
        claimed = pool.claim(1, version(0))
        assert claimed is not None
        assert [episode.name for episode in pool.fetch(claimed)[0].episodes] == ["g0-0-2", "g0-1-1"]
        assert [len(episode.calls) for episode in pool.fetch(claimed)[0].episodes] == [2, 2]


def test_a_lease_that_was_renewed_in_time_is_kept(config: PoolConfig) -> None:
    clock = Clock()
    with Pool(config, VOCAB_SIZE, clock=clock, monotonic=clock) as pool:
        pool.put([(task(), 1)])
        leases = pool.lease("worker", 1)
        for _ in range(3):
            clock.now_s += 59
            assert pool.requeue_expired() == []
            assert pool.renew(leases) == []
        assert [lease.name for lease in pool.release("worker")] == ["g0-0-1"]
        assert pool.counts()["queued"] == 1


@pytest.mark.parametrize("jump_s", [3600.0, -3600.0])
def test_a_clock_set_by_an_hour_loses_no_lease(config: PoolConfig, jump_s: float) -> None:
    clock, monotonic = Clock(), Clock()

    def pass_time(seconds: float) -> list[str]:
        clock.now_s += seconds
        monotonic.now_s += seconds
        return [lease.name for lease in pool.requeue_expired()]

    with Pool(config, VOCAB_SIZE, clock=clock, monotonic=monotonic) as pool:
        pool.put([(task(), 2)])
        alive, _ = pool.lease("worker", 2)
        assert pass_time(0) == []
        assert pass_time(30) == []
        clock.now_s += jump_s
        assert pass_time(1) == []
        lost = []
        for _ in range(3):
            assert pool.renew([alive]) == []
            lost += pass_time(20)
        assert lost == ["g0-1-1"], "this lease was not renewed for 91 s, of which the database's clock knows nothing"
        assert pool.counts()["running"] == 1


def test_the_database_tells_the_time_of_leases(config: PoolConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    with Pool(config, VOCAB_SIZE) as pool:
        monkeypatch.setattr(time, "time", lambda: 0.0)
        pool.put([(task(), 1)])
        pool.lease("worker", 1)
        monkeypatch.undo()
        with pool.database.read() as connection:
            until_s = connection.execute(select(episode_table.c.lease_until_s)).scalar_one()
        assert abs(until_s - time.time() - config.lease_s) < 30


def test_dead_workers_do_not_use_up_an_episodes_failures(config: PoolConfig) -> None:
    config = config.model_copy(update={"max_deaths": 5})
    with Pool(config, VOCAB_SIZE) as pool:
        pool.put([(task(), 1)])
        for attempt in range(1, 5):
            assert [lease.attempt for lease in pool.lease("worker", 1)] == [attempt]
            assert len(pool.release("worker")) == 1
        (lease,) = pool.lease("worker", 1)
        assert pool.fail(lease, "no disk") == EpisodeState.QUEUED
        # One that kills every worker comes to an end all the same.
        pool.lease("worker", 1)
        pool.release("worker")
        assert pool.counts()["failed"] == 1


def test_a_group_with_an_always_failing_episode_is_dropped_whole(config: PoolConfig) -> None:
    with Pool(config, VOCAB_SIZE) as pool:
        pool.put([(task(0, difficulty=3.2), 2), (task(1), 2)])
        bad, good = pool.lease("worker", 2)
        play(pool, good, 1.0)
        assert pool.fail(bad, "no disk") == EpisodeState.QUEUED
        for expected in (EpisodeState.QUEUED, EpisodeState.FAILED):
            (bad,) = pool.lease("worker", 1)
            assert pool.fail(bad, "no disk") == expected
        counts = pool.counts()
        assert (counts["failed"], counts["dropped"], counts["queued"]) == (1, 1, 2)
        assert pool.tally().counts[dropped(DropReason.FAILED)] == {3.5: 1}
        assert pool.queue_positions(9) == [(1, "open")]


def test_calls_are_stored_once_and_in_order(config: PoolConfig) -> None:
    with Pool(config, VOCAB_SIZE) as pool:
        pool.put([(task(), 2)])
        lease, other = pool.lease("worker", 2)
        writer = lease.writer(VOCAB_SIZE)
        items = [Append(lease, writer.write(call)) for call in calls(0, 4)]
        beside = Append(other, other.writer(VOCAB_SIZE).write(calls(1, 1)[0]))
        assert pool.append(items[:2]) == [None, None]
        # Again, as somebody does who never heard that it was done; then with a gap, beside one that is in order.
        assert pool.append(items[:3]) == [None, None, None]
        (refusal,) = pool.append([Append(lease, writer.write(calls(0, 5)[4]))])
        assert isinstance(refusal, RecordError)
        assert "expected call 3 next" in str(refusal)
        gap = Append(lease, writer.write(calls(0, 6)[5]))
        assert [type(reason) for reason in pool.append([gap, beside])] == [RecordError, type(None)]
        assert pool.append(items[3:]) == [None]
        assert pool.append([]) == []
        assert [found.num_calls for found in pool.leases_of("worker")] == [4, 1]


def test_a_reward_may_come_again_but_not_another_one(config: PoolConfig) -> None:
    with Pool(config, VOCAB_SIZE) as pool:
        pool.put([(task(), 2)])
        lease, _ = pool.lease("worker", 2)
        with pytest.raises(StateError, match="received one that is running"):
            pool.reward(lease, reward(1.0))
        record(pool, lease, calls(0, 2))
        for _ in range(2):
            pool.finish(lease, Outcome())
        with pytest.raises(RecordError, match="one per call, 2, received 1"):
            pool.reward(lease, reward(1.0), (1.0,))
        for _ in range(2):
            pool.reward(lease, reward(1.0), (0.0, 1.0))
        with pytest.raises(StateError, match="already has another reward"):
            pool.reward(lease, reward(0.0))


def test_what_is_finished_and_not_judged_is_found_again(config: PoolConfig) -> None:
    with Pool(config, VOCAB_SIZE) as pool:
        pool.put([(task(n), 2) for n in range(2)])
        for lease in pool.lease("worker", 3):
            record(pool, lease, calls(lease.episode, 2))
            pool.finish(lease, Outcome())
    with Pool(config, VOCAB_SIZE) as pool:
        ((unit, leases),) = pool.unjudged(8)
        assert [episode.name for episode in unit.episodes] == [lease.name for lease in leases] == ["g0-0-1", "g0-1-1"]
        for number, lease in enumerate(leases):
            pool.reward(lease, reward(float(number)))
        assert pool.unjudged(8) == []
        assert pool.queue_positions(1) == [(0, "ready")]


def test_a_pool_of_another_vocabulary_is_refused(config: PoolConfig) -> None:
    Pool(config, VOCAB_SIZE).close()
    with pytest.raises(ConfigError, match="vocab_size is 70000, expected 5"):
        Pool(config, 5)
