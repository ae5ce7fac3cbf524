"""The interval of a mean over trials: that of the tasks' means, however often each is tried."""

import itertools
import math
import random
import statistics

import pytest

from m2forge.trials.run import Mean, Z, clustered_mean, paired_difference, pass_all


def test_one_trial_per_task_gives_the_usual_interval() -> None:
    values = [0.0, 1.0, 0.5, 0.25, 1.0]
    found = clustered_mean([[value] for value in values])
    expected = Z * statistics.stdev(values) / math.sqrt(len(values))
    assert found.value == pytest.approx(0.55)
    assert found.margin == pytest.approx(expected)


def test_repeating_equal_trials_narrows_nothing() -> None:
    once = clustered_mean([[0.0], [1.0], [1.0]])
    often = clustered_mean([[0.0] * 9, [1.0] * 9, [1.0] * 9])
    assert often.value == pytest.approx(once.value)
    assert often.margin == pytest.approx(once.margin)


def test_tasks_without_a_verdict_do_not_count() -> None:
    assert clustered_mean([[], [1.0, 0.0], [], [1.0]]) == clustered_mean([[1.0, 0.0], [1.0]])
    alone = clustered_mean([[1.0, 0.0]])
    assert (alone.value, math.isnan(alone.margin)) == (0.5, True)
    assert clustered_mean([[1.0], [1.0]]) == Mean(1.0, 0.0)


def test_the_interval_holds_the_truth_in_95_of_100_samples() -> None:
    """Tasks differ much in their pass rate: an interval over single trials would hold it in 70 of 100."""
    rng, num_samples, num_tasks, num_trials = random.Random(0), 500, 60, 8
    num_held = {"clustered": 0, "plain": 0}
    for _ in range(num_samples):
        rates = [rng.betavariate(0.5, 0.5) for _ in range(num_tasks)]
        clusters = [[float(rng.random() < rate) for _ in range(num_trials)] for rate in rates]
        plain = clustered_mean([[value] for cluster in clusters for value in cluster])
        clustered = clustered_mean(clusters)
        num_held["clustered"] += abs(clustered.value - 0.5) <= clustered.margin
        num_held["plain"] += abs(plain.value - 0.5) <= plain.margin
    # Three standard errors of a share of 0.95 over 500 samples, and as much again because 60 tasks are few.
    assert 0.91 < num_held["clustered"] / num_samples < 0.98
    assert num_held["plain"] / num_samples < 0.85


def test_pass_all_is_the_share_of_subsets_that_succeed() -> None:
    rng = random.Random(1)
    clusters = [[rng.random() < rate for _ in range(6)] for rate in (0.2, 0.6, 0.9, 1.0)]
    for k in range(1, 7):
        shares = [statistics.mean(all(part) for part in itertools.combinations(trials, k)) for trials in clusters]
        found = pass_all(clusters, k)
        assert found is not None
        assert found.value == pytest.approx(statistics.mean(shares))
    assert pass_all(clusters, 7) is None
    few = pass_all([[True], [True, False]], 2)
    assert few is not None
    assert few.value == 0, "the task with one trial does not count"


def test_pairing_removes_what_tasks_have_in_common() -> None:
    """Two policies on tasks of very different difficulty: one is better by a tenth on each."""
    rates = [index / 20 for index in range(20)]
    better, worse = [[rate + 0.1] for rate in rates], [[rate] for rate in rates]
    found = paired_difference(better, worse)
    assert [found.value, found.margin] == pytest.approx([0.1, 0.0])
    assert clustered_mean(better).margin > 0.1
