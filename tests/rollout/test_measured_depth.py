"""The depth of speculation is the one that pays, and finding it costs little."""

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from m2forge.rollout.depth import Moment
from m2forge.rollout.measured_depth import MARGIN, TRIAL_STEPS, MeasuredDepth

Seconds = Callable[[int], float]


def run(chooser: MeasuredDepth, num_steps: int, num_sequences: int, seconds: Seconds, accepted: float) -> list[int]:
    """Steps of a machine that needs `seconds` at a depth, over text of which a draft is right with `accepted`; what is
    verified is what the step before has drafted."""
    depths, before, random = [], 0, np.random.default_rng(0)
    for _ in range(num_steps):
        depth = chooser.choose(Moment(num_sequences))
        num_accepted = 0
        while num_accepted < before and random.random() < accepted:
            num_accepted += 1
        if before:
            places = range(chooser.max_depth)
            chooser.note_drafts(
                [int(place < before) for place in places], [int(place < num_accepted) for place in places]
            )
        if before == depth:
            chooser.note_steps(depth, num_sequences, 1, seconds(depth))
        depths.append(depth)
        before = depth
    return depths


def rate(depth: int, seconds: Seconds, accepted: float) -> float:
    return sum(accepted**place for place in range(depth + 1)) / seconds(depth)


@pytest.mark.parametrize(
    ("times", "accepted", "best"),
    [
        ((1.0, 1.1, 1.2, 1.3), 0.8, 3),
        ((1.0, 1.2, 1.8, 2.4), 0.6, 1),
        ((1.0, 1.9, 2.8, 3.7), 0.5, 0),
        ((1.0, 1.05, 1.1, 1.15), 0.02, 0),
    ],
)
def test_the_depth_that_pays_most_is_found_and_kept(times: Sequence[float], accepted: float, best: int) -> None:
    def seconds(depth: int) -> float:
        return times[depth]

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

    num_steps = 1000
    depths = run(MeasuredDepth(3), num_steps, 64, seconds, 0.0)
    assert num_steps * seconds(0) / sum(seconds(depth) for depth in depths) > 0.95


def test_each_size_of_a_batch_has_its_own_depth() -> None:
    chooser = MeasuredDepth(3)
    for _ in range(3):
        few = run(chooser, 300, 2, lambda depth: 1 + 0.1 * depth, 0.8)
        many = run(chooser, 300, 200, lambda depth: 1.0 + depth, 0.8)
    assert Counter(few)[3] > 0.9 * len(few)
    assert Counter(many)[0] > 0.9 * len(many)


def test_what_is_read_for_a_batch_that_grows_is_read_at_the_depth_of_the_whole_batch() -> None:
    chooser = MeasuredDepth(3)
    for _ in range(3):
        run(chooser, 300, 2, lambda depth: 1 + 0.1 * depth, 0.8)
        run(chooser, 300, 200, lambda depth: 1.0 + depth, 0.8)
    for num_sequences in (1, 2, 50, 199):
        assert chooser.choose(Moment(num_sequences, num_coming=200, is_apart=False)) == 0
    assert chooser.choose(Moment(1, num_coming=2, is_apart=False)) == 3
    # A size that was never met does as the nearest.
    assert chooser.choose(Moment(200, num_coming=4000, is_apart=False)) == 0
    assert Counter(run(chooser, 100, 2, lambda depth: 1 + 0.1 * depth, 0.8))[3] > 90


def test_text_that_changes_changes_the_depth() -> None:
    chooser = MeasuredDepth(3)

    def seconds(depth: int) -> float:
        return 1 + 0.25 * depth

    assert Counter(run(chooser, 1000, 1, seconds, 0.9)).most_common(1)[0][0] == 3
    assert Counter(run(chooser, 6000, 1, seconds, 0.05)[3000:]).most_common(1)[0][0] == 0
    assert Counter(run(chooser, 12000, 1, seconds, 0.9)[9000:]).most_common(1)[0][0] == 3


