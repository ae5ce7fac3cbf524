"""Attention plans: documents are blind to each other, windows reach exactly as far as they say."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from m2forge.model.build import build
from m2forge.model.config import FamilyName, ModelConfig, WindowConfig
from m2forge.model.plan import AttentionPlan, CausalRows, Documents, visible
from tests.conftest import FEW_CASES
from tests.model.bias import set_biases
from tests.model.draw import FAMILIES, model_configs

EXACT = 1e-11
"""Float64 sums of another order, through at most three layers; experts are chosen alike unless scores tie."""


def windows(num_layers: int) -> st.SearchStrategy[WindowConfig | None]:
    layers = st.sets(st.integers(0, num_layers - 1), min_size=1).map(lambda chosen: tuple(sorted(chosen)))
    window = st.builds(WindowConfig, size=st.integers(1, 12), layers=layers, num_sinks=st.integers(0, 4))
    return st.none() | window


def with_window(config: ModelConfig, window: WindowConfig | None) -> ModelConfig:
    attention = config.attention.model_copy(update={"window": window})
    return config.model_copy(update={"attention": attention})


def drawn_model(data: st.DataObject, family: FamilyName) -> tuple[torch.nn.Module, ModelConfig, torch.Generator]:
    config = data.draw(model_configs(family, num_mtp=data.draw(st.integers(0, 1))))
    config = with_window(config, data.draw(windows(config.num_layers)))
    seed = data.draw(st.integers(0, 2**20))
    model = build(config, dtype=torch.float64, seed=seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.dim() > 1 else 1)
    set_biases(model, std=0.1, seed=seed)
    return model, config, torch.Generator().manual_seed(seed)


def sees(q: int, k: int, window: WindowConfig | None) -> bool:
    """The rule in words: not ahead, and near enough or a sink. Both count from the document's first token."""
    if k > q:
        return False
    return window is None or q - k < window.size or k < window.num_sinks


# -- documents and rows -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@FEW_CASES
@given(data=st.data())
def test_packed_documents_equal_each_document_alone(family: FamilyName, data: st.DataObject) -> None:
    model, config, generator = drawn_model(data, family)
    lengths = data.draw(st.lists(st.integers(1, 17), min_size=1, max_size=5))
    tokens = torch.randint(0, config.vocab_size, (sum(lengths),), generator=generator)
    packed = model(tokens, Documents(lengths))
    alone = [model(part[None]) for part in tokens.split(lengths)]
    torch.testing.assert_close(packed.hidden_ND, torch.cat([out.hidden_ND for out in alone]), atol=EXACT, rtol=EXACT)
    for depth, hidden_ND in enumerate(packed.mtp_hidden_ND):
        expected = torch.cat([out.mtp_hidden_ND[depth] for out in alone])
        torch.testing.assert_close(hidden_ND, expected, atol=EXACT, rtol=EXACT)
    if packed.load_LE is not None:
        assert torch.equal(packed.load_LE, sum(out.load_LE for out in alone))


@pytest.mark.parametrize("family", FAMILIES)
@FEW_CASES
@given(data=st.data())
def test_rows_equal_documents_of_one_length_and_gradients_too(family: FamilyName, data: st.DataObject) -> None:
    model, config, generator = drawn_model(data, family)
    num_rows, length = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 17))
    tokens = torch.randint(0, config.vocab_size, (num_rows, length), generator=generator)
    gradients = []
    for plan in (CausalRows(num_rows, length), Documents([length] * num_rows)):
        model.zero_grad()
        model(tokens.flatten(), plan).hidden_ND.square().sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for of_rows, of_documents in zip(*gradients, strict=True):
        # Relative to the largest entry: float64 sums of another order.
        torch.testing.assert_close(of_rows, of_documents, rtol=0, atol=1e-9 * (1 + of_rows.abs().max().item()))


