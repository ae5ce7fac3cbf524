"""GPUs of an RL run split between trainer and samplers, the fastest split first.

A split has a number of GPUs that train, under the fastest layout that fits on them, and as many samplers as the other
GPUs hold. Up to a node's GPUs each side may have any number; beyond, whole nodes train. With B tokens in a batch, a
split makes at most

    min(1 / seconds of a training step, samplers · sampler's rate / B, attempts · attempt's rate / B)

steps per second. Splits are simulated in descending order of that bound, until none that is left can be faster than the
best. A sampler's rate is the caller's, not a prediction.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from m2forge.errors import ConfigError
from m2forge.plan.gpu import NODE_GPUS
from m2forge.plan.parallel_layout import Plan
from m2forge.plan.simulation import Balance, Ring, simulate

SLACK = 1.05
"""Ratio by which a simulation may exceed the bound: lengths of attempts are drawn, so their mean is not exact."""
MAX_GPUS = 1024
"""Most GPUs that are tried for a remedy."""


@dataclass(frozen=True)
class Split:
    plan: Plan
    """The trainer's layout."""
    num_samplers: int
    num_idle: int
    """GPUs that are left over, because they do not hold a whole sampler."""
    ring: Ring
    balance: Balance
    tokens_per_s: float
    """Tokens of the trained batches."""
    dollars_per_million: float
    """Cost of all GPUs of the run per million of these tokens."""

    @property
    def verdict(self) -> str:
        waits, ring = self.balance.trainer_waits, self.ring
        if self.balance.sampler_waits == 0 < waits and ring.num_jobs * ring.attempt_rate < ring.sampler_rate:
            return (
                f"the trainer waits {waits:.0%} of the time, and {ring.num_jobs} concurrent attempts cannot use the "
                "samplers: run more at a time"
            )
        return self.balance.verdict


def split_gpus(
    plans_on: Callable[[int], list[Plan]],
    ring_of: Callable[[Plan, int], Ring],
    num_gpus: int,
    sampler_gpus: int,
    price: float,
) -> list[Split]:
    """The simulated splits, fastest first. `plans_on`: the trainer's layouts on a number of GPUs, best first.
    `ring_of`: the ring of a layout and a number of samplers."""
    rings: list[tuple[float, Plan, int, Ring]] = []
    plan: Plan | None = None
    for num_training in _training_sizes(num_gpus, sampler_gpus):
        plan = plans_on(num_training)[0]
        if plan.fits:
            num_samplers = (num_gpus - num_training) // sampler_gpus
            ring = ring_of(plan, num_samplers)
            rings.append((_most_steps_per_s(ring), plan, num_samplers, ring))
    if plan is None:
        raise ConfigError(
            f"--gpus {num_gpus}: the trainer needs a GPU and a sampler {sampler_gpus}; give {1 + sampler_gpus} or more"
        )
    if not rings:
        raise ConfigError(
            f"--gpus {num_gpus}: with a sampler on {sampler_gpus} of them no layout of the trainer fits on the others: "
            f"{plan.layout} {plan.reason}; {remedy(plans_on, num_gpus, sampler_gpus)}"
        )
    splits: list[Split] = []
    fastest = 0.0
    for bound, plan, num_samplers, ring in sorted(rings, key=lambda found: -found[0]):
        if bound * SLACK < fastest:
            break
        balance = simulate(ring)
        steps_per_s = balance.num_steps / balance.seconds
        fastest = max(fastest, steps_per_s)
        tokens_per_s = steps_per_s * ring.batch_tokens
        idle = num_gpus - plan.layout.num_gpus - num_samplers * sampler_gpus
        cost = num_gpus * price / 3600 / tokens_per_s * 1e6
        splits.append(Split(plan, num_samplers, idle, ring, balance, tokens_per_s, cost))
    return sorted(splits, key=lambda split: -split.tokens_per_s)


def _training_sizes(num_gpus: int, sampler_gpus: int) -> Iterator[int]:
    for size in range(1, num_gpus - sampler_gpus + 1):
        if size <= NODE_GPUS or num_gpus - size <= NODE_GPUS or size % NODE_GPUS == 0:
            yield size


def _most_steps_per_s(ring: Ring) -> float:
    sampled = min(ring.sampler_rate, ring.num_jobs * ring.attempt_rate)
    return min(1 / ring.step_s, sampled / ring.batch_tokens)


def remedy(plans_on: Callable[[int], list[Plan]], num_gpus: int, sampler_gpus: int = 0) -> str:
    """The smallest power of two of GPUs on which the trainer fits, in words."""
    size = 1
    while size <= MAX_GPUS:
        if size > num_gpus - sampler_gpus and (plan := plans_on(size)[0]).fits:
            return f"{plan.layout} fits on {size}: give --gpus {size + sampler_gpus}"
        size *= 2
    return f'nor on up to {MAX_GPUS}: use GPUs with more memory, or set train.machine.offload = "host" or [train.lora]'
