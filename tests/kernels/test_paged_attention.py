"""Attention over blocks equals attention over rows."""

import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from m2forge.kernels.paged_attention import paged_attention


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
    repeats=st.integers(1, 3),
    window=st.none() | st.tuples(st.integers(1, 5), st.integers(0, 2)),
    seed=st.integers(0, 2**20),
)
def test_attention_over_blocks_equals_attention_over_rows(
    starts: list[int],
    num_new: int,
    block_tokens: int,
    num_kv_heads: int,
    repeats: int,
    window: tuple[int, int] | None,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    head_dim, most = 8, -(-13 // block_tokens)
    num_blocks = most * len(starts)
    shape = (num_blocks, block_tokens, num_kv_heads, head_dim)
    k, v = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    q = torch.randn((len(starts), num_new, num_kv_heads * repeats, head_dim), generator=generator, dtype=torch.float64)
    table = torch.randperm(num_blocks, generator=generator).view(len(starts), most)
    position = torch.tensor(starts)[:, None] + torch.arange(num_new)
    out = paged_attention(q, k, v, table, position, window)
    for row, start in enumerate(starts):
        k_row, v_row = (x[table[row]].flatten(0, 1)[: start + num_new] for x in (k, v))
        # Float64 sums of at most 13 terms.
        torch.testing.assert_close(out[row], plain(q[row], k_row, v_row, start, window), rtol=0, atol=1e-13)