@given(data=st.data())
def test_trailing_padding_leaves_earlier_tokens_alone(data: st.DataObject) -> None:
    model, config, generator = drawn_model(data, data.draw(st.sampled_from(FAMILIES)))
    length, padding = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 9))
    tokens = torch.randint(0, config.vocab_size, (2, length + padding), generator=generator)
    bare = model(tokens[:, :length]).hidden_ND.view(2, length, -1)
    padded = model(tokens).hidden_ND.view(2, length + padding, -1)[:, :length]
    torch.testing.assert_close(bare, padded, atol=EXACT, rtol=EXACT)


@pytest.mark.parametrize("plan", [CausalRows(3, 4), Documents([4, 4, 4]), CausalRows(1, 5), Documents([1, 3, 1, 2])])
def test_every_token_meets_its_parent_and_a_first_token_nothing(plan: AttentionPlan) -> None:
    position = plan.position_N.tolist()
    x_ND = torch.arange(1.0, len(position) + 1)[:, None].expand(-1, 3)
    expected = [[float(n) if position[n] else 0.0] * 3 for n in range(len(position))]
    assert plan.to_parent(x_ND).tolist() == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_parents_keep_the_precision_of_the_states(dtype: torch.dtype) -> None:
    for plan in (CausalRows(2, 3), Documents([2, 4])):
        assert plan.to_parent(torch.ones(6, 2, dtype=dtype)).dtype == dtype


def test_positions_count_from_each_document_start() -> None:
    assert Documents([2, 1, 3]).position_N.tolist() == [0, 1, 0, 0, 1, 2]
    assert Documents([2, 1, 3]).start_N.tolist() == [0, 0, 2, 3, 3, 3]
    assert CausalRows(2, 3).position_N.tolist() == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize("lengths", [[], [3, 0, 2], [-1]])
def test_documents_without_tokens_are_refused(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="at least one token, got lengths"):
        Documents(lengths)


# -- windows ----------------------------------------------------------------------------------------------------------


def dense_attention(q_NHK: Tensor, k_NGK: Tensor, v_NGK: Tensor, mask_NN: Tensor) -> Tensor:
    """softmax(q·k / sqrt K) v, head by head, with what is not visible at minus infinity."""
    heads, groups = q_NHK.shape[1], k_NGK.shape[1]
    outs = []
    for head in range(heads):
        group = head * groups // heads
        score_NN = q_NHK[:, head] @ k_NGK[:, group].t() / math.sqrt(q_NHK.shape[2])
        outs.append(score_NN.masked_fill(~mask_NN, -math.inf).softmax(-1) @ v_NGK[:, group])
    return torch.stack(outs, dim=1)


def rule_mask(lengths: list[int], window: WindowConfig | None) -> Tensor:
    """Every pair of tokens, judged one at a time."""
    place = [(document, depth) for document, length in enumerate(lengths) for depth in range(length)]
    return torch.tensor(
        [[q_doc == k_doc and sees(q, k, window) for k_doc, k in place] for q_doc, q in place], dtype=torch.bool
    )


@given(data=st.data())
def test_bound_attention_equals_a_dense_masked_one(data: st.DataObject) -> None:
    groups, repeat = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    window = data.draw(windows(1))
    if data.draw(st.booleans()):
        num_rows, length = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 20))
        plan: CausalRows | Documents = CausalRows(num_rows, length)
        lengths = [length] * num_rows
    else:
        lengths = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=4))
        plan = Documents(lengths)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**20)))

    def normal(heads: int) -> Tensor:
        return torch.randn(sum(lengths), heads, 8, generator=generator, dtype=torch.float64)

    q, k, v = normal(groups * repeat), normal(groups), normal(groups)
    expected = dense_attention(q, k, v, rule_mask(lengths, window))
    torch.testing.assert_close(plan.bind(window)(q, k, v), expected, atol=EXACT, rtol=EXACT)
    query_Q = some_tokens(sum(lengths), generator)
    found = plan.bind_queries(window, query_Q)(q[query_Q], k, v)
    torch.testing.assert_close(found, expected[query_Q], atol=EXACT, rtol=EXACT)


