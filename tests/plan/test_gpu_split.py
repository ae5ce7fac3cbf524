"""The split of an RL run's GPUs: a case with a known answer, and every other split simulated beside the best."""

from dataclasses import replace

import pytest

from m2forge.errors import ConfigError
from m2forge.model.preset import preset
from m2forge.plan.gpu import find_gpu
from m2forge.plan.gpu_split import Split, split_gpus
from m2forge.plan.parallel_layout import Plan, Workload, make_plans
from m2forge.plan.simulation import Ring, simulate
from m2forge.train.activation import MicroBatch
from tests.plan.test_simulation import RING

WORKLOAD = Workload("tiny", preset("m2-tiny"), MicroBatch(4096, 4096, 4096, 1))
WIDE = replace(RING, num_jobs=64, queue=64, window=64)
"""A batch is 32,000 tokens; a sampler makes 1,000 a second in these tests."""
PRICE = 3.0


def plans_on(num_gpus: int) -> list[Plan]:
    return make_plans(WORKLOAD, find_gpu("H200"), num_gpus, PRICE, 5e10)


def linear_ring(plan: Plan, num_samplers: int) -> Ring:
    """A step of 24 seconds on one GPU, in equal shares on several."""
    return replace(WIDE, step_s=24 / plan.layout.num_gpus, sampler_rate=1000.0 * num_samplers)


def split(num_gpus: int, sampler_gpus: int = 1) -> list[Split]:
    return split_gpus(plans_on, linear_ring, num_gpus, sampler_gpus, PRICE)


def test_trainer_and_samplers_are_balanced() -> None:
    """6 of 14 GPUs train a batch in 4 s, and 8 sample one in 4 s."""
    best = split(14)[0]
    assert (best.plan.layout.num_gpus, best.num_samplers, best.num_idle) == (6, 8, 0)
    assert best.tokens_per_s == pytest.approx(8000, rel=0.03)
    assert best.dollars_per_million == pytest.approx(14 * PRICE / 3600 / best.tokens_per_s * 1e6)


@pytest.mark.parametrize(("num_gpus", "sampler_gpus"), [(9, 1), (10, 3)])
def test_no_other_split_is_faster(num_gpus: int, sampler_gpus: int) -> None:
    rates = {}
    for num_training in range(1, num_gpus - sampler_gpus + 1):
        num_samplers = (num_gpus - num_training) // sampler_gpus
        found = simulate(linear_ring(plans_on(num_training)[0], num_samplers))
        rates[num_training] = found.num_steps / found.seconds * WIDE.batch_tokens
    best = split(num_gpus, sampler_gpus)[0]
    assert best.tokens_per_s == pytest.approx(max(rates.values()))
    assert best.plan.layout.num_gpus + best.num_samplers * sampler_gpus + best.num_idle == num_gpus


def test_beyond_a_node_whole_nodes_train() -> None:
    asked: list[int] = []

    def plans(num_gpus: int) -> list[Plan]:
        asked.append(num_gpus)
        return plans_on(1)

    split_gpus(plans, linear_ring, 40, 1, PRICE)
    assert asked == [*range(1, 9), 16, 24, *range(32, 40)]


def test_attempts_that_cannot_use_the_samplers_are_named() -> None:
    def ring(plan: Plan, num_samplers: int) -> Ring:
        return replace(linear_ring(plan, num_samplers), num_jobs=2, attempt_rate=100.0)

    assert "2 concurrent attempts cannot use the samplers" in split_gpus(plans_on, ring, 4, 1, PRICE)[0].verdict


def test_a_trainer_that_fits_nowhere_is_refused() -> None:
    def plans(num_gpus: int) -> list[Plan]:
        small = replace(find_gpu("H200"), datasheet=replace(find_gpu("H200").datasheet, memory=1e6))
        return make_plans(WORKLOAD, small, min(num_gpus, 4), PRICE, 5e10)

    with pytest.raises(ConfigError, match="nor on up to 1024"):
        split_gpus(plans, linear_ring, 4, 1, PRICE)
