"""Attention over blocks on CUDA equals the plain form; run where there is a GPU."""

import pytest
import torch
from torch import Tensor

from m2forge.kernels.paged_attention import paged_attention

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Relative to the norm: weights and values are rounded once on their way into each product."""
Heads = tuple[int, int, int]
SMALL: Heads = (16, 4, 64)
LARGE: Heads = (48, 8, 128)


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def drawn(
    heads: Heads, lengths: list[int], num_new: int, block_tokens: int, dtype: torch.dtype, spare: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Sequences of these lengths, the new tokens included; tables have `spare` blocks more than the longest needs."""
    torch.manual_seed(0)
    num_heads, num_kv_heads, head_dim = heads
    width = -(-max(lengths) // block_tokens) + spare
    num_blocks = width * len(lengths) + 2
    k, v = torch.randn(2, num_blocks, block_tokens, num_kv_heads, head_dim, device="cuda").to(dtype)
    q = torch.randn(len(lengths), num_new, num_heads, head_dim, device="cuda").to(dtype)
    table = torch.randperm(num_blocks, device="cuda")[: width * len(lengths)].view(-1, width)
    position = torch.tensor(lengths, device="cuda")[:, None] - num_new + torch.arange(num_new, device="cuda")
    return q, k, v, table, position


def plain(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, position: Tensor, window: tuple[int, int] | None = None
) -> Tensor:
    return paged_attention(q.double(), k.double(), v.double(), table, position, window)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("window", [None, (50, 0), (128, 20)])
@pytest.mark.parametrize(
    ("heads", "lengths", "num_new", "block_tokens"),
    [
        (SMALL, [600, 17, 128, 1], 1, 16),
        (SMALL, [600, 33, 8, 129], 4, 8),
        (SMALL, [900, 300], 300, 16),
        (LARGE, [2000, 3], 1, 16),
        (LARGE, [300, 70], 8, 64),
        (LARGE, [700], 200, 16),
        ((6, 2, 32), [300, 150], 2, 32),
    ],
)
def test_equals_the_plain_form(
    heads: Heads,
    lengths: list[int],
    num_new: int,
    block_tokens: int,
    window: tuple[int, int] | None,
    dtype: torch.dtype,
) -> None:
    from m2forge.kernels.paged_attention_triton import paged_attention_cuda

    operands = drawn(heads, lengths, num_new, block_tokens, dtype)
    expected = plain(*operands, window)
    for parts in (None, 1, 3):
        assert error(paged_attention_cuda(*operands, window, parts), expected) < TOLERANCE[dtype]


def test_reads_nothing_behind_the_end_of_a_sequence() -> None:
    from m2forge.kernels.paged_attention_triton import paged_attention_cuda

    lengths = [200, 31, 16]
    q, k, v, table, position = drawn(SMALL, lengths, 1, 16, torch.bfloat16, spare=4)
    expected = plain(q, k, v, table, position)
    is_read = torch.zeros(k.shape[0], 16, dtype=torch.bool, device="cuda")
    for row, length in enumerate(lengths):
        token = torch.arange(length, device="cuda")
        is_read[table[row, token // 16], token % 16] = True
    k[~is_read], v[~is_read] = float("nan"), float("nan")
    table[2, 1:] = 10**9
    for parts in (1, 2):
        out = paged_attention_cuda(q, k, v, table, position, None, parts)
        assert error(out, expected) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("num_new", [1, 3])
def test_a_captured_graph_follows_tables_and_positions(num_new: int) -> None:
    from m2forge.kernels.paged_attention_triton import paged_attention_cuda

    q, k, v, table, position = drawn(SMALL, [600, 500, 3], num_new, 16, torch.bfloat16, spare=30)
    paged_attention_cuda(q, k, v, table, position)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = paged_attention_cuda(q, k, v, table, position)
    for lengths in ([3, 900, 77], [1000, 128, 5], [129, 127, 3]):
        new = torch.tensor(lengths, device="cuda")[:, None] - num_new + torch.arange(num_new, device="cuda")
        position.copy_(new)
        table.copy_(table.flip(0))
        q.normal_()
        graph.replay()
        assert error(out, plain(q, k, v, table, position)) < TOLERANCE[torch.bfloat16]


def test_a_query_nowhere_gives_zero() -> None:
    from m2forge.kernels.paged_attention_triton import paged_attention_cuda

    q, k, v, table, position = drawn(SMALL, [600, 100], 2, 16, torch.bfloat16)
    position[1] = -1
    for parts in (1, 3):
        out = paged_attention_cuda(q, k, v, table, position, None, parts)
        assert not out[1].any()
        assert out[0].any()


def test_a_row_that_is_none_makes_no_window_wider() -> None:
    from m2forge.kernels.paged_attention_triton import paged_attention_cuda

    q, k, v, table, position = drawn(SMALL, [600], 3, 16, torch.bfloat16)
    expected = plain(q, k, v, table, position, (50, 0))[:, :2]
    position[0, 2] = -1
    # What lies before the window is no number, and would show if it were read.
    k[table[0, :16]], v[table[0, :16]] = float("nan"), float("nan")
    for parts in (1, 3):
        out = paged_attention_cuda(q, k, v, table, position, (50, 0), parts)
        assert error(out[:, :2], expected) < TOLERANCE[torch.bfloat16]
        assert not out[:, 2].any()
