"""Units become trees: one for each group, every call with what it is worth."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2forge.config import TomlValue, build
from m2forge.errors import RecordError
from m2forge.forge.learner import make_trees
from m2forge.forge.quota import SizedQuotas, batch_quotas
from m2forge.pool.config import PoolConfig
from m2forge.pool.pool import Pool
from m2forge.pool.stored import StoredUnit
from m2forge.records import PolicyVersion
from m2forge.reward.config import AdvantageConfig
from m2forge.tasks.config import CurriculumConfig
from tests.forge.scene import fill_pool

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


def test_an_attempt_without_a_reward_is_refused(tmp_path: Path) -> None:
    with Pool(PoolConfig(url=f"sqlite:///{tmp_path}/pool.db"), VOCAB_SIZE) as pool:
        fill_pool(pool, 1, 2)
        claimed = pool.claim(1, PolicyVersion("run", 0))
        assert claimed is not None
        (unit,) = pool.fetch(claimed)
    broken = replace(unit, episodes=(replace(unit.episodes[0], reward=None), *unit.episodes[1:]))
    with pytest.raises(RecordError, match=unit.episodes[0].name):
        make_trees([broken], AdvantageConfig(), VOCAB_SIZE)


def make_curriculum(batch_groups: int, ratios: Sequence[float]) -> CurriculumConfig:
    """A stage of two batches with domains at these ratios, then one with a single domain."""
    families = {"agent": "chain", "reasoning": "counters", "coding": "stack", "general": "words"}
    domains: dict[str, TomlValue] = {
        name: {"ratio": ratio, "context": 512, "families": [{"name": families[name], "difficulty": [1, 2]}]}
        for name, ratio in zip(families, ratios, strict=False)
    }
    last: dict[str, TomlValue] = {"agent": domains["agent"]}
    stages: list[TomlValue] = [
        {"name": "first", "num_batches": 2, "domains": domains},
        {"name": "last", "domains": last},
    ]
    return build(CurriculumConfig, {"batch_groups": batch_groups, "stages": stages}, origin="test")


def test_quotas_follow_the_stages() -> None:
    config = make_curriculum(3, [1.0, 1.0])
    quotas = batch_quotas(config)
    first, second, third = (next(quotas) for _ in range(3))
    assert sum(first.values()) == sum(second.values()) == 3
    assert {name: first[name] + second[name] for name in first} == {"agent": 3, "reasoning": 3}
    assert third == {"agent": 3}


def test_quotas_of_any_size_follow_the_stages_too() -> None:
    sized = SizedQuotas(make_curriculum(3, [1.0, 1.0]), [1, 1, 1])
    assert [sized.quotas(2), sized.quotas(4)] == [{"agent": 1, "reasoning": 1}, {"agent": 2, "reasoning": 2}]
    assert sized.quotas(1) == {"agent": 0, "reasoning": 1}, "agent was first, and third"
    sized.note(3)
    assert sized.quotas(4) == {"agent": 4}, "six units are the stage's two batches of three"


@given(st.lists(st.integers(1, 20), min_size=1, max_size=4), st.lists(st.integers(1, 12), min_size=1, max_size=60))
def test_every_batch_is_mixed_within_rounding_and_so_are_all_together(weights: list[int], sizes: list[int]) -> None:
    # A stage that outlasts the batches.
    config = make_curriculum(1000, [float(weight) for weight in weights])
    shares = [weight / sum(weights) for weight in weights]
    sized, totals = SizedQuotas(config), [0] * len(weights)
    for index, num_units in enumerate(sizes):
        assert SizedQuotas(config, sizes[:index]).quotas(num_units) == sized.quotas(num_units)
        counts = [sized.quotas(num_units).get(name, 0) for name in ("agent", "reasoning", "coding", "general")]
        assert sum(counts) == num_units
        sized.note(num_units)
        for place, share in enumerate(shares):
            assert abs(counts[place] - share * num_units) < 1
            totals[place] += counts[place]
            # Rounding to the largest remainder, with what was rounded carried over, may be off by a little over 1.
            assert abs(totals[place] - share * sum(sizes[: index + 1])) < 2