def test_three_drafts_are_tried_where_the_first_alone_does_not_pay() -> None:
    """The first draft has a price of its own, the others come almost for nothing."""

    def seconds(depth: int) -> float:
        return 1.0 if depth == 0 else 1.9 + 0.05 * depth

    assert rate(1, seconds, 0.8) < rate(0, seconds, 0.8) < rate(3, seconds, 0.8)
    assert Counter(run(MeasuredDepth(3), 500, 2, seconds, 0.8)).most_common(1)[0][0] == 3


@pytest.mark.parametrize("num_slow", [1, 2])
def test_first_steps_that_are_slow_decide_little(num_slow: int) -> None:
    """Of each depth, as where something is allocated or compiled. Of three measurements one may be wrong; where two
    are, the next trials tell."""
    chooser, counts = MeasuredDepth(3), Counter[int]()

    def seconds(depth: int) -> float:
        counts[depth] += 1
        return 100.0 if counts[depth] <= num_slow else 1 + 0.1 * depth

    depths = run(chooser, 6000, 4, seconds, 0.8)
    assert Counter(depths[3000:]).most_common(1)[0][0] == 3
    if num_slow == 1:
        assert Counter(depths[:200]).most_common(1)[0][0] == 3


def test_steps_that_come_in_eights_are_counted_as_eight() -> None:
    """Trials are over after a few calls, and rest as many steps as where each step is a call."""
    chooser, depths = MeasuredDepth(3), list[int]()
    for _ in range(300):
        depths.append(chooser.choose(Moment(8)))
        chooser.note_drafts(
            [80, 70, 60][: depths[-1]] + [0] * (3 - depths[-1]), [60, 40, 30][: depths[-1]] + [0] * (3 - depths[-1])
        )
        chooser.note_steps(depths[-1], 8, 8, 8 * (1 + 0.2 * depths[-1]))
    assert set(depths[:10]) == {0, 1, 2, 3}
    assert Counter(depths[10:])[3] > 0.9 * len(depths[10:])
    assert len({*depths[10:]}) > 1


def test_how_many_tokens_a_step_gives_follows_what_was_accepted() -> None:
    chooser = MeasuredDepth(3)
    assert chooser.tokens_per_step(0) == 1
    assert chooser.tokens_per_step(3) == pytest.approx(1 + 0.9 + 0.81 + 0.729)
    for _ in range(100):
        chooser.note_drafts([100, 100, 100], [50, 20, 10])
    assert chooser.tokens_per_step(3) == pytest.approx(1.8, rel=0.02)
    for _ in range(100):  # first drafts alone: the others follow them
        chooser.note_drafts([100, 0, 0], [100, 0, 0])
    assert chooser.tokens_per_step(3) == pytest.approx(1 + 1 + 0.4 + 0.2, rel=0.02)


def test_drafts_that_hardly_pay_are_not_made() -> None:
    """Whoever makes them runs the modules over prompts too."""

    def seconds(depth: int) -> float:
        return 1 + 0.72 * depth

    assert 1 < rate(1, seconds, 0.8) < 1.06
    assert Counter(run(MeasuredDepth(3), 2000, 4, seconds, 0.8)).most_common(1)[0][0] == 0


def served(chooser: MeasuredDepth, num_read: int, reading_s: float, num_batches: int = 60) -> Counter[int]:
    """How often each depth, where batches of 16 read so many tokens each, which takes a module `reading_s` a token,
    and then sample 64; a step takes 1 + 0.1 · depth, and 0.8 of all drafts are right."""
    depths = Counter[int]()
    for _ in range(num_batches):
        for num_before in (0, 8):  # half of them at a time
            depth = chooser.choose(Moment(num_before + 8, num_coming=16, is_apart=False))
            if depth and num_read:
                chooser.note_reading(depth, 16, 8 * num_read, 8 * num_read * reading_s * depth)
        depths.update(run(chooser, 64, 16, lambda depth: 1 + 0.1 * depth, 0.8))
        for _ in range(16):
            chooser.note_end(num_read, 64)
    return depths