def some_tokens(num_tokens: int, generator: torch.Generator) -> Tensor:
    """At least one, ascending."""
    (token_Q,) = (torch.rand(num_tokens, generator=generator) < torch.rand(1, generator=generator)).nonzero(
        as_tuple=True
    )
    return token_Q if token_Q.shape[0] else torch.tensor([num_tokens // 2])


@given(length=st.integers(1, 24), window=windows(1))
def test_a_window_reaches_size_tokens_back_and_to_the_sinks(length: int, window: WindowConfig | None) -> None:
    mask = visible(length, window)
    if mask is None:
        mask = torch.ones(length, length, dtype=torch.bool).tril()
    assert torch.equal(mask, rule_mask([length], window))


def test_a_window_by_hand() -> None:
    mask = visible(6, WindowConfig(size=2, layers=(0,), num_sinks=1))
    assert mask is not None
    rows = ["".join("x" if seen else "." for seen in row) for row in mask.tolist()]
    assert rows == ["x.....", "xx....", "xxx...", "x.xx..", "x..xx.", "x...xx"]


# -- block masks ------------------------------------------------------------------------------------------------------


def listed_blocks(num_blocks: Tensor | None, indices: Tensor | None) -> set[tuple[int, int]]:
    """(query block, key block) pairs that a count and an index list name."""
    assert num_blocks is not None
    assert indices is not None
    pairs = []
    for q, (count, row) in enumerate(zip(num_blocks[0, 0].tolist(), indices[0, 0].tolist(), strict=True)):
        pairs += [(q, k) for k in row[:count]]
    assert len(pairs) == len(set(pairs))
    return set(pairs)


BLOCK = 128
"""That of kernels/flex.py, which tests import when they run: it loads torch's compiler."""
NEAR_BLOCK = st.integers(1, 3) | st.integers(BLOCK - 2, BLOCK + 2) | st.integers(2 * BLOCK - 1, 2 * BLOCK + 1)


@given(
    lengths=st.lists(NEAR_BLOCK | st.integers(1, 300), min_size=1, max_size=6),
    size=st.none() | NEAR_BLOCK | st.integers(1, 700),
    num_sinks=st.integers(0, 4) | NEAR_BLOCK,
)
def test_block_masks_hold_exactly_the_visible_pairs(lengths: list[int], size: int | None, num_sinks: int) -> None:
    from m2forge.kernels.flex import document_mask

    start_N = Documents(lengths).start_N
    num_tokens = sum(lengths)
    mask = document_mask(start_N, size, num_sinks)
    partial = listed_blocks(mask.kv_num_blocks, mask.kv_indices)
    full = listed_blocks(mask.full_kv_num_blocks, mask.full_kv_indices)
    assert not partial & full

    token = torch.arange(num_tokens)
    q, k = token[:, None], token[None, :]
    visible_NN = (k <= q) & (start_N[q] == start_N[k])
    if size is not None:
        visible_NN &= (q - k < size) | (k - start_N[k] < num_sinks)
    # What the kernel sees: everything in a full block, in a partial one what the token test lets through.
    seen_NN = torch.zeros_like(visible_NN)
    tested_NN = mask.mask_mod(token.new_tensor(0), token.new_tensor(0), q, k)
    for pairs, content_NN in ((partial, tested_NN), (full, torch.ones_like(visible_NN))):
        for q_block, k_block in pairs:
            area = slice(q_block * BLOCK, (q_block + 1) * BLOCK), slice(k_block * BLOCK, (k_block + 1) * BLOCK)
            seen_NN[area] = content_NN[area]
    assert torch.equal(seen_NN, visible_NN)


def test_block_masks_skip_what_nobody_sees() -> None:
    from m2forge.kernels.flex import document_mask

    mask = document_mask(Documents([4 * BLOCK, 4 * BLOCK]).start_N, None, 0)
    partial = listed_blocks(mask.kv_num_blocks, mask.kv_indices)
    full = listed_blocks(mask.full_kv_num_blocks, mask.full_kv_indices)
    # Two triangles of four blocks: the diagonal is tested token by token, the rest is full.
    assert partial == {(b, b) for b in range(8)}
    assert full == {(q, k) for q in range(8) for k in range(q) if q // 4 == k // 4}
