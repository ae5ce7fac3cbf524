"""The network over token trees equals the network over rows: loss, every gradient, expert loads, balance."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from m2forge.model.config import WindowConfig
from m2forge.model.plan import Documents, Trees
from m2forge.model.transformer import Output, Transformer, aux_loss
from m2forge.records import Call
from m2forge.tree.flat import FlatTree, flatten
from m2forge.tree.pack import pack_trees
from tests.model.draw_tree import (
    MIN_MARGIN,
    SMALL_TREE,
    drawn_network,
    forests,
    tokens_of,
    watched,
    windowed,
    windows,
)
from tests.tree.draw import build, make_call

SAME_GRADIENT = 1e-9
"""Tolerance relative to a gradient's largest entry: float64 sums in another order, through five blocks and back."""
NO_GRADIENT = 1e-15
"""Tolerance relative to the largest gradient, for gradients that are zero but for rounding."""
SAME_LOSS = 1e-12
"""Tolerance relative to the sum of the absolute terms."""


@dataclass
class Step:
    """What an optimizer step would see."""

    loss: float
    size: float
    """Sum of the absolute terms of the loss."""
    aux: float
    load_LE: Tensor
    gradients: dict[str, Tensor]
    margin: float


@dataclass
class Part:
    """One pass: tokens, the plan, and the loss edges with their weights, those of the modules behind the main ones."""

    tokens_N: Tensor
    plan: Trees | Documents
    position_M: Tensor
    target_M: Tensor
    weight_KM: Tensor
    num_counted: int


def weights_of(call: Call, tree: int, sample: int) -> Tensor:
    """(1 + modules, response tokens), the same wherever the sample is computed; negative ones too."""
    generator = torch.Generator().manual_seed(1000 * tree + sample)
    shape = (1 + SMALL_TREE.num_mtp, call.response_ids.size)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def rows_part(forest: Sequence[Sequence[Call]]) -> Part:
    """Every sample a row of its own."""
    samples = [(call, tree, index) for tree, calls in enumerate(forest) for index, call in enumerate(calls)]
    rows = [tokens_of(call) for call, _, _ in samples]
    starts = np.cumsum([0, *(len(row) for row in rows)])
    child_M = torch.cat(
        [
            torch.arange(call.prompt_ids.size, len(row)) + int(start)
            for (call, _, _), row, start in zip(samples, rows, starts, strict=False)
        ]
    )
    tokens_N = torch.cat(rows)
    weight_KM = torch.cat([weights_of(*sample) for sample in samples], dim=1)
    return Part(
        tokens_N, Documents([len(row) for row in rows]), child_M - 1, tokens_N[child_M], weight_KM, len(tokens_N)
    )


def tree_part(flat: FlatTree, forest: Sequence[Sequence[Call]], num_padding: int = 0) -> Part:
    samples = list(zip(flat.tree_S.tolist(), flat.sample_S.tolist(), strict=True))
    weights = [weights_of(forest[tree][sample], tree, sample) for tree, sample in samples]
    return Part(
        torch.tensor(np.append(flat.tokens_N, np.zeros(num_padding, np.int64))),
        Trees(flat, length=flat.num_tokens + num_padding),
        torch.tensor(flat.edge_position_M, dtype=torch.int64),
        torch.tensor(flat.edge_target_M, dtype=torch.int64),
        torch.cat(weights, dim=1),
        flat.num_input_tokens,
    )


def step(model: Transformer, parts: Sequence[Part]) -> Step:
    """Gradients of Σ over edges, of the main model and of each module, of weight · −log p, plus the balance loss."""
    model.zero_grad()
    with watched(model) as watch:
        outputs = [model(part.tokens_N, part.plan) for part in parts]
    load_LE = torch.stack([load_of(output) for output in outputs]).sum(0)
    total, aux, size = torch.zeros((), dtype=torch.float64), 0.0, 0.0
    for part, output in zip(parts, outputs, strict=True):
        for weight_M, hidden_ND in zip(part.weight_KM, (output.hidden_ND, *output.mtp_hidden_ND), strict=True):
            logp_MV = model.logits(hidden_ND[part.position_M]).log_softmax(-1)
            terms_M = -weight_M * logp_MV.gather(1, part.target_M[:, None])[:, 0]
            total, size = total + terms_M.sum(), size + float(terms_M.detach().abs().sum())
        assert output.affinity_LE is not None
        balance = aux_loss(load_LE, output.affinity_LE, sum(part.num_counted for part in parts))
        total, aux = total + balance, aux + balance.item()
    total.backward()
    zero = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return Step(total.item(), size + abs(aux), aux, load_LE, zero | found, watch.margin)


