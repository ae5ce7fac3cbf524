"""What it costs to try depths is bounded, however dear it is that modules catch up."""

import numpy as np
import pytest

from m2forge.rollout.speculation.adaptive_depth import TRIAL_STEPS, MeasuredDepth, Moment
from tests.rollout.speculation.depth_machine import rate, run, run_dear, serve_batches

NEAR_TIMES = (1.0, 1.25, 1.5, 1.75)
"""With drafts of which 0.7 are right, two are as good as three within a hundredth."""


def test_equal_depths_do_not_alternate_where_prefill_is_slow() -> None:
    cheap, dear = (run_dear(MeasuredDepth(3), NEAR_TIMES, price, [0.7] * 10) for price in (0.0, 30.0))
    assert dear[1] <= 8
    assert dear[1] < cheap[1] / 2
    assert dear[0] > 0.95 * max(rate(depth, NEAR_TIMES.__getitem__, 0.7) for depth in range(4))


def test_a_deeper_depth_waits_for_a_step_that_reads() -> None:
    """Which comes once in 64: few others catch up, and hardly anything is lost by waiting."""
    speed, num_dear = run_dear(MeasuredDepth(3), NEAR_TIMES, 1000.0, [0.7] * 10, free_every=64)
    assert num_dear <= 3
    assert speed > 0.95 * max(rate(depth, NEAR_TIMES.__getitem__, 0.7) for depth in range(4))


def test_a_depth_that_soon_repays_its_prefill_is_used_at_once() -> None:
    times = (1.0, 1.1, 1.2, 1.3)
    speed, num_dear = run_dear(MeasuredDepth(3), times, 30.0, [0.9] * 10)
    assert 1 <= num_dear <= 12
    assert speed > 0.95 * rate(3, times.__getitem__, 0.9)


@pytest.mark.parametrize("num_parts", [4, 64])
@pytest.mark.parametrize("module_s", [0.5, 1.0, 2.0, 3.0, 3.4, 3.8, 4.2, 5.0, 8.0])
def test_finding_where_drafts_begin_to_pay_costs_little(module_s: float, num_parts: int) -> None:
    """Also where it is a near thing: steps are never much slower than without drafts, nor is the whole; and where it is
    not, drafts are made."""
    found = serve_batches(40, module_s, num_parts)[4:]
    assert min(speed for speed, _ in found) > 0.95
    assert np.median([speed for speed, _ in found]) > (1.45 if module_s < 3 else 0.98)
    assert np.mean([whole for _, whole in found]) < (0.93 if module_s < 3 else 1.025)


@pytest.mark.slow
def test_drafts_resume_after_a_trial_without_them_at_any_cost() -> None:
    """It was reckoned before the trial: nobody who samples on and on stays where a trial has left him."""
    chooser, times = MeasuredDepth(1), (1.0, 1.3)
    speed, num_dear = run_dear(chooser, times, 80.0, [0.8] * 50)
    assert num_dear > 1
    assert speed > 0.97 * rate(1, times.__getitem__, 0.8)


def test_a_first_trial_waits_for_prefill_and_lasts_as_long() -> None:
    """Where modules have more to catch up on than is left to sample."""
    chooser, far_behind = MeasuredDepth(3), [4 * 400] * 3
    for _ in range(50):
        assert chooser.choose(Moment(4, mtp_lag=far_behind, num_remaining=50)) == 0
        chooser.note_steps(0, 4, 1, 1.0)
    for num_prefilled in range(0, 1600, 16):
        assert (
            chooser.choose(
                Moment(4, 4, is_separate_step=False, mtp_lag=[0, num_prefilled, num_prefilled], num_remaining=50)
            )
            == 1
        )
    assert chooser.choose(Moment(4, mtp_lag=[0, 1600, 1600], num_remaining=50)) == 1
    # Less than what is left: it may be tried at once.
    other = MeasuredDepth(3)
    for _ in range(TRIAL_STEPS):
        assert other.choose(Moment(4, mtp_lag=far_behind, num_remaining=401)) == 0
        other.note_steps(0, 4, 1, 1.0)
    assert other.choose(Moment(4, mtp_lag=far_behind, num_remaining=401)) == 1


@pytest.mark.parametrize("is_catching_up", [False, True])
def test_what_modules_catch_up_on_in_several_steps_costs_several(is_catching_up: bool) -> None:
    """Three drafts pay, and modules are behind by a tenth of what they catch up on in one step, or by 40 times that."""
    chooser = MeasuredDepth(3)
    run_dear(chooser, (1.0, 1.1, 1.2, 1.3), 30.0, [0.9])
    chooser._depth, chooser._sizes[3].pause_steps = 0, 10_000
    mtp_lag = 4000 if is_catching_up else 10
    assert chooser.choose(Moment(4, mtp_lag=[mtp_lag] * 3, max_mtp_prefill=100)) == (0 if is_catching_up else 3)


@pytest.mark.slow
def test_trials_repeat_as_often_as_a_small_share_of_time_allows() -> None:
    # Where modules that catch up take long,
    _, num_dear = run_dear(MeasuredDepth(3), NEAR_TIMES, 300.0, [0.7] * 60)
    assert 300.0 * (num_dear - 5) < 0.03 * 24_000 * NEAR_TIMES[2]
    # or the steps of a depth,
    times = (1.0, 1.1, 1.2, 100.0)
    depths = run(MeasuredDepth(3), 20_000, 4, times.__getitem__, 0.9)
    assert 3 in depths[100:]
    assert sum(times[depth] for depth in depths[100:] if depth == 3) < 0.03 * sum(times[depth] for depth in depths)
    # or reading for it.
    assert np.mean([whole for _, whole in serve_batches(200, 100.0)[4:]]) < 1.03


@pytest.mark.slow
def test_what_trials_might_have_cost_is_not_saved_up() -> None:
    chooser = MeasuredDepth(3)
    run_dear(chooser, NEAR_TIMES, 300.0, [0.7])
    chooser._total_s += 1e6
    _, num_dear = run_dear(chooser, NEAR_TIMES, 300.0, [0.7] * 20)
    assert num_dear <= 3


@pytest.mark.parametrize("num_sequences", [4, 20])
def test_a_depth_yields_to_a_deeper_one_unless_modules_lag_far(num_sequences: int) -> None:
    """At a size that is known, and at one that does as another."""
    chooser = MeasuredDepth(3)
    run_dear(chooser, (1.0, 1.1, 1.2, 1.3), 1.0, [0.9])
    chooser.note_mtp_prefill(3, 4, 100, 100.0)
    chooser._sizes[3].pause_steps = 10_000
    for mtp_lag, depth in ((4000, 0), (0, 3)):
        chooser._depth = 0
        is_separate_step = num_sequences == 4
        assert chooser.choose(Moment(num_sequences, is_separate_step=is_separate_step, mtp_lag=[mtp_lag] * 3)) == depth
