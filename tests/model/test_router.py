"""The router: what it chooses, what it weighs by, and how it comes to balance."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from m2forge.kernels.expert import dispatch
from m2forge.kernels.head_loss import linear_cross_entropy
from m2forge.model.build import build
from m2forge.model.config import ModelConfig, MoEConfig
from m2forge.model.transformer import Router, aux_loss, max_violation, update_bias
from tests.model.draw import SMALL


def router_of(hidden_size: int = 16, seed: int = 0, **fields: object) -> Router:
    shape: dict[str, object] = {"num_experts": 8, "top_k": 3, "intermediate_size": 4}
    router = Router(hidden_size, MoEConfig.model_validate(shape | fields))
    torch.nn.init.normal_(router.weight, generator=torch.Generator().manual_seed(seed))
    return router


def set_bias(router: Router, values: Tensor) -> Tensor:
    assert router.bias is not None
    router.bias.data.copy_(values)
    return values


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# -- choosing and weighing --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
@pytest.mark.parametrize("normalize", [True, False])
def test_the_bias_decides_who_is_chosen_and_never_the_weight(scoring: str, normalize: bool) -> None:
    router = router_of(scoring=scoring, normalize=normalize).double()
    bias = set_bias(router, normal(8, seed=1) * 0.3)
    x_ND = normal(50, 16, seed=2) * 0.2
    routing = router(x_ND)

    logits = x_ND @ router.weight.t()
    scores = (
        1 / (1 + torch.exp(-logits)) if scoring == "sigmoid" else torch.exp(logits) / torch.exp(logits).sum(-1, True)
    )
    changed = 0
    for n in range(50):
        by_bias = sorted(range(8), key=lambda e: -(scores[n, e] + bias[e]).item())[:3]
        by_score = sorted(range(8), key=lambda e: -scores[n, e].item())[:3]
        changed += set(by_bias) != set(by_score)
        assert set(routing.expert_NK[n].tolist()) == set(by_bias)
        total = scores[n, by_bias].sum() if normalize else 1.0
        # The same few float64 operations in another order.
        torch.testing.assert_close(routing.weight_NK[n], scores[n, routing.expert_NK[n]] / total, rtol=1e-12, atol=0)
    assert changed > 10  # the bias mattered


def test_without_a_selection_bias_the_scores_decide() -> None:
    router = router_of(selection_bias=False, bias_update="none")
    assert router.bias is None
    assert "bias" not in router.state_dict()
    x_ND = normal(20, 16, dtype=torch.float32)
    expected = (x_ND @ router.weight.t()).topk(3).indices
    assert torch.equal(router(x_ND).expert_NK.sort().values, expected.sort().values)


def test_scores_are_at_least_float32() -> None:
    x_ND = normal(5, 16)
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64,) * 2):
        router = router_of().to(dtype)
        assert router(x_ND.to(dtype)).weight_NK.dtype == expected


# -- the bias's own precision -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("update", ["sign", "gradient"])
def test_the_bias_keeps_its_value_in_a_bfloat16_model(update: str) -> None:
    moe = MoEConfig.model_validate(
        {"num_experts": 8, "top_k": 2, "intermediate_size": 8, "bias_update": update, "aux_loss_weight": 0.01}
    )
    model = build(SMALL.model_copy(update={"moe": moe}))
    exact = [set_bias(router, normal(8, seed=i, dtype=torch.float32) / 3) for i, router in enumerate(model.routers())]
    for cast in (model.bfloat16, lambda: model.to(torch.bfloat16), model.half):
        cast()
        for router, values in zip(model.routers(), exact, strict=True):
            assert router.weight.dtype in (torch.bfloat16, torch.float16)
            assert router.bias is not None
            assert router.bias.dtype == torch.float32
            assert torch.equal(router.bias, values)
    state = model.state_dict()
    assert torch.equal(state["blocks.0.ffn.router.bias"], exact[0])


def test_a_float64_model_has_a_float64_bias() -> None:
    router = router_of().double()
    assert router.bias is not None
    update_bias(router.bias, torch.arange(8), 1e-3)
    assert router.bias.dtype == torch.float64
    router.float()
    assert router.bias.dtype == torch.float32


# -- balance ----------------------------------------------------------------------------------------------------------


@given(load=st.lists(st.integers(0, 50), min_size=2, max_size=64), rate=st.sampled_from((1e-3, 0.5)))
def test_the_sign_rule_is_centred_and_lifts_the_idle(load: list[int], rate: float) -> None:
    bias_E = torch.zeros(len(load), dtype=torch.float64)
    update_bias(bias_E, torch.tensor(load, dtype=torch.int32), rate)
    mean = sum(load) / len(load)
    sign = [(mean > c) - (mean < c) for c in load]
    expected = torch.tensor([rate * (s - sum(sign) / len(sign)) for s in sign], dtype=torch.float64)
    # Rounding of float64 sums over at most 64 numbers of size one.
    torch.testing.assert_close(bias_E, expected, rtol=0, atol=1e-14)
    assert abs(bias_E.sum().item()) < 1e-13


def test_max_violation_is_the_fullest_over_the_mean_minus_one() -> None:
    load_LE = torch.tensor([[4, 4, 4, 4], [10, 2, 2, 2], [16, 0, 0, 0]], dtype=torch.int32)
    assert max_violation(load_LE).tolist() == [0.0, 1.5, 3.0]


def test_the_auxiliary_loss_is_one_at_balance_and_more_elsewhere() -> None:
    even = torch.full((2, 8), 30)
    assert aux_loss(even, torch.full((2, 8), 30 / 8, dtype=torch.float64), 30).item() == pytest.approx(1.0, abs=1e-12)
    crowded = torch.tensor([[100, 10, 10, 10, 10, 10, 10, 80]])
    assert aux_loss(crowded, crowded.double(), crowded.sum()).item() > 1.5


def test_the_auxiliary_loss_pushes_toward_balance() -> None:
    """A step against its gradient lowers the scores of crowded experts and lifts those of idle ones."""
    router = router_of(num_experts=16, top_k=2, aux_loss_weight=0.01).double()
    x_ND = (normal(512, 16, seed=3) + normal(16, seed=4)) * 0.2
    optimizer = torch.optim.Adam(router.parameters(), lr=0.02)
    losses, violations = [], []
    for _ in range(60):
        routing = router(x_ND)
        load_LE = dispatch(routing.expert_NK, 16).load_E[None]
        loss = aux_loss(load_LE, routing.affinity_E[None], 512)
        losses.append(loss.item())
        violations.append(max_violation(load_LE).item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0]
    assert violations[-1] < violations[0] / 2


def test_an_idle_auxiliary_loss_leaves_no_trace() -> None:
    routing = router_of(aux_loss_weight=0.0)(normal(5, 16, dtype=torch.float32))
    assert not routing.affinity_E.requires_grad
    assert build(SMALL)(torch.tensor([[1, 2, 3]])).affinity_LE is None


def test_a_gradient_bias_learns_from_the_auxiliary_loss_alone() -> None:
    assert SMALL.moe is not None
    moe = SMALL.moe.model_copy(update={"bias_update": "gradient", "aux_loss_weight": 0.01})
    model = build(SMALL.model_copy(update={"moe": moe}))
    names = [name for name, _ in model.named_parameters() if name.endswith("router.bias")]
    assert len(names) == 5  # four layers and one multi-token prediction module
    tokens = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(0))
    output = model(tokens)
    language, _ = linear_cross_entropy(output.hidden_ND, model.head_weight, tokens.flatten())
    language.backward(retain_graph=True)
    assert all(model.get_parameter(name).grad is None for name in names)

    assert output.load_LE is not None
    assert output.affinity_LE is not None
    aux_loss(output.load_LE, output.affinity_LE, tokens.numel()).backward()
    router = next(iter(model.routers()))
    assert router.bias is not None
    grad_E = router.bias.grad
    assert grad_E is not None
    assert grad_E.abs().max() > 0
    # Descent lowers the bias of the fullest expert and lifts that of the emptiest.
    assert grad_E[output.load_LE[0].argmax()] > 0 > grad_E[output.load_LE[0].argmin()]
    before = router.bias.detach().clone()
    model.update_router_biases(output.load_LE)
    assert torch.equal(router.bias, before)


@pytest.mark.parametrize("update", ["sign", "none"])
def test_other_biases_are_no_parameters(update: str) -> None:
    model = build(ModelConfig.model_validate(SMALL.model_dump(exclude_none=True) | {"moe": _moe(update)}))
    assert not [name for name, _ in model.named_parameters() if name.endswith("bias")]
    model.update_router_biases(torch.arange(8).repeat(5, 1))
    moved = [bool(router.bias.any()) for router in model.routers() if router.bias is not None]
    assert moved == [update == "sign"] * 5


def _moe(update: str) -> dict[str, object]:
    assert SMALL.moe is not None
    return SMALL.moe.model_dump() | {"bias_update": update}


def violation_after(num_steps: int, *, rate: float) -> float:
    """MaxVio of a router fed tokens that share a shift: the experts which like it are crowded from the start."""
    generator = torch.Generator().manual_seed(0)
    router = router_of(64, num_experts=64, top_k=8)
    torch.nn.init.normal_(router.weight, std=0.125, generator=generator)
    shift_D = torch.randn(64, generator=generator) * 0.5
    assert router.bias is not None
    load_E = torch.zeros(64)
    with torch.no_grad():
        for _ in range(num_steps):
            # 128 tokens for each expert: the update takes the load's sign alone, so more would only be less noise.
            x_ND = torch.randn(1024, 64, generator=generator) + shift_D
            load_E = router(x_ND).expert_NK.flatten().bincount(minlength=64)
            update_bias(router.bias, load_E, rate)
    return max_violation(load_E[None]).item()


def test_the_bias_update_balances_shifted_tokens_in_400_steps() -> None:
    # Unbalanced, the load does not change from step to step, so a few steps tell.
    assert violation_after(5, rate=0.0) > 1
    assert violation_after(400, rate=1e-3) < 0.5