def load_of(output: Output) -> Tensor:
    assert output.load_LE is not None
    assert output.load_LE.dtype == torch.int64
    return output.load_LE


def assert_equal(ours: Step, rows: Step) -> None:
    assert torch.equal(ours.load_LE, rows.load_LE)
    assert abs(ours.loss - rows.loss) <= SAME_LOSS * rows.size
    assert ours.aux == pytest.approx(rows.aux, rel=1e-12)
    largest = max(float(gradient.abs().max()) for gradient in rows.gradients.values())
    for name, expected in rows.gradients.items():
        off = float((ours.gradients[name] - expected).abs().max())
        assert off <= SAME_GRADIENT * float(expected.abs().max()) + NO_GRADIENT * largest, name


# -- rows and trees ---------------------------------------------------------------------------------------------------


def test_trees_train_as_independent_rows_do() -> None:
    seen: Counter[str] = Counter()

    @given(
        forest=forests(),
        window=windows(),
        budget=st.none() | st.integers(0, 30),
        num_padding=st.integers(0, 5),
        seed=st.integers(0, 2**20),
    )
    def check(
        forest: list[list[Call]], window: WindowConfig | None, budget: int | None, num_padding: int, seed: int
    ) -> None:
        model = drawn_network(windowed(SMALL_TREE, window), seed)
        rows = step(model, [rows_part(forest)])
        seen["cases"] += 1
        if rows.margin < MIN_MARGIN:
            seen["discarded"] += 1
            return
        trees = [build(calls) for calls in forest]
        longest = max(len(tokens_of(call)) for calls in forest for call in calls)
        # Above the longest path by the budget drawn: small ones cut trees, the largest packs them all together.
        flats = pack_trees(trees, 10**6 if budget is None else longest + budget)
        seen["packs"] += len(flats)
        seen["branches"] += sum(flat.node_start_V.size > len(forest) for flat in flats)
        assert_equal(step(model, [tree_part(flat, forest, num_padding) for flat in flats]), rows)

    check()
    # A gap below 1e-9 between two of six scores, at some hundred tokens and layers, is one case in a million.
    assert seen["discarded"] <= seen["cases"] // 50
    assert seen["branches"] > seen["cases"] // 2
    assert seen["packs"] > seen["cases"]


def test_rows_alone_say_the_same() -> None:
    """Each sample through the network by itself, so that nothing packed stands on the side that judges."""
    forest = [
        [make_call([0], [1, 2, 3], 0), make_call([0], [1, 2, 4, 4], 1), make_call([0], [1, 2, 3], 2)],
        [make_call([0, 1], [], 3), make_call([3, 3, 3, 3], [1], 4), make_call([3, 3], [2, 2, 2, 2, 2], 5)],
    ]
    model = drawn_network(SMALL_TREE, seed=5)
    alone = [
        Part(
            part.tokens_N, Documents([len(part.tokens_N)]), part.position_M, part.target_M, weight_KM, part.num_counted
        )
        for tree, calls in enumerate(forest)
        for index, call in enumerate(calls)
        for part, weight_KM in [(rows_part([[call]]), weights_of(call, tree, index))]
    ]
    rows = step(model, alone)
    assert rows.margin > MIN_MARGIN
    assert_equal(step(model, [rows_part(forest)]), rows)
    (flat,) = pack_trees([build(calls) for calls in forest], 100)
    assert flat.num_tokens < flat.num_input_tokens
    assert_equal(step(model, [tree_part(flat, forest)]), rows)


