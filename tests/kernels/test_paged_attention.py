"""Attention over blocks equals attention over rows."""

import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from m2forge.kernels.paged_attention import paged_attention, paged_attention_plain

TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 2.0**-8}
"""Sums of at most 13 terms; bfloat16 is computed in float32 and rounded once."""


def plain(q_QHK: Tensor, k_LGK: Tensor, v_LGK: Tensor, start: int, window: tuple[int, int] | None) -> Tensor:
    """One query head of one token at a time."""
    out = torch.empty_like(q_QHK)
    repeats = q_QHK.shape[1] // k_LGK.shape[1]
    for q in range(q_QHK.shape[0]):
        place = start + q
        size, num_sinks = window or (place + 1, 0)
        seen = [token for token in range(place + 1) if place - token < size or token < num_sinks]
        for head in range(q_QHK.shape[1]):
            k, v = k_LGK[seen, head // repeats], v_LGK[seen, head // repeats]
            share = F.softmax(k @ q_QHK[q, head] / q_QHK.shape[-1] ** 0.5, dim=0)
            out[q, head] = share @ v
    return out


@given(
    starts=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    num_new=st.integers(1, 4),
    block_tokens=st.integers(1, 4),
    num_kv_heads=st.integers(1, 2),
    repeats=st.integers(1, 8),
    window=st.none() | st.tuples(st.integers(1, 5), st.integers(0, 2)),
    head_dim=st.sampled_from((1, 3, 8, 16, 20, 32)),
    dtype=st.sampled_from(tuple(TOLERANCE)),
    seed=st.integers(0, 2**20),
)
def test_attention_over_blocks_equals_attention_over_rows(
    starts: list[int],
    num_new: int,
    block_tokens: int,
    num_kv_heads: int,
    repeats: int,
    window: tuple[int, int] | None,
    head_dim: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    most = -(-13 // block_tokens)
    num_blocks = most * len(starts)
    shape = (num_blocks, block_tokens, num_kv_heads, head_dim)
    k, v = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
    # Each token's heads behind something else: a slice of a joint projection.
    joint = torch.randn((len(starts), num_new, 1 + num_kv_heads * repeats, head_dim), generator=generator)
    q = joint.to(dtype)[:, :, 1:]
    table = torch.randperm(num_blocks, generator=generator).view(len(starts), most)
    position = torch.tensor(starts)[:, None] + torch.arange(num_new)
    out = paged_attention(q, k, v, table, position, window)
    for row, start in enumerate(starts):
        k_row, v_row = (x[table[row]].flatten(0, 1)[: start + num_new].double() for x in (k, v))
        expected = plain(q[row].double(), k_row, v_row, start, window)
        torch.testing.assert_close(out[row].double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_long_sequences_of_every_length_read_their_own_tokens() -> None:
    torch.manual_seed(0)
    k, v = torch.randn(2, 60, 16, 3, 64)
    table = torch.randperm(60).view(4, 15)
    for num_new in (1, 5, 100):
        position = torch.tensor([0, 31, 80, 140])[:, None] + torch.arange(num_new)
        q = torch.randn(4, num_new, 9, 64)
        for window in (None, (33, 5)):
            out = paged_attention(q, k, v, table, position, window)
            expected = paged_attention_plain(q.double(), k.double(), v.double(), table, position, window)
            torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)
            low_q, low_k, low_v = q.bfloat16(), k.bfloat16(), v.bfloat16()
            narrow = paged_attention(low_q, low_k, low_v, table, position, window)
            exact = (low_q.double(), low_k.double(), low_v.double())
            expected = paged_attention_plain(*exact, table, position, window)
            torch.testing.assert_close(narrow.double(), expected, rtol=2.0**-8, atol=1e-5)


def test_gradients_reach_what_is_cached() -> None:
    q, k, v = (torch.randn(shape).requires_grad_() for shape in ((1, 2, 2, 8), (2, 4, 1, 8), (2, 4, 1, 8)))
    paged_attention(q, k, v, torch.tensor([[1, 0]]), torch.tensor([[3, 4]])).sum().backward()
    assert all(x.grad is not None and x.grad.any() for x in (q, v))
