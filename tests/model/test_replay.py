"""Router replay: recorded experts take the place of the routers' own choice, and of nothing else."""

import re

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from m2forge.kernels.expert import expert_ffn_plain
from m2forge.model.config import MoEConfig
from m2forge.model.plan import Trees
from m2forge.model.transformer import Balance, MixtureFFN, Transformer
from m2forge.records import Call
from m2forge.tree.pack import pack_trees
from tests.model.draw_tree import SMALL_TREE, drawn_network, forests, watched
from tests.tree.draw import build

NUM_LAYERS, NUM_EXPERTS, TOP_K = 2, 6, 2


class ByHand(torch.nn.Module):
    """A mixture layer whose tokens go where a table says, with the weights of the router's scores."""

    def __init__(self, ffn: MixtureFFN, expert_NK: Tensor) -> None:
        super().__init__()
        self.ffn, self.expert_NK = ffn, expert_NK

    def forward(
        self, x_ND: Tensor, count_N: Tensor | None = None, recorded_NK: Tensor | None = None
    ) -> tuple[Tensor, Balance]:
        scores_NE = (x_ND @ self.ffn.router.weight.t()).sigmoid()
        chosen = zip(scores_NE, self.expert_NK, strict=True)
        weight_NK = torch.stack([scores_E[expert_K] for scores_E, expert_K in chosen])
        weight_NK = weight_NK / weight_NK.sum(-1, keepdim=True)
        out_ND = expert_ffn_plain(x_ND, self.ffn.w13, self.ffn.w2, weight_NK, self.expert_NK)
        assert count_N is not None
        load_E = (F.one_hot(self.expert_NK, NUM_EXPERTS).sum(1) * count_N[:, None]).sum(0)
        affinity_E = (scores_NE / scores_NE.sum(-1, keepdim=True) * count_N[:, None]).sum(0)
        return out_ND, Balance(load_E, affinity_E, self.expert_NK)


def drawn(forest: list[list[Call]], seed: int) -> tuple[Transformer, Tensor, Trees]:
    (flat,) = pack_trees([build(calls) for calls in forest], 10**6)
    return drawn_network(SMALL_TREE, seed), torch.tensor(flat.tokens_N, dtype=torch.int64), Trees(flat)


def own_choices(model: Transformer, tokens_N: Tensor, plan: Trees) -> Tensor:
    """What the main model's routers choose by themselves: (N, L, K)."""
    with torch.no_grad(), watched(model) as watch:
        model(tokens_N, plan)
    return torch.stack(watch.choices[:NUM_LAYERS], dim=1)


@given(forest=forests(), seed=st.integers(0, 2**20))
def test_the_routers_own_choice_recorded_changes_nothing(forest: list[list[Call]], seed: int) -> None:
    model, tokens_N, plan = drawn(forest, seed)
    recorded = own_choices(model, tokens_N, plan).to(torch.int16)
    recorded[::2] = -1
    free, replayed = model(tokens_N, plan), model(tokens_N, plan, experts_NLK=recorded)
    assert torch.equal(free.hidden_ND, replayed.hidden_ND)
    assert torch.equal(free.load_LE, replayed.load_LE)
    assert all(torch.equal(one, two) for one, two in zip(free.mtp_hidden_ND, replayed.mtp_hidden_ND, strict=True))


@given(forest=forests(max_trees=2), seed=st.integers(0, 2**20))
def test_recorded_experts_are_those_that_a_table_would_force(forest: list[list[Call]], seed: int) -> None:
    model, tokens_N, plan = drawn(forest, seed)
    generator = torch.Generator().manual_seed(seed)
    shape = (len(tokens_N), NUM_LAYERS, NUM_EXPERTS)
    recorded = torch.rand(shape, generator=generator).argsort(-1)[..., :TOP_K]
    replayed = model(tokens_N, plan, experts_NLK=recorded)
    weight = torch.randn(replayed.hidden_ND.shape, generator=generator, dtype=torch.float64)
    assert replayed.affinity_LE is not None
    (weight * (replayed.hidden_ND + replayed.mtp_hidden_ND[-1])).sum().add(
        replayed.affinity_LE.square().sum()
    ).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}

    forced = drawn_network(SMALL_TREE, seed)
    for layer, block in enumerate(forced.blocks):
        assert isinstance(block.ffn, MixtureFFN)
        block.ffn = ByHand(block.ffn, recorded[:, layer])
    expected = forced(tokens_N, plan)
    assert expected.affinity_LE is not None
    (weight * (expected.hidden_ND + expected.mtp_hidden_ND[-1])).sum().add(
        expected.affinity_LE.square().sum()
    ).backward()
    torch.testing.assert_close(replayed.hidden_ND, expected.hidden_ND, atol=1e-11, rtol=1e-11)
    assert torch.equal(replayed.load_LE, expected.load_LE)
    for name, parameter in forced.named_parameters():
        ours, theirs = gradients[name.replace(".ffn.ffn.", ".ffn.")], parameter.grad
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            # Float64 sums of another order.
            assert (ours - theirs).abs().max() <= 1e-9 * theirs.abs().max() + 1e-12


def test_a_token_without_a_record_chooses_for_itself() -> None:
    model = drawn_network(SMALL_TREE, seed=0)
    tokens = torch.tensor([[0, 1, 2, 3]])
    recorded = torch.full((4, NUM_LAYERS, TOP_K), -1)
    # Only the last token of a row is forced: those before it cannot notice.
    recorded[3] = torch.tensor([[4, 5], [0, 1]])
    free, forced = model(tokens), model(tokens, experts_NLK=recorded)
    torch.testing.assert_close(free.hidden_ND[:3], forced.hidden_ND[:3], atol=1e-12, rtol=1e-12)
    assert (free.hidden_ND[3] - forced.hidden_ND[3]).abs().max() > 1e-6
    with watched(model) as watch:
        model(tokens, experts_NLK=recorded)
    assert [sorted(choice[3].tolist()) for choice in watch.choices[:NUM_LAYERS]] == [[4, 5], [0, 1]]


def test_dense_layers_have_no_record() -> None:
    moe = MoEConfig(num_experts=NUM_EXPERTS, top_k=TOP_K, intermediate_size=12, dense_layers=(0,))
    model = drawn_network(SMALL_TREE.model_copy(update={"moe": moe, "intermediate_size": 16, "num_mtp": 0}), seed=0)
    tokens = torch.tensor([[0, 1, 2]])
    with watched(model) as watch:
        model(tokens, experts_NLK=torch.tensor([[[5, 0]]]).expand(3, 1, 2))
    assert watch.choices[0].tolist() == [[5, 0]] * 3


@pytest.mark.parametrize(
    ("recorded", "message"),
    [
        (torch.zeros(4, 3, 2), "recorded experts of shape (4, 3, 2): this network takes (4, 2, 2)"),
        (torch.zeros(3, 2, 2), "recorded experts of shape (3, 2, 2): this network takes (4, 2, 2)"),
        (torch.full((4, 2, 2), 6), "recorded experts must lie in 0..5, or be -1 where unknown"),
        (torch.full((4, 2, 2), -2), "recorded experts must lie in 0..5, or be -1 where unknown"),
    ],
)
def test_records_of_another_network_are_refused(recorded: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        drawn_network(SMALL_TREE, seed=0)(torch.tensor([[0, 1, 2, 3]]), experts_NLK=recorded.long())
