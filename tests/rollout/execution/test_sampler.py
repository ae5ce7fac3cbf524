"""Tokens are drawn by the rules, by numbers that depend on seed, sample and place alone."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from m2forge.records import Sampling
from m2forge.rollout.execution.sampler import Row, allowed, distribution, draw, penalised, philox, uniforms
from tests.rollout.plain import plain_distribution, plain_pick

VOCAB = 13

samplings = st.builds(
    Sampling,
    temperature=st.sampled_from((0.0, 0.3, 1.0, 2.5)),
    top_p=st.sampled_from((0.05, 0.5, 0.93, 1.0)),
    top_k=st.sampled_from((0, 1, 3, VOCAB + 4)),
    min_p=st.sampled_from((0.0, 0.1, 1.0)),
    presence_penalty=st.sampled_from((0.0, 0.0, 1.5, -0.5)),
    frequency_penalty=st.sampled_from((0.0, 0.0, 0.7)),
    repetition_penalty=st.sampled_from((1.0, 1.0, 1.4, 0.8)),
)
ids = st.lists(st.integers(0, VOCAB - 1), max_size=6)
rows_of = st.builds(Row, samplings, st.integers(0, 2**64 - 1), st.integers(0, 9), st.integers(0, 2**33), ids, ids)


@given(rows=st.lists(rows_of, min_size=1, max_size=5), seed=st.integers(0, 2**20))
def test_rows_of_any_kind_are_sampled_as_each_alone(rows: list[Row], seed: int) -> None:
    logits = 2 * torch.randn((len(rows), VOCAB), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    before = logits.clone()
    drawn = draw(logits, rows)
    assert torch.equal(logits, before)
    for place, row in enumerate(rows):
        p = plain_distribution(logits[place], row.sampling, row.prompt_ids, row.sampled_ids)
        token = plain_pick(p, row.seed, row.sample, row.index)
        assert int(drawn.token_B[place]) == token
        assert abs(float(drawn.logprob_B[place]) - np.log(p[token])) < 1e-12
        assert abs(float(drawn.raw_logprob_B[place]) - float(logits[place].log_softmax(-1)[token])) < 1e-12


@given(row=rows_of, seed=st.integers(0, 2**20))
def test_the_distribution_is_that_of_the_plain_rules(row: Row, seed: int) -> None:
    logits = torch.randn((1, VOCAB), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    p = plain_distribution(logits[0], row.sampling, row.prompt_ids, row.sampled_ids)
    found = distribution(penalised(logits, [row]), [row])[0].exp().numpy()
    np.testing.assert_allclose(found, p, rtol=0, atol=1e-14)


def test_the_generator_gives_the_published_numbers() -> None:
    """Known answers of Random123 for philox4x32-10."""
    ones = 0xFFFFFFFF
    for counter, key, answer in (
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ones, ones, ones, ones), (ones, ones), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ):
        words = philox(
            tuple(np.array([word], np.uint64) for word in counter),  # type: ignore[arg-type]
            tuple(np.array([word], np.uint64) for word in key),  # type: ignore[arg-type]
        )
        assert tuple(int(word[0]) for word in words) == answer


def test_random_numbers_depend_on_seed_sample_and_position() -> None:
    seeds, samples, places = zip(
        *((s, n, t) for s in (0, 1, 2**63) for n in range(20) for t in range(100)), strict=True
    )
    numbers = uniforms(seeds, samples, places)
    assert len(set(numbers.tolist())) == len(numbers)
    assert 0 <= numbers.min() <= numbers.max() < 1
    counts, _ = np.histogram(numbers, 20, (0, 1))
    expected = len(numbers) / 20
    # Chi-square of 19 degrees of freedom at 0.1%; the numbers are fixed.
    assert ((counts - expected) ** 2 / expected).sum() < 43.8
    assert uniforms([5], [3], [7]) == uniforms([1, 5], [3, 3], [7, 7])[1]


def test_draws_follow_the_distribution() -> None:
    logits = torch.randn((1, 5), generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    num_draws = 4000
    rows = [Row(Sampling(0.8), 11, 0, place) for place in range(num_draws)]
    counts = draw(logits.expand(num_draws, -1), rows).token_B.bincount(minlength=5)
    expected = (logits[0] / 0.8).softmax(-1) * num_draws
    # Chi-square of 4 degrees of freedom at 1%; the seed is fixed.
    assert float(((counts - expected) ** 2 / expected).sum()) < 13.3


def test_ties_go_to_the_lower_id() -> None:
    x = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]])
    for sampling, found in (
        (Sampling(top_k=2), [1, 2]),
        (Sampling(min_p=1.0), [1, 2, 3]),
        (Sampling(top_p=1e-9), [1]),
        (Sampling(0.0), [1]),
    ):
        assert allowed(x, [sampling])[0].nonzero().flatten().tolist() == found


@pytest.mark.parametrize("temperature", [5e-324, 1e-30, 1e30])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_extreme_temperatures_stay_finite(temperature: float, dtype: torch.dtype) -> None:
    logits = torch.tensor([[-30.0, 12.0, 300.0, 0.0]], dtype=dtype)
    drawn = draw(logits, [Row(Sampling(temperature), 1, 0, 0)])
    assert bool(torch.isfinite(drawn.logprob_B).all())
    if temperature < 1:
        assert drawn.token_B.tolist() == [2]
        assert drawn.logprob_B.tolist() == [0.0]
