"""Composes the reward of every step of an episode from its three parts.

    r_t = α·process_t + β·speed_t + perf_t                                    t = 1 … n

    process_t = Σ_{w<0} w·m_t + Σ_{w>0} w·m_t / n          m_t: measures of the rules at step t, w their weights
    speed_t   = h(T / T_base)   at the last step of an attempt that was completed and passed, else 0
    perf_t    = perf            at the last step, else 0

Speed is paid once, and a fast failure earns none. A credit is divided by the number of steps, so that together they
earn at most w and taking more steps does not pay; with credit = "full" it is not divided. A penalty is never divided.

α = β = 0.1, perf 1, speed 0.5, three steps, the first malformed (w = −1), the others well-structured (w = 0.2, so
0.2 / 3 each): r = (−0.1, 0.02 / 3, 0.02 / 3 + 0.05 + 1), 0.9633 in total.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

from m2forge.reward.rule import Rule


def process_rewards(
    rules: Sequence[Rule], measures: Sequence[Mapping[str, float]], credit: Literal["shared", "full"]
) -> list[float]:
    """process_t of every step, from its rule measures by name."""
    share = 1.0 / max(1, len(measures)) if credit == "shared" else 1.0
    pay = {rule.name: rule.weight * (share if rule.weight > 0 else 1.0) for rule in rules}
    return [sum(pay[name] * value for name, value in step.items()) for step in measures]


def compose(process: Sequence[float], speed: float, perf: float, *, alpha: float, beta: float) -> tuple[float, ...]:
    """r_t of every step. `speed` is 0 for an attempt that did not pass. An episode without steps has no rewards."""
    rewards = [alpha * value for value in process]
    if rewards:
        rewards[-1] += beta * speed + perf
    return tuple(rewards)
