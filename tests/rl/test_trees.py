"""Units become trees: one for each group, every call with what it is worth."""

from dataclasses import replace
from pathlib import Path

import pytest

from m2forge.errors import RecordError
from m2forge.pool.config import PoolConfig
from m2forge.pool.pool import Pool
from m2forge.pool.stored import StoredUnit
from m2forge.records import PolicyVersion
from m2forge.reward.advantage import select_rewards, trained_calls
from m2forge.reward.config import AdvantageConfig
from m2forge.rl.trainer import make_trees
from tests.rl.scene import fill_pool

VOCAB_SIZE = 300


def read_units(tmp_path: Path, num_groups: int, group_size: int) -> list[StoredUnit]:
    with Pool(PoolConfig(url=f"sqlite:///{tmp_path}/pool.db"), VOCAB_SIZE) as pool:
        fill_pool(pool, num_groups, group_size)
        claimed = pool.claim(num_groups, PolicyVersion("run", 0))
        assert claimed is not None
        return pool.fetch(claimed)


def test_calls_carry_what_their_attempt_earned_over_the_others(tmp_path: Path) -> None:
    units = read_units(tmp_path, 2, 3)
    trees = make_trees(units, AdvantageConfig(), VOCAB_SIZE)
    assert len(trees) == 2
    for unit, tree in zip(units, trees, strict=True):
        by_episode = {episode.name: episode for episode in unit.episodes}
        assert {sample.episode for sample in tree.samples} == set(by_episode)
        assert len(tree.samples) == sum(len(episode.calls) for episode in unit.episodes)
        totals = {name: episode.reward.perf for name, episode in by_episode.items() if episode.reward}
        for index, sample in enumerate(tree.samples):
            others = [perf for name, perf in totals.items() if name != sample.episode]
            assert sample.advantage == pytest.approx(totals[sample.episode] - sum(others) / len(others))
            stored = by_episode[sample.episode].episode().calls[int(sample.name.rpartition("/")[2])]
            assert tree.call(index) == stored
    weights = [s.weight * s.logprobs.size for tree in trees for s in tree.samples]
    assert sum(weights) == pytest.approx(1.0)


def test_side_calls_are_left_out_and_their_rewards_stay(tmp_path: Path) -> None:
    (unit,) = read_units(tmp_path, 1, 4)
    long = next(episode for episode in unit.episodes if len(episode.calls) == 2)
    others = [episode for episode in unit.episodes if episode is not long]
    marked = replace(long, artifacts={**long.artifacts, "roles": '["main", "side"]'}, step_rewards=(0.25, 0.5))
    for is_trained in (False, True):
        config = AdvantageConfig(side_calls=is_trained)
        (tree,) = make_trees([replace(unit, episodes=(marked, *others))], config, VOCAB_SIZE)
        mine = {sample.name: sample.advantage for sample in tree.samples if sample.episode == long.name}
        assert mine.keys() == {f"{long.name}/{index}" for index in range(1 + is_trained)}
        perfs = [episode.reward.perf for episode in others if episode.reward]
        assert mine[f"{long.name}/0"] == pytest.approx(0.75 - sum(perfs) / len(perfs))
        assert sum(sample.weight * sample.logprobs.size for sample in tree.samples) == pytest.approx(1.0)


def test_sub_agents_are_trained_unless_configured_otherwise() -> None:
    roles = ["side", "main", "sub_agent"]
    assert trained_calls(roles, 4, AdvantageConfig()) == [1, 2, 3]
    assert trained_calls(roles, 4, AdvantageConfig(sub_agents=False, side_calls=True)) == [0, 1, 3]
    assert select_rewards([1.0, 2.0, 4.0, 8.0], [1, 3]) == [7.0, 8.0]
    assert select_rewards([1.0, 2.0], []) == []


def test_an_attempt_without_a_reward_is_refused(tmp_path: Path) -> None:
    with Pool(PoolConfig(url=f"sqlite:///{tmp_path}/pool.db"), VOCAB_SIZE) as pool:
        fill_pool(pool, 1, 2)
        claimed = pool.claim(1, PolicyVersion("run", 0))
        assert claimed is not None
        (unit,) = pool.fetch(claimed)
    broken = replace(unit, episodes=(replace(unit.episodes[0], reward=None), *unit.episodes[1:]))
    with pytest.raises(RecordError, match=unit.episodes[0].name):
        make_trees([broken], AdvantageConfig(), VOCAB_SIZE)
