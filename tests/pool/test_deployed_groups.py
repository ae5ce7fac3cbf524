"""Groups of deployed agents: stored whole and once, and trained in the slots of their domain, on both databases."""

from dataclasses import replace

import pytest

from m2forge.errors import ExistsError, RecordError
from m2forge.pool.config import PoolConfig
from m2forge.pool.deployed_groups import DeployedEpisode
from m2forge.pool.lifecycle import DropReason, EpisodeState
from m2forge.pool.pool import Pool
from m2forge.pool.queue import dropped
from m2forge.pool.stored import CallWriter
from m2forge.records import Domain
from tests.pool.scene import VOCAB_SIZE, calls, play_all, reward, task, version, windowed


def deployed(seed: int, total: float) -> DeployedEpisode:
    writer = CallWriter(VOCAB_SIZE, 0)
    stored = tuple(writer.write(call) for call in calls(seed, 2))
    return DeployedEpisode(f"deployed.ep{seed}.1", stored, reward(total), (0.0, total))


@pytest.mark.parametrize("unit", ["group", "episode"])
def test_a_deployed_agents_group_takes_slots_of_its_domain(config: PoolConfig, unit: str) -> None:
    num_units = 1 if unit == "group" else 2
    admitting = windowed(config, queue=2 * num_units, unit=unit).model_copy(update={"admit_deployed": True})
    with Pool(admitting, VOCAB_SIZE) as pool:
        pool.put([(task(), 2)], stage="early")
        pool.add_deployed("deployed.a.1", task(9), [deployed(0, 1.0), deployed(1, 0.0)])
        assert pool.counts()[EpisodeState.FINISHED] == 2
        play_all(pool)
        assert pool.claim(num_units, version(0)) is not None, "what was queued before it"
        drawn = [(task(1, domain=Domain.CODING), 2), (task(2), 2)]
        assert len(pool.put(drawn, stage="early")) == 1
        claimed = pool.claim(num_units, version(0), {"early/agent": num_units})
        assert claimed is not None
        episodes = [episode for unit in pool.fetch(claimed) for episode in unit.episodes]
        assert [episode.name for episode in episodes] == ["deployed.ep0.1", "deployed.ep1.1"]
        assert all(episode.task == task(9) for episode in episodes)
        assert [episode.step_rewards for episode in episodes] == [(0.0, 1.0), (0.0, 0.0)]
        assert episodes[1].episode().calls == tuple(calls(1, 2))


def test_a_deployed_episode_is_stored_once_in_a_whole_group(config: PoolConfig) -> None:
    admitting = config.model_copy(update={"admit_deployed": True})
    with Pool(admitting, VOCAB_SIZE) as pool:
        pool.add_deployed("deployed.a.1", task(), [deployed(0, 1.0), deployed(1, 0.0)])
        with pytest.raises(ExistsError, match="ep1"):
            pool.add_deployed("deployed.b.2", task(), [deployed(2, 1.0), deployed(1, 0.0)])
        broken = replace(deployed(3, 1.0), step_rewards=(1.0,))
        with pytest.raises(RecordError, match="expected one per call, 2, received 1"):
            pool.add_deployed("deployed.c.3", task(), [deployed(2, 1.0), broken])
        names = [deployed(seed, 0.0).name for seed in range(4)]
        assert pool.known(names) == set(names[:2])


def test_deployed_groups_are_excluded_by_default(config: PoolConfig) -> None:
    with Pool(config, VOCAB_SIZE) as pool:
        pool.add_deployed("deployed.a.1", task(), [deployed(0, 1.0), deployed(1, 0.0)])
        assert pool.put([(task(), 2)]) == ["g0"]
        assert pool.tally().total(dropped(DropReason.NOT_ADMITTED)) == 1
    with Pool(config.model_copy(update={"admit_deployed": True}), VOCAB_SIZE) as pool:
        pool.add_deployed("deployed.b.2", task(), [deployed(2, 1.0), deployed(3, 1.0)])
        assert pool.tally().total(dropped(DropReason.NO_SIGNAL)) == 1
