"""Padding counts nowhere: a padded step equals the same step without padding, in float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from m2forge.model.transformer import Transformer
from m2forge.train.batch import bucket_length, make_batch
from m2forge.train.config import OptimizerConfig, PolicyConfig
from m2forge.train.engine import PendingMetrics, TrainEngine
from m2forge.tree.token_tree import TokenTree
from tests.conftest import FEW_CASES
from tests.train.draw import draw_pack, small_model
from tests.train.naive import forests, watch_gradients, watch_margin

CPU = torch.device("cpu")
CONFIG = OptimizerConfig(max_norm=1e9, eps=1e-2)


class PaddedEngine(TrainEngine):
    """Pads on a CPU as every engine does on CUDA."""

    pads = True


def make_model(aux_loss_weight: float) -> Transformer:
    moe = {"num_experts": 4, "top_k": 2, "intermediate_size": 8, "aux_loss_weight": aux_loss_weight}
    return small_model(moe=moe)


def loads_of(engine: TrainEngine) -> list[torch.Tensor]:
    """Filled with the loads of each pass through the network."""
    seen: list[torch.Tensor] = []
    engine.model.register_forward_hook(lambda _, __, output: seen.append(output.load_LE))
    return seen


def assert_same_step(aux_loss_weight: float, run: Callable[[TrainEngine], PendingMetrics], **settings: Any) -> None:
    """`run` steps alike with padding and without: loads, figures, gradients, weights and biases."""
    plain, padded = (
        kind(make_model(aux_loss_weight), CONFIG, router_bias="balanced", **settings)
        for kind in (TrainEngine, PaddedEngine)
    )
    margin = watch_margin(plain.model)
    loads, gradients = [loads_of(each) for each in (plain, padded)], [watch_gradients(each) for each in (plain, padded)]
    figures = [run(each).read() for each in (plain, padded)]
    # Products over more rows round differently, which may turn a choice of experts that hangs on rounding.
    assume(margin() >= 1e-9)
    assert len(loads[0]) == len(loads[1]) > 0
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*loads, strict=True))
    assert figures[1] == pytest.approx(figures[0], rel=1e-12, abs=1e-12, nan_ok=True)
    assert gradients[0].keys() == gradients[1].keys()
    for name, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], expected, rtol=1e-12, atol=1e-12)
    after = padded.model.state_dict()
    for name, weight in plain.model.state_dict().items():
        torch.testing.assert_close(after[name], weight, rtol=1e-12, atol=1e-12)


@FEW_CASES
@given(
    seed=st.integers(0, 2**16),
    lengths=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=3),
    num_padding=st.integers(0, 30),
    aux_loss_weight=st.sampled_from((0.0, 0.5)),
)
def test_padding_of_packs_counts_nowhere(
    seed: int, lengths: list[list[int]], num_padding: int, aux_loss_weight: float
) -> None:
    packs = [draw_pack(seed + index, found) for index, found in enumerate(lengths)]
    pack_tokens = max(pack.tokens.size for pack in packs) + num_padding
    assert_same_step(
        aux_loss_weight,
        lambda engine: engine.step_rows(
            packs, lr=1e-2, pack_tokens=pack_tokens, mtp_weight=0.3, measure_agreement=True
        ),
    )


@FEW_CASES
@given(trees=forests(), bucket=st.integers(1, 40), aux_loss_weight=st.sampled_from((0.0, 0.5)))
def test_padding_of_trees_counts_nowhere(trees: list[TokenTree], bucket: int, aux_loss_weight: float) -> None:
    longest = max(sample.num_tokens for tree in trees for sample in tree.samples)
    policy = PolicyConfig(pack_tokens=longest + 7, bucket_tokens=bucket, mtp_weight=0.4, mtp_gradient="all")
    assert_same_step(aux_loss_weight, lambda engine: engine.step(trees, lr=1e-2), policy=policy)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(0, 30))
def test_padding_stands_in_documents_no_longer_than_the_others(lengths: list[int], num_padding: int) -> None:
    num_tokens = sum(lengths)
    batch = make_batch(draw_pack(0, lengths), CPU, num_tokens + num_padding)
    assert batch.tokens_N.shape == batch.plan.position_N.shape == (num_tokens + num_padding,)
    assert batch.plan.position_N.max() < max(lengths)
    assert batch.plan.count_N is not None
    assert batch.plan.count_N.tolist() == [1] * num_tokens + [0] * num_padding
    assert batch.plan.position_N[num_tokens:].tolist() == [index % max(lengths) for index in range(num_padding)]


def test_a_pack_longer_than_its_length_is_refused() -> None:
    with pytest.raises(ValueError, match="a pack of 9 tokens does not fit into 8"):
        make_batch(draw_pack(0, [5, 4]), CPU, 8)


@pytest.mark.parametrize(("num_tokens", "expected"), [(1, 8), (8, 8), (9, 16), (17, 20), (20, 20)])
def test_lengths_are_multiples_of_the_bucket_up_to_the_limit(num_tokens: int, expected: int) -> None:
    assert bucket_length(num_tokens, bucket=8, limit=20) == expected
