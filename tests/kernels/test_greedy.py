"""The native choice of the likeliest token equals torch's."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from m2forge.kernels.greedy import greedy, greedy_plain


@given(
    num_rows=st.integers(1, 9),
    vocab_size=st.integers(1, 300),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.float64]),
    num_values=st.integers(2, 40),
    seed=st.integers(0, 99),
)
def test_choice_equals_its_plain_twin(
    num_rows: int, vocab_size: int, dtype: torch.dtype, num_values: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    # Few values, so that several tokens are the likeliest.
    logits = torch.randint(-num_values, num_values, (num_rows, vocab_size), generator=generator).to(dtype) / 4
    token, logprob = greedy(logits)
    _, exact = greedy_plain(logits.double())
    first = (logits == logits.amax(-1, keepdim=True)).int().argmax(-1)
    assert torch.equal(token, first)
    # A sum of up to 300 exponentials in float32.
    torch.testing.assert_close(logprob.double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_excluded_tokens_take_no_part(dtype: torch.dtype) -> None:
    logits = torch.full((2, 37), -torch.inf, dtype=dtype)
    logits[0, 5], logits[1, 36] = 3.0, -1e30
    token, logprob = greedy(logits)
    assert token.tolist() == [5, 36]
    assert logprob.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_no_number_is_found_in_its_row_alone(dtype: torch.dtype) -> None:
    logits = torch.randn((3, 41), generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[1, 17] = logits[1, 30] = torch.nan
    token, logprob = greedy(logits)
    assert int(token[1]) == 17
    assert logprob.isnan().tolist() == [False, True, False]
