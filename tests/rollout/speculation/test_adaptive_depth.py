"""The depth of speculation is the one that pays, and finding it costs little."""

from collections import Counter
from collections.abc import Sequence

import pytest

from m2forge.rollout.speculation.adaptive_depth import MARGIN, TRIAL_STEPS, MeasuredDepth, Moment
from tests.rollout.speculation.depth_machine import rate, run


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


def test_prefill_for_a_growing_batch_uses_the_whole_batchs_depth() -> None:
    chooser = MeasuredDepth(3)
    for _ in range(3):
        run(chooser, 300, 2, lambda depth: 1 + 0.1 * depth, 0.8)
        run(chooser, 300, 200, lambda depth: 1.0 + depth, 0.8)
    for num_sequences in (1, 2, 50, 199):
        assert chooser.choose(Moment(num_sequences, num_after_prefill=200, is_separate_step=False)) == 0
    assert chooser.choose(Moment(1, num_after_prefill=2, is_separate_step=False)) == 3
    # A size that was never met does as the nearest.
    assert chooser.choose(Moment(200, num_after_prefill=4000, is_separate_step=False)) == 0
    assert Counter(run(chooser, 100, 2, lambda depth: 1 + 0.1 * depth, 0.8))[3] > 90


def test_text_that_changes_changes_the_depth() -> None:
    chooser = MeasuredDepth(3)

    def seconds(depth: int) -> float:
        return 1 + 0.25 * depth

    assert Counter(run(chooser, 1000, 1, seconds, 0.9)).most_common(1)[0][0] == 3
    assert Counter(run(chooser, 6000, 1, seconds, 0.05)[3000:]).most_common(1)[0][0] == 0
    assert Counter(run(chooser, 12000, 1, seconds, 0.9)[9000:]).most_common(1)[0][0] == 3


def test_three_drafts_are_tried_where_one_does_not_pay() -> None:
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


def served(chooser: MeasuredDepth, num_prefilled: int, reading_s: float, num_batches: int = 60) -> Counter[int]:
    """How often each depth, where batches of 16 read so many tokens each, which takes a module `reading_s` a token,
    and then sample 64; a step takes 1 + 0.1 · depth, and 0.8 of all drafts are right."""
    depths = Counter[int]()
    for _ in range(num_batches):
        for num_before in (0, 8):  # half of them at a time
            depth = chooser.choose(Moment(num_before + 8, num_after_prefill=16, is_separate_step=False))
            if depth and num_prefilled:
                chooser.note_mtp_prefill(depth, 16, 8 * num_prefilled, 8 * num_prefilled * reading_s * depth)
        depths.update(run(chooser, 64, 16, lambda depth: 1 + 0.1 * depth, 0.8))
        for _ in range(16):
            chooser.note_end(num_prefilled, 64)
    return depths


@pytest.mark.parametrize(("reading_s", "best"), [(0.0, 3), (1e-3, 3), (4e-3, 1), (1e-2, 0)])
def test_the_fastest_depth_that_pays_with_prompts_is_chosen(reading_s: float, best: int) -> None:
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


def test_a_size_without_measurements_uses_the_nearest() -> None:
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