@pytest.mark.parametrize(("reading_s", "best"), [(0.0, 3), (1e-3, 3), (4e-3, 1), (1e-2, 0)])
def test_of_the_depths_that_pay_prompts_included_the_fastest_is_chosen(reading_s: float, best: int) -> None:
    steps_s = [(1 + 0.1 * depth) / sum(0.8**place for place in range(depth + 1)) / 16 for depth in range(4)]
    whole_s = [step_s + 256 / 64 * reading_s * depth for depth, step_s in enumerate(steps_s)]
    paying = [0, *(depth for depth in range(1, 4) if MARGIN * whole_s[depth] < whole_s[0])]
    assert min(paying, key=steps_s.__getitem__) == best
    depths = served(MeasuredDepth(3), 256, reading_s)
    assert depths[best] > 0.8 * depths.total()


def test_drafts_are_made_again_where_no_more_prompts_are_read() -> None:
    chooser = MeasuredDepth(3)
    assert served(chooser, 256, 1e-2).most_common(1)[0][0] == 0
    served(chooser, 0, 0.0)
    depths = served(chooser, 0, 0.0)
    assert depths[3] > 0.9 * depths.total()


def test_a_size_at_which_nothing_was_read_is_judged_by_the_nearest() -> None:
    chooser = MeasuredDepth(3)
    served(chooser, 256, 1e-2)
    assert Counter(run(chooser, 1000, 100, lambda depth: 1 + 0.1 * depth, 0.8)).most_common(1)[0][0] == 0


def test_a_batch_that_shrinks_does_what_was_best_before_it_tries() -> None:
    def seconds(depth: int) -> float:
        return 1 + 0.1 * depth

    chooser = MeasuredDepth(3)
    run(chooser, 100, 256, seconds, 0.8)
    for num_sequences in (127, 63, 31, 15, 7, 3, 1):
        assert set(run(chooser, 10, num_sequences, seconds, 0.8)) == {3}
    # One draft cannot win, even if it came for nothing.
    assert set(run(chooser, 200, 3, seconds, 0.8)) == {0, 2, 3}


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
    run(chooser, TRIAL_STEPS, 8, lambda depth: 1.0, 0.9)
    depths = [chooser.choose(Moment(8)) for _ in range(2000)]
    assert depths[0] == 1
    assert sum(depth > 0 for depth in depths) < 0.1 * 2000


def test_without_modules_nothing_is_measured() -> None:
    assert {MeasuredDepth(0).choose(Moment(number)) for number in range(10)} == {0}


