"""The engine's step against a loss written out by hand, in float64."""

import copy
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from m2forge.model.transformer import Transformer
from m2forge.records import NO_TARGET, Pack
from m2forge.train.config import MTPLoss, OptimizerConfig, RouterBias
from m2forge.train.engine import TrainEngine
from tests.train.draw import draw_pack, small_model
from tests.train.naive import plain_topk

ROOT = Path(__file__).parents[2]
TOP_K = 3
CONFIG = OptimizerConfig(max_norm=1e9, weight_decay=0.0)


def plain_loss(model: Transformer, packs: list[Pack], mtp_weight: float, mtp_loss: str = "ce") -> torch.Tensor:
    """One document at a time through the network, all logits, the mean over all targets."""
    main: list[torch.Tensor] = []
    drafts: list[torch.Tensor] = []
    num_edges = 0
    for pack in packs:
        ends = pack.lengths.cumsum()
        for start, end in zip(ends - pack.lengths, ends, strict=True):
            output = model(torch.tensor(pack.tokens[start:end][None].copy(), dtype=torch.int64))
            target = torch.tensor(pack.targets[start:end].copy(), dtype=torch.int64)
            num_edges += int((target != NO_TARGET).sum())
            logits = model.logits(output.hidden_ND)
            main.append(F.cross_entropy(logits, target, ignore_index=NO_TARGET, reduction="sum"))
            for hidden in output.mtp_hidden_ND:
                draft = model.logits(hidden)
                if mtp_loss == "ce":
                    drafts.append(F.cross_entropy(draft, target, ignore_index=NO_TARGET, reduction="sum"))
                else:
                    drafts.append(plain_topk(mtp_loss, logits.detach(), draft, TOP_K)[target != NO_TARGET].sum())
    total = torch.stack(main).sum()
    if drafts:
        total = total + mtp_weight / len(model.mtp) * torch.stack(drafts).sum()
    return total / max(1, num_edges)


@given(
    seed=st.integers(0, 2**16),
    lengths=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=3),
    num_mtp=st.integers(0, 2),
    mtp_loss=st.sampled_from(("ce", "topk_kl", "topk_acceptance")),
)
def test_a_step_follows_the_gradient_of_the_plain_loss(
    seed: int, lengths: list[list[int]], num_mtp: int, mtp_loss: MTPLoss
) -> None:
    model = small_model(num_mtp=num_mtp)
    packs = [draw_pack(seed + index, found) for index, found in enumerate(lengths)]
    plain_loss(model, packs, 0.3, mtp_loss).backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    engine = TrainEngine(model, CONFIG)
    seen: dict[str, torch.Tensor] = {}
    step = engine.optimizer.step
    engine.optimizer.step = lambda lr: (  # type: ignore[method-assign]
        seen.update(
            {name: slot.gradient for name, slot in engine.optimizer.slots.items() if slot.gradient is not None}
        ),
        step(lr),
    )[1]
    engine.step_rows(packs, lr=0.0, mtp_weight=0.3, mtp_loss=mtp_loss, mtp_top_k=TOP_K)
    for name, gradient in expected.items():
        if gradient is not None:
            torch.testing.assert_close(seen[name], gradient, rtol=1e-9, atol=1e-12)


def test_losses_are_counted_by_tag() -> None:
    pack = draw_pack(0, [5, 6, 7, 3], num_tags=3)
    engine = TrainEngine(small_model(), CONFIG, ("web", "code", "books"))
    alone = copy.deepcopy(engine.model)
    values = engine.step_rows([pack], lr=0.0).read()
    for tag, name in enumerate(engine.tag_names):
        chosen = pack.targets.copy()
        chosen[(pack.tags != tag).repeat(pack.lengths)] = NO_TARGET
        part = Pack(tokens=pack.tokens, targets=chosen, lengths=pack.lengths, tags=pack.tags)
        if (chosen != NO_TARGET).any():
            assert values[f"loss/{name}"] == pytest.approx(plain_loss(alone, [part], 0.0).item(), rel=1e-9)
        else:
            assert f"loss/{name}" not in values


def test_clipping_scales_the_gradient_and_reports_the_original() -> None:
    pack = draw_pack(0, [9, 9])
    engines = [TrainEngine(small_model(), OptimizerConfig(max_norm=limit)) for limit in (1e-3, 1e9)]
    norms = [engine.step_rows([pack], lr=1e-3).read()["grad_norm"] for engine in engines]
    assert norms[0] == norms[1] > 1e-3
    # The first mean is a tenth of what was left of the gradient.
    clipped, whole = (
        {name: slot.tensors["mean"] * 10 for name, slot in engine.optimizer.slots.items()} for engine in engines
    )
    assert torch.stack([mean.norm() for mean in clipped.values()]).norm().item() == pytest.approx(1e-3, rel=1e-9)
    for name, mean in clipped.items():
        torch.testing.assert_close(mean, whole[name] * (1e-3 / norms[0]), rtol=1e-9, atol=1e-15)


def test_the_balance_loss_is_a_mean_over_packs() -> None:
    """Twice the same pack must step as it does once, whatever part of the loss a gradient comes from."""
    moe = {"num_experts": 4, "top_k": 2, "intermediate_size": 8, "aux_loss_weight": 0.5}
    pack = draw_pack(0, [9, 9])
    once, twice = (TrainEngine(small_model(moe=moe), CONFIG) for _ in range(2))
    plain = TrainEngine(small_model(), CONFIG)
    for engine, packs in ((once, [pack]), (twice, [pack, pack]), (plain, [pack])):
        engine.step_rows(packs, lr=1e-3, mtp_weight=0.3)
    name = "blocks.0.ffn.router.weight"
    means = [engine.optimizer.slots[name].tensors["mean"] for engine in (once, twice, plain)]
    torch.testing.assert_close(means[0], means[1], rtol=1e-9, atol=1e-15)
    assert not torch.allclose(means[0], means[2], rtol=1e-2)