def test_float32_trees_are_as_near_to_the_truth_as_float32_rows() -> None:
    """The native kernels, with nodes of one token and of dozens."""
    generator = np.random.default_rng(0)
    trunk = generator.integers(0, 5, 90).tolist()
    forest = [
        [
            make_call(trunk[:cut], generator.integers(0, 5, size), cut)
            for cut in (40, 41, 60, 60, 90)
            for size in (1, 30)
        ]
    ]
    model = drawn_network(SMALL_TREE, seed=10)
    part = tree_part(flatten(build(forest[0])), forest)
    exact = step(model, [rows_part(forest)])
    model.float()
    rows, tree = step(model, [rows_part(forest)]), step(model, [part])
    assert exact.margin > 1e-4  # far above the rounding of a float32 score
    assert torch.equal(rows.load_LE, exact.load_LE)
    assert torch.equal(tree.load_LE, exact.load_LE)
    for name, expected in exact.gradients.items():
        largest = float(expected.abs().max())
        of_rows, of_tree = (float((run.gradients[name] - expected).abs().max()) / largest for run in (rows, tree))
        assert of_tree <= 3 * of_rows + 1e-6, name
        assert of_tree <= 1e-4, name


def test_recomputed_blocks_serve_trees() -> None:
    forest = [[make_call([0, 1], [2, 3, 4], 0), make_call([0, 1], [2, 2], 1), make_call([0, 1, 2, 3], [1, 1], 2)]]
    model = drawn_network(SMALL_TREE, seed=2)
    part = tree_part(flatten(build(forest[0])), forest)
    kept = step(model, [part])
    model.recompute = "block"
    again = step(model, [part])
    assert all(torch.equal(kept.gradients[name], again.gradients[name]) for name in kept.gradients)


@given(forest=forests(max_trees=2), window=windows(), data=st.data())
def test_a_branch_does_not_reach_the_others(
    forest: list[list[Call]], window: WindowConfig | None, data: st.DataObject
) -> None:
    flats = pack_trees([build(calls) for calls in forest], 10**6)
    (flat,) = flats
    model = drawn_network(windowed(SMALL_TREE, window), seed=data.draw(st.integers(0, 2**20)))
    top = data.draw(st.integers(0, flat.num_tokens - 1))
    changed = range(top, int(flat.exit_N[top]))
    others = [token for token in range(flat.num_tokens) if token not in changed]
    tokens_N = torch.tensor(flat.tokens_N, dtype=torch.int64)
    other_N = tokens_N.clone()
    other_N[list(changed)] = (other_N[list(changed)] + 1) % SMALL_TREE.vocab_size
    with torch.no_grad():
        before, after = (model(tokens, Trees(flat)) for tokens in (tokens_N, other_N))
        for one, two in zip(
            (before.hidden_ND, *before.mtp_hidden_ND), (after.hidden_ND, *after.mtp_hidden_ND), strict=True
        ):
            moved_N = (model.logits(one) - model.logits(two)).abs().amax(-1)
            assert moved_N[top] > 1e-6
            assert not others or moved_N[others].max() <= 1e-12


@given(forest=forests(), num_padding=st.integers(1, 40), seed=st.integers(0, 2**20))
def test_padding_changes_nothing(forest: list[list[Call]], num_padding: int, seed: int) -> None:
    (flat,) = pack_trees([build(calls) for calls in forest], 10**6)
    model = drawn_network(SMALL_TREE, seed)
    tokens_N = torch.tensor(flat.tokens_N, dtype=torch.int64)
    filler = torch.randint(0, SMALL_TREE.vocab_size, (num_padding,), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        bare = model(tokens_N, Trees(flat))
        padded = model(torch.cat((tokens_N, filler)), Trees(flat, length=flat.num_tokens + num_padding))
    for one, two in zip((bare.hidden_ND, *bare.mtp_hidden_ND), (padded.hidden_ND, *padded.mtp_hidden_ND), strict=True):
        torch.testing.assert_close(one, two[: flat.num_tokens], atol=1e-12, rtol=1e-12)
    assert torch.equal(load_of(bare), load_of(padded))
    assert bare.affinity_LE is not None
    torch.testing.assert_close(bare.affinity_LE, padded.affinity_LE, atol=1e-12, rtol=1e-12)