def run_dear(
    chooser: MeasuredDepth, times: Sequence[float], price: float, shares: Sequence[float], free_every: int = 0
) -> tuple[float, int]:
    """(tokens a second of other steps, how often modules caught up) where that takes `price`; a draft is right with a
    share that changes every 400 steps. With `free_every`, one step in so many catches up at none."""
    random, now, num_tokens, total_s, num_dear = np.random.default_rng(0), 0, 0, 0.0, 0
    for step in range(400 * len(shares)):
        is_free = bool(free_every) and step % free_every == 0
        depth = chooser.choose(Moment(4, is_apart=not is_free))
        if depth > now and not is_free:
            chooser.note_catch_up(4, price)
            num_dear += 1
        else:
            num_right = 0
            while num_right < depth and random.random() < shares[step // 400]:
                num_right += 1
            chooser.note_drafts([1] * depth, [int(place < num_right) for place in range(depth)])
            chooser.note_steps(depth, 4, 1, times[depth])
            num_tokens += num_right
            total_s += times[depth]
        num_tokens += 1
        now = depth
    return num_tokens / total_s, num_dear


NEAR_TIMES = (1.0, 1.25, 1.5, 1.75)
"""With drafts of which 0.7 are right, two are as good as three within a hundredth."""


def test_where_catching_up_is_dear_depths_that_are_as_good_do_not_take_turns() -> None:
    cheap, dear = (run_dear(MeasuredDepth(3), NEAR_TIMES, price, [0.7] * 10) for price in (0.0, 30.0))
    assert dear[1] <= 8
    assert dear[1] < cheap[1] / 2
    assert dear[0] > 0.95 * max(rate(depth, NEAR_TIMES.__getitem__, 0.7) for depth in range(4))


def test_a_deeper_depth_waits_for_a_step_that_reads() -> None:
    """Which comes once in 64: few others catch up, and hardly anything is lost by waiting."""
    speed, num_dear = run_dear(MeasuredDepth(3), NEAR_TIMES, 1000.0, [0.7] * 10, free_every=64)
    assert num_dear <= 3
    assert speed > 0.95 * max(rate(depth, NEAR_TIMES.__getitem__, 0.7) for depth in range(4))


def test_a_depth_that_soon_makes_up_for_catching_up_waits_for_nothing() -> None:
    times = (1.0, 1.1, 1.2, 1.3)
    speed, num_dear = run_dear(MeasuredDepth(3), times, 30.0, [0.9] * 10)
    assert 1 <= num_dear <= 12
    assert speed > 0.95 * rate(3, times.__getitem__, 0.9)


TIMES = (1.0, 1.6, 1.9, 2.25)
ACCEPTED = 0.95
APART_S = 11.0


def serve_batches(num_batches: int, module_s: float, num_parts: int = 4) -> list[tuple[float, float]]:
    """(Speed over that of steps without drafts; seconds, over those without drafts) of batches that are read, in some
    parts, and sample 128 tokens each, from the first to the last, eight steps in a row. A module reads the prompts in
    four times `module_s`, and whatever it has not read when it is to draft: in a step apart."""
    chooser, num_sequences, num_prompt, found = MeasuredDepth(3), 256, 64, []
    for _ in range(num_batches):
        read_s, steps_s, num_computed, num_tokens = 4 * 14.0, 0.0, 0.0, 0.0
        num_seen = [0.0] * 3
        while num_tokens < 128:
            is_reading = num_computed < num_prompt
            num_behind = [round(num_sequences * (num_computed - seen)) for seen in num_seen]
            num_coming = num_sequences if is_reading else 0
            depth = chooser.choose(Moment(num_sequences, num_coming, not is_reading, num_behind, 128 - num_tokens))
            num_missed = num_computed - num_seen[depth - 1] if depth else 0.0
            if is_reading:
                num_computed += num_prompt // num_parts
                num_missed += num_prompt // num_parts
                duration_s = 0.0
            elif num_missed:
                duration_s = APART_S
                num_computed += 1
                num_tokens += 1
            else:
                duration_s = 8 * TIMES[depth]
                chooser.note_steps(depth, num_sequences, 8, duration_s)
                num_new = 8 * sum(ACCEPTED**place for place in range(depth + 1))
                num_computed += num_new
                num_tokens += num_new
                nums = [round(1e4 * ACCEPTED**place) for place in range(depth + 1)]
                chooser.note_drafts([10_000] * depth, nums[1:])
            if depth and num_missed:
                module_total_s = depth * module_s * num_missed * 4 / num_prompt
                if is_reading:
                    chooser.note_reading(depth, num_sequences, round(num_sequences * num_missed), module_total_s)
                    read_s += module_total_s
                else:
                    duration_s += module_total_s
                    chooser.note_catch_up(num_sequences, duration_s)
            num_seen[:depth] = [num_computed] * depth
            steps_s += duration_s
        for _ in range(num_sequences):
            chooser.note_end(num_prompt, 128)
        found.append((num_tokens / steps_s, (read_s + 128 * steps_s / num_tokens) / (4 * 14.0 + 128)))
    return found


@pytest.mark.parametrize("num_parts", [4, 64])
@pytest.mark.parametrize("module_s", [0.5, 1.0, 2.0, 3.0, 3.4, 3.8, 4.2, 5.0, 8.0])
def test_wherever_drafts_begin_to_pay_little_is_lost_by_finding_out(module_s: float, num_parts: int) -> None:
    """Also where it is a near thing: steps are never much slower than without drafts, nor is the whole; and where it is
    not, drafts are made."""
    found = serve_batches(40, module_s, num_parts)[4:]
    assert min(speed for speed, _ in found) > 0.95
    assert np.median([speed for speed, _ in found]) > (1.45 if module_s < 3 else 0.98)
    assert np.mean([whole for _, whole in found]) < (0.93 if module_s < 3 else 1.025)


def test_behind_a_trial_without_drafts_they_are_made_again_whatever_that_costs() -> None:
    """It was reckoned before the trial: nobody who samples on and on stays where a trial has left him."""
    chooser, times = MeasuredDepth(1), (1.0, 1.3)
    speed, num_dear = run_dear(chooser, times, 80.0, [0.8] * 50)
    assert num_dear > 1
    assert speed > 0.97 * rate(1, times.__getitem__, 0.8)


def test_a_first_trial_waits_until_prompts_are_read_and_lasts_until_they_are() -> None:
    """Where modules have more to catch up on than is left to sample."""
    chooser, far_behind = MeasuredDepth(3), [4 * 400] * 3
    for _ in range(50):
        assert chooser.choose(Moment(4, num_behind=far_behind, num_wanted=50)) == 0
        chooser.note_steps(0, 4, 1, 1.0)
    for num_read in range(0, 1600, 16):
        assert chooser.choose(Moment(4, 4, is_apart=False, num_behind=[0, num_read, num_read], num_wanted=50)) == 1
    assert chooser.choose(Moment(4, num_behind=[0, 1600, 1600], num_wanted=50)) == 1
    # Less than what is left: it may be tried at once.
    other = MeasuredDepth(3)
    for _ in range(TRIAL_STEPS):
        assert other.choose(Moment(4, num_behind=far_behind, num_wanted=401)) == 0
        other.note_steps(0, 4, 1, 1.0)
    assert other.choose(Moment(4, num_behind=far_behind, num_wanted=401)) == 1


@pytest.mark.parametrize("is_catching_up", [False, True])
def test_what_modules_catch_up_on_in_several_steps_costs_several(is_catching_up: bool) -> None:
    """Three drafts pay, and modules are behind by a tenth of what they catch up on in one step, or by 40 times that."""
    chooser = MeasuredDepth(3)
    run_dear(chooser, (1.0, 1.1, 1.2, 1.3), 30.0, [0.9])
    chooser._depth, chooser._sizes[3].pause_steps = 0, 10_000
    num_behind = 4000 if is_catching_up else 10
    assert chooser.choose(Moment(4, num_behind=[num_behind] * 3, most_behind=100)) == (0 if is_catching_up else 3)


def test_whatever_trials_cost_they_are_repeated_as_often_as_a_small_share_of_time_allows() -> None:
    # Where modules that catch up take long,
    _, num_dear = run_dear(MeasuredDepth(3), NEAR_TIMES, 300.0, [0.7] * 100)
    assert 300.0 * (num_dear - 5) < 0.03 * 40_000 * NEAR_TIMES[2]
    # or the steps of a depth,
    times = (1.0, 1.1, 1.2, 100.0)
    depths = run(MeasuredDepth(3), 20_000, 4, times.__getitem__, 0.9)
    assert 3 in depths[100:]
    assert sum(times[depth] for depth in depths[100:] if depth == 3) < 0.03 * sum(times[depth] for depth in depths)
    # or reading for it.
    assert np.mean([whole for _, whole in serve_batches(200, 100.0)[4:]]) < 1.03


def test_what_trials_might_have_cost_is_not_saved_up() -> None:
    chooser = MeasuredDepth(3)
    run_dear(chooser, NEAR_TIMES, 300.0, [0.7])
    chooser._total_s += 1e6
    _, num_dear = run_dear(chooser, NEAR_TIMES, 300.0, [0.7] * 20)
    assert num_dear <= 3


@pytest.mark.parametrize("num_sequences", [4, 20])
def test_a_depth_gives_way_to_a_deeper_one_unless_modules_are_far_behind(num_sequences: int) -> None:
    """At a size that is known, and at one that does as another."""
    chooser = MeasuredDepth(3)
    run_dear(chooser, (1.0, 1.1, 1.2, 1.3), 1.0, [0.9])
    chooser.note_reading(3, 4, 100, 100.0)
    chooser._sizes[3].pause_steps = 10_000
    for num_behind, depth in ((4000, 0), (0, 3)):
        chooser._depth = 0
        is_apart = num_sequences == 4
        assert chooser.choose(Moment(num_sequences, is_apart=is_apart, num_behind=[num_behind] * 3)) == depth
