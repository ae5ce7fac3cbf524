"""Chooses which variant of a task is written: pass rates of a reference solver in, the variant with fewest hints out.

A variant is selected if at least one attempt passed and the one-sided 95% Clopper–Pearson bound of its pass rate is
below 0.8: with k of n attempts passed, the bound is the p at which P(at most k of n pass) = 0.05. After 4, 8, 16 and 32
attempts,

    selected      k ≥ 1 and bound(k, n) < 0.8
    dropped       no further attempts up to 32 could select it, or 32 are made
    undecided     otherwise: the number of attempts doubles

Variants are tried from the fewest hints on; the first selected one is the task. The same tests decide for all variants.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

NUM_ATTEMPTS = (4, 8, 16, 32)
MAX_PASS_RATE = 0.8
CONFIDENCE = 0.95
_NUM_STEPS = 60


class Decision(StrEnum):
    SELECTED = "selected"
    TOO_EASY = "too easy"
    UNSOLVED = "never solved"


@dataclass(frozen=True, slots=True)
class Measured:
    decision: Decision
    num_passed: int
    num_attempts: int
    bound: float


@functools.cache
def upper_bound(num_passed: int, num_attempts: int) -> float:
    """Clopper–Pearson, one-sided, found by bisection: the probability of at most k passes falls with the pass rate."""
    if num_passed >= num_attempts:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(_NUM_STEPS):
        middle = (low + high) / 2
        if _at_most(num_passed, num_attempts, middle) > 1 - CONFIDENCE:
            low = middle
        else:
            high = middle
    return high


def _at_most(num_passed: int, num_attempts: int, rate: float) -> float:
    return math.fsum(
        math.comb(num_attempts, k) * rate**k * (1 - rate) ** (num_attempts - k) for k in range(num_passed + 1)
    )


def measure(attempt: Callable[[int], bool]) -> Measured:
    """`attempt`: makes the attempt of a number, from 0 on, and returns whether it passed."""
    num_passed = num_made = 0
    for number in NUM_ATTEMPTS:
        num_passed += sum(attempt(index) for index in range(num_made, number))
        num_made = number
        bound = upper_bound(num_passed, num_made)
        if num_passed and bound < MAX_PASS_RATE:
            return Measured(Decision.SELECTED, num_passed, num_made, bound)
        if upper_bound(num_passed, NUM_ATTEMPTS[-1]) >= MAX_PASS_RATE:
            return Measured(Decision.TOO_EASY, num_passed, num_made, bound)
    decision = Decision.TOO_EASY if num_passed else Decision.UNSOLVED
    return Measured(decision, num_passed, num_made, upper_bound(num_passed, num_made))
