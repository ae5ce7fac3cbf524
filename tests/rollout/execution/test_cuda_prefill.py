"""The rows of a graph hold the tokens of any step; which graph serves a step."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from m2forge.model.build import build
from m2forge.rollout.execution.cuda_network import MOST_ROWS, TILE_TOKENS, Shape, lay_out, run_laid_out, shape_of
from m2forge.rollout.execution.model_runner import PlainNetwork
from m2forge.rollout.kv.paged_plan import PagedCache, Span, arranged, planned
from tests.rollout.kv.test_paged_plan import CONFIG

BLOCK_TOKENS, NUM_BLOCKS = 8, 64


@st.composite
def spans_of(draw: st.DrawFn) -> list[Span]:
    """Sequences of one token and of several tiles, none of whose blocks is another's."""
    sizes = draw(st.lists(st.one_of(st.just(1), st.integers(1, 2 * TILE_TOKENS + 1)), min_size=1, max_size=5))
    spans, free = list[Span](), list(draw(st.permutations(range(NUM_BLOCKS))))
    for num_tokens in sizes:
        start = draw(st.integers(0, 20))
        num_blocks = -(-(start + num_tokens) // BLOCK_TOKENS)
        spans.append(Span(start, num_tokens, free[:num_blocks]))
        free = free[num_blocks:]
    return [spans[index] for index in arranged(spans)]


@given(spans=spans_of(), seed=st.integers(0, 1000))
@torch.no_grad()
def test_rows_of_a_graph_give_what_the_spans_do(spans: list[Span], seed: int) -> None:
    config = CONFIG.with_layers(2)
    network = PlainNetwork(build(config, dtype=torch.float64, seed=1))
    generator = torch.Generator().manual_seed(seed)
    caches = [PagedCache(config, NUM_BLOCKS, BLOCK_TOKENS, torch.device("cpu"), torch.float64) for _ in range(2)]
    caches[0].k_YPTGK.normal_(generator=generator)
    caches[0].v_YPTGK.normal_(generator=generator)
    caches[1].k_YPTGK.copy_(caches[0].k_YPTGK)
    caches[1].v_YPTGK.copy_(caches[0].v_YPTGK)
    num_tokens = sum(span.num_tokens for span in spans)
    tokens = torch.randint(0, config.vocab_size, (num_tokens,), generator=generator)
    _, expected_ND, expected_NLK = network.main(tokens, planned(caches[0], spans))
    shape = shape_of(spans)
    integers, row_N = lay_out(tokens.tolist(), spans, shape, caches[1])
    hidden_RD, experts_RLK = run_laid_out(network, torch.from_numpy(integers), shape, caches[1])
    torch.testing.assert_close(hidden_RD[row_N], expected_ND)
    assert expected_NLK is not None
    assert experts_RLK is not None
    assert torch.equal(experts_RLK[row_N], expected_NLK)
    for ours, theirs in ((caches[1].k_YPTGK, caches[0].k_YPTGK), (caches[1].v_YPTGK, caches[0].v_YPTGK)):
        torch.testing.assert_close(ours[:, :NUM_BLOCKS], theirs[:, :NUM_BLOCKS])


@given(num_single=st.integers(0, 300), sizes=st.lists(st.integers(2, 200), max_size=20))
def test_a_shape_holds_its_spans_and_is_little_larger(num_single: int, sizes: list[int]) -> None:
    spans = [Span(0, num, np.zeros(num // 16 + 1, np.int64)) for num in [1] * num_single + sizes]
    if not spans:
        return
    shape, num_tiles = shape_of(spans), sum(-(-num // TILE_TOKENS) for num in sizes)
    assert num_single <= shape.num_single <= max(16, 2 * num_single)
    assert num_tiles <= shape.num_tiles <= max(4, 2 * num_tiles)
    assert (shape.num_single == 0) == (num_single == 0)
    assert (shape.num_tiles == 0) == (num_tiles == 0)
    assert max(len(span.blocks) for span in spans) <= shape.num_blocks


def test_parts_begin_where_kernels_expect_them() -> None:
    shapes = (Shape(16, 4, 32), Shape(0, 12, 64), Shape(64, 0, 32))
    assert all(size * 8 % 16 == 0 for shape in shapes for size in shape.sizes)
    assert MOST_ROWS % TILE_TOKENS == 0
