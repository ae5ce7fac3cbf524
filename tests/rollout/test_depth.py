"""The depth of speculation is the one that pays, and finding it costs little."""

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from m2forge.rollout.depth import PAUSE_STEPS, MeasuredDepth

Seconds = Callable[[int], float]


def run(chooser: MeasuredDepth, num_steps: int, num_sequences: int, seconds: Seconds, accepted: float) -> list[int]:
    """Steps of a machine that needs `seconds` at a depth, over text of which a draft is right with `accepted`; what is
    verified is what the step before has drafted."""
    depths, before, random = [], 0, np.random.default_rng(0)
    for _ in range(num_steps):
        depth = chooser.choose(num_sequences)
        num_accepted = 0
        while num_accepted < before and random.random() < accepted:
            num_accepted += 1
        if before:
            places = range(chooser.max_depth)
            chooser.note_drafts(
                [int(place < before) for place in places], [int(place < num_accepted) for place in places]
            )
        if before == depth:
            chooser.note_step(depth, num_sequences, seconds(depth))
        depths.append(depth)
        before = depth
    return depths


def rate(depth: int, seconds: Seconds, accepted: float) -> float:
    return sum(accepted**place for place in range(depth + 1)) / seconds(depth)


@pytest.mark.parametrize(("price", "accepted", "best"), [(0.1, 0.8, 3), (0.4, 0.6, 1), (0.9, 0.5, 0), (0.05, 0.02, 0)])
def test_the_depth_that_pays_most_is_found_and_kept(price: float, accepted: float, best: int) -> None:
    def seconds(depth: int) -> float:
        return 1e-3 * (1 + price * depth)

    assert best == max(range(4), key=lambda depth: rate(depth, seconds, accepted))
    chooser = MeasuredDepth(3)
    depths = run(chooser, 2000, 5, seconds, accepted)
    assert Counter(depths[100:]).most_common(1)[0][0] == best
    num_tokens = sum(rate(depth, seconds, accepted) * seconds(depth) for depth in depths)
    assert num_tokens / sum(map(seconds, depths)) > 0.98 * rate(best, seconds, accepted)


@pytest.mark.parametrize("price", [0.2, 1.0, 2.0])
def test_where_no_draft_is_right_hardly_anything_is_lost(price: float) -> None:
    """At least 0.95 of the speed without speculation, the first trials included."""

    def seconds(depth: int) -> float:
        return 1e-3 * (1 + price * depth)

    num_steps = 4 * PAUSE_STEPS
    depths = run(MeasuredDepth(3), num_steps, 64, seconds, 0.0)
    assert num_steps * seconds(0) / sum(seconds(depth) for depth in depths) > 0.95


def test_each_size_of_a_batch_has_its_own_depth() -> None:
    chooser = MeasuredDepth(3)
    for _ in range(3):
        few = run(chooser, 300, 2, lambda depth: 1 + 0.1 * depth, 0.8)
        many = run(chooser, 300, 200, lambda depth: 1.0 + depth, 0.8)
    assert Counter(few)[3] > 0.9 * len(few)
    assert Counter(many)[0] > 0.9 * len(many)


def test_text_that_changes_changes_the_depth() -> None:
    chooser = MeasuredDepth(3)

    def seconds(depth: int) -> float:
        return 1 + 0.25 * depth

    assert Counter(run(chooser, 1000, 1, seconds, 0.9)).most_common(1)[0][0] == 3
    assert Counter(run(chooser, 6000, 1, seconds, 0.05)[3000:]).most_common(1)[0][0] == 0
    assert Counter(run(chooser, 12000, 1, seconds, 0.9)[9000:]).most_common(1)[0][0] == 3


def test_a_single_slow_step_decides_nothing() -> None:
    chooser, num_steps = MeasuredDepth(1), 0

    def seconds(depth: int) -> float:
        nonlocal num_steps
        num_steps += 1
        return 30.0 if num_steps == 1 else 1 + 0.2 * depth

    assert Counter(run(chooser, 200, 1, seconds, 0.9)).most_common(1)[0][0] == 1


def test_trials_that_cannot_be_measured_are_given_up() -> None:
    """Where every step reads a prompt none tells what a depth costs: then there is little speculation."""
    chooser = MeasuredDepth(3)
    assert sum(chooser.choose(8) > 0 for _ in range(2000)) < 0.1 * 2000


def test_without_modules_nothing_is_measured() -> None:
    assert {MeasuredDepth(0).choose(number) for number in range(10)} == {0}
