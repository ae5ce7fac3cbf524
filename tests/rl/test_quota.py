"""Quotas of batches: every domain at its ratio, whatever the sizes, stage after stage."""

from collections import Counter
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from m2forge.config import TomlValue, build
from m2forge.rl.trainer import SizedQuotas, batch_quotas
from m2forge.tasks.config import CurriculumConfig


def make_curriculum(batch_groups: int, ratios: Sequence[float], num_batches: int = 2) -> CurriculumConfig:
    """A stage of `num_batches` batches with domains at these ratios, then one with a single domain."""
    families = {"agent": "chain", "reasoning": "counters", "coding": "stack", "general": "words"}
    domains: dict[str, TomlValue] = {
        name: {"ratio": ratio, "context": 512, "families": [{"source": families[name], "difficulty": [1, 2]}]}
        for name, ratio in zip(families, ratios, strict=False)
    }
    last: dict[str, TomlValue] = {"agent": domains["agent"]}
    stages: list[TomlValue] = [
        {"name": "first", "num_batches": num_batches, "domains": domains},
        {"name": "last", "domains": last},
    ]
    return build(CurriculumConfig, {"batch_groups": batch_groups, "stages": stages}, origin="test")


def test_quotas_follow_the_stages() -> None:
    config = make_curriculum(3, [1.0, 1.0])
    quotas = batch_quotas(config)
    first, second, third = (next(quotas) for _ in range(3))
    assert sum(first.values()) == sum(second.values()) == 3
    assert {name: first[name] + second[name] for name in first} == {"first/agent": 3, "first/reasoning": 3}
    assert third == {"last/agent": 3}


def test_quotas_of_any_size_follow_the_stages_too() -> None:
    sized = SizedQuotas(make_curriculum(3, [1.0, 1.0]), [1, 1, 1])
    assert sized.quotas(2) == {"first/agent": 1, "first/reasoning": 1}
    assert sized.quotas(1) == {"first/agent": 0, "first/reasoning": 1}, "agent was first, and third"
    assert sized.max_units == 3
    sized.note(2)
    assert sized.max_units == 1, "six units are the stage's two batches of three"
    sized.note(1)
    assert (sized.max_units, sized.quotas(3)) == (3, {"last/agent": 3})


def test_single_episode_units_make_a_batch_of_whole_groups() -> None:
    config = make_curriculum(3, [1.0, 2.0])
    assert next(batch_quotas(config, 4)) == {"first/agent": 4, "first/reasoning": 8}
    assert SizedQuotas(config, units_per_group=4).max_units == 12


DOMAINS = ("agent", "reasoning", "coding", "general")


@given(st.lists(st.integers(1, 20), min_size=1, max_size=4), st.lists(st.integers(1, 12), min_size=1, max_size=60))
def test_every_batch_is_mixed_within_rounding_and_so_are_all(weights: list[int], sizes: list[int]) -> None:
    # A stage that outlasts the batches.
    config = make_curriculum(1000, [float(weight) for weight in weights])
    shares = [weight / sum(weights) for weight in weights]
    sized, totals = SizedQuotas(config), [0] * len(weights)
    for index, num_units in enumerate(sizes):
        assert SizedQuotas(config, sizes[:index]).quotas(num_units) == sized.quotas(num_units)
        counts = [sized.quotas(num_units).get(f"first/{name}", 0) for name in DOMAINS]
        assert sum(counts) == num_units
        sized.note(num_units)
        for place, share in enumerate(shares):
            assert abs(counts[place] - share * num_units) < 1
            totals[place] += counts[place]
            # Rounding to the largest remainder, with what was rounded carried over, may be off by a little over 1.
            assert abs(totals[place] - share * sum(sizes[: index + 1])) < 2


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.integers(0, 12),
    st.integers(1, 5),
    st.integers(1, 3),
    st.lists(st.integers(1, 30), min_size=200, max_size=200),
)
def test_a_stage_trains_exactly_the_units_drawn_for_it(
    weights: list[int], beyond: int, num_batches: int, units_per_group: int, sizes: list[int]
) -> None:
    config = make_curriculum(sum(weights) + beyond, [float(weight) for weight in weights], num_batches)
    quotas = batch_quotas(config, units_per_group)
    left = Counter[str]()
    for _ in range(num_batches):
        left.update(next(quotas))
    sized = SizedQuotas(config, units_per_group=units_per_group)
    for wanted in sizes:
        if not left.total():
            break
        num_units = min(wanted, sized.max_units)
        left.subtract(sized.quotas(num_units))
        assert min(left.values()) >= 0, "more of a domain than there is"
        sized.note(num_units)
    if not left.total():
        assert set(sized.quotas(1)) == {"last/agent"}
