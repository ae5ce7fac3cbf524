"""The simulated ring: rates that follow from its numbers, and the bounds of the real window."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m2forge.plan.simulation import Ring, simulate

RING = Ring(
    batch_units=4,
    attempts_per_unit=8,
    queue=16,
    window=8,
    num_jobs=32,
    mean_tokens=1000.0,
    spread=0.0,
    sampler_rate=10_000.0,
    attempt_rate=1000.0,
    step_s=1.0,
)
"""A batch is 32 attempts of 1,000 tokens: 3.2 s of sampling, 1 s of training."""


def test_a_fast_trainer_waits_for_the_sampler() -> None:
    found = simulate(RING, num_steps=200)
    assert found.seconds / found.num_steps == pytest.approx(3.2, rel=0.02)
    assert found.trainer_waits == pytest.approx(1 - 1 / 3.2, abs=0.02)
    assert found.tokens_per_s == pytest.approx(10_000.0, rel=0.01)
    assert "the trainer waits" in found.verdict


def test_a_fast_sampler_waits_for_the_trainer() -> None:
    found = simulate(replace(RING, step_s=8.0), num_steps=100)
    assert found.seconds / found.num_steps == pytest.approx(8.0, rel=0.02)
    assert found.trainer_waits < 0.02
    # 3.2 s of 8 are sampled, by all jobs.
    assert found.sampler_waits == pytest.approx(1 - 3.2 / 8, abs=0.03)
    assert "the samplers wait" in found.verdict


def test_one_attempt_cannot_use_the_whole_sampler() -> None:
    found = simulate(replace(RING, num_jobs=2, step_s=0.1), num_steps=50)
    assert found.tokens_per_s == pytest.approx(2000.0, rel=0.02)


def test_own_seconds_hold_the_slot_and_not_the_sampler() -> None:
    # A lone attempt: one second of its own, then one of sampling.
    found = simulate(replace(RING, num_jobs=1, own_s=1.0, step_s=0.1), num_steps=50)
    assert found.tokens_per_s == pytest.approx(500.0, rel=0.02)
    # 32 attempts of 32 s of their own, and of 1 s of sampling alone, or 3.2 s if all sample at once.
    found = simulate(replace(RING, own_s=32.0, step_s=0.1), num_steps=50)
    assert found.tokens_per_s * 1.02 >= 32 * 1000 / (32 + 3.2)
    assert found.tokens_per_s <= 32 * 1000 / (32 + 1.0) * 1.02


def test_a_short_queue_makes_both_wait() -> None:
    # Strict FIFO over no more units than a batch: nothing is sampled while the slowest attempt runs.
    found = simulate(replace(RING, queue=4, window=1, num_jobs=64, spread=2.0), num_steps=50)
    assert found.trainer_waits > 0.3
    assert found.sampler_waits > 0.3
    assert "enlarge pool.window.queue" in found.verdict


@settings(max_examples=25)
@given(
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(0, 12),
    st.integers(1, 16),
    st.floats(0.0, 2.0),
    st.floats(0.1, 10.0),
    st.floats(0.0, 10.0),
    st.integers(0, 3),
)
def test_lags_stay_inside_the_window(
    batch: int, attempts: int, more: int, window: int, spread: float, step_s: float, own_s: float, seed: int
) -> None:
    queue = batch + more
    ring = replace(RING, batch_units=batch, attempts_per_unit=attempts, queue=queue, window=window)
    ring = replace(ring, spread=spread, step_s=step_s, own_s=own_s)
    found = simulate(ring, num_steps=20, seed=seed)
    assert found.max_lag <= queue + window - 2 + batch - 1
    assert found == simulate(ring, num_steps=20, seed=seed)
    assert found.seconds >= 19 * step_s


def test_a_queue_shorter_than_a_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="never holds a batch"):
        simulate(replace(RING, queue=3))
