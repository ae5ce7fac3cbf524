"""What the host finds of the places of spans is what the device does."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from m2forge.model.preset import preset
from m2forge.rollout.kv.paged_plan import Bundle, PagedCache, PagedPlan, Span, arranged, planned

CONFIG = preset("m2-nano").model_copy(update={"num_mtp": 1})
NUM_BLOCKS, BLOCK_TOKENS = 32, 4


@st.composite
def spans_of(draw: st.DrawFn) -> list[Span]:
    """Sequences that share no block that is written; some tables go on past the end."""
    spans, free = list[Span](), draw(st.permutations(range(NUM_BLOCKS)))
    while free and len(spans) < 6:
        start, num_tokens = draw(st.integers(0, 9)), draw(st.integers(1, 9))
        num_blocks = -(-(start + num_tokens) // BLOCK_TOKENS) + draw(st.integers(0, 1))
        if num_blocks > len(free):
            break
        spans.append(Span(start, num_tokens, free[:num_blocks]))
        free = free[num_blocks:]
    return [spans[place] for place in arranged(spans)]


@given(spans=spans_of())
def test_places_are_those_that_a_plan_finds_by_itself(spans: list[Span]) -> None:
    cache = PagedCache(CONFIG, NUM_BLOCKS, BLOCK_TOKENS, torch.device("cpu"), torch.float32, 1)
    plan = planned(cache, spans)
    # Each span has a plan of its own, and nothing is said of its places.
    plains = [
        PagedPlan(
            cache,
            [Bundle(0, torch.tensor([span.blocks]), torch.arange(span.start, span.start + span.num_tokens)[None])],
        )
        for span in spans
    ]
    for name in ("position_N", "slot_N", "parent_slot_N"):
        ours = getattr(plan, name)
        assert torch.equal(ours, torch.cat([getattr(plain, name) for plain in plains]))
        assert ours.data_ptr() % 16 == 0
    for each in plan._bundles:
        num_rows = each.position_BQ.numel()
        assert torch.equal(each.position_BQ.flatten(), plan.position_N[each.first : each.first + num_rows])
        assert each.position_BQ.data_ptr() % 16 == each.table_BS.data_ptr() % 16 == 0
    q_NHK = torch.randn(plan.slot_N.numel(), CONFIG.attention.num_heads, CONFIG.attention.head_dim)
    k_PTGK, v_PTGK = cache.k_YPTGK[0].normal_(), cache.v_YPTGK[0].normal_()
    parts = q_NHK.split([span.num_tokens for span in spans])
    outs = [plain.attend(part, k_PTGK, v_PTGK, None) for plain, part in zip(plains, parts, strict=True)]
    torch.testing.assert_close(plan.attend(q_NHK, k_PTGK, v_PTGK, None), torch.cat(outs))