def test_the_balance_loss_takes_the_loads_of_the_whole_step() -> None:
    """Documents step alike in one pack and in two."""
    moe = {"num_experts": 4, "top_k": 2, "intermediate_size": 8, "aux_loss_weight": 0.5}
    packs = [draw_pack(0, [9, 4]), draw_pack(1, [12])]
    joined = Pack(
        *(np.concatenate([getattr(pack, name) for pack in packs]) for name in ("tokens", "targets", "lengths", "tags"))
    )
    together, apart = (TrainEngine(small_model(moe=moe), CONFIG) for _ in range(2))
    together.step_rows([joined], lr=1e-3, mtp_weight=0.3)
    apart.step_rows(packs, lr=1e-3, mtp_weight=0.3)
    for name, slot in together.optimizer.slots.items():
        torch.testing.assert_close(
            apart.optimizer.slots[name].tensors["mean"], slot.tensors["mean"], rtol=1e-9, atol=1e-15
        )


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_step_without_finite_gradients_changes_nothing(kind: str) -> None:
    model = small_model()
    model.norm.weight.data[0] = math.inf
    engine = TrainEngine(model, OptimizerConfig.model_validate({"kind": kind}), router_bias="balanced")
    before = copy.deepcopy(model.state_dict())
    assert any(name.endswith("router.bias") for name in before)
    values = engine.step_rows([draw_pack(0, [9, 9])], lr=1e-2).read()
    assert not math.isfinite(values["grad_norm"])
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


@pytest.mark.parametrize("bias_update", ["sign", "gradient"])
@pytest.mark.parametrize("router_bias", ["frozen", "balanced"])
def test_selection_biases_move_only_where_they_are_balanced(bias_update: str, router_bias: RouterBias) -> None:
    moe = {"num_experts": 4, "top_k": 2, "intermediate_size": 8, "aux_loss_weight": 0.5, "bias_update": bias_update}
    engine = TrainEngine(small_model(moe=moe), CONFIG, router_bias=router_bias)
    # As the loop does when it enters a phase, after the engine exists.
    engine.model.freeze_main(False)
    before = copy.deepcopy(engine.model.state_dict())
    engine.step_rows([draw_pack(0, [9, 9])], lr=1e-3, mtp_weight=0.3)
    moved = {name for name, value in engine.model.state_dict().items() if not torch.equal(value, before[name])}
    biases = {name for name in before if name.endswith("router.bias")}
    assert len(biases) == 4
    assert moved & biases == (biases if router_bias == "balanced" else set())
    assert before.keys() - biases <= moved


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_lowers_the_loss(kind: str, dtype: torch.dtype) -> None:
    engine = TrainEngine(small_model(dtype), OptimizerConfig.model_validate({"kind": kind}))
    pack = draw_pack(0, [16, 16])
    losses = [engine.step_rows([pack], lr=1e-2, mtp_weight=0.3).read()["loss"] for _ in range(30)]
    assert losses[-1] < losses[0] - 1


def test_small_steps_survive_in_the_master_of_bfloat16_weights() -> None:
    """At a rate of 1e-4 a bfloat16 weight above 0.1 would round every step away."""
    engine = TrainEngine(small_model(torch.bfloat16), OptimizerConfig(weight_decay=0.0))
    before = engine.model.embedding.weight.detach().clone()
    for _ in range(40):
        engine.step_rows([draw_pack(0, [16])], lr=1e-4)
    large = before.abs() > 0.1
    assert (engine.model.embedding.weight != before)[large].float().mean() > 0.2


def test_agreement_is_measured_when_asked() -> None:
    engine = TrainEngine(small_model(), CONFIG)
    values = engine.step_rows([draw_pack(0, [9])], lr=0.0, measure_agreement=True).read()
    assert 0 <= values["draft_agreement/1"] <= 1
    assert "draft_agreement/2" in values
    assert not any(name.startswith("draft") for name in engine.step_rows([draw_pack(0, [9])], lr=0.0).read())


def test_a_frozen_step_without_module_loss_changes_nothing() -> None:
    engine = TrainEngine(small_model(), CONFIG)
    engine.model.freeze_main()
    before = copy.deepcopy(dict(engine.model.named_parameters()))
    values = engine.step_rows([draw_pack(0, [9])], lr=1e-2, mtp_weight=0.0).read()
    assert values["grad_norm"] == 0
    assert values["loss"] > 0
    assert all(torch.equal(weight, before[name]) for name, weight in engine.model.named_parameters())


def test_a_pack_without_targets_is_no_error() -> None:
    engine = TrainEngine(small_model(), CONFIG)
    values = engine.step_rows([draw_pack(0, [9], share_trained=0.0)], lr=1e-3, mtp_weight=0.3).read()
    assert values["loss"] == 0


def test_training_on_a_cpu_loads_no_compiler() -> None:
    """Loading it takes over a second, in every process of a run; sympy, which it needs, half a second."""
    program = (
        "import sys\n"
        "import m2forge.rl.loop, m2forge.train.loop\n"
        "from m2forge.train.config import OptimizerConfig\n"
        "from m2forge.train.engine import TrainEngine\n"
        "from tests.train.draw import draw_pack, small_model\n"
        "for kind in ('adamw', 'muon'):\n"
        "    TrainEngine(small_model(), OptimizerConfig(kind=kind)).step_rows([draw_pack(0, [5])], lr=1e-3)\n"
        "print({'torch._dynamo', 'torch.distributed.tensor', 'sympy'} & sys.modules.keys())\n"
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (result.stdout, result.stderr) == ("set()\n", "")
