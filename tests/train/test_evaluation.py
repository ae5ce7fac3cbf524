"""Held-out loss: the loss of training without the training."""

from typing import Literal

import pytest
import torch

from m2forge.records import Pack
from m2forge.train.config import MTPLoss, OptimizerConfig, PhaseConfig, WalkConfig
from m2forge.train.engine import TrainEngine
from m2forge.train.evaluation import selection_loss
from tests.train.draw import draw_pack, small_model

TAGS = ("a", "b", "c")


def draw_packs() -> list[Pack]:
    return [draw_pack(seed, [9, 5, seed + 1], num_tags=2) for seed in range(3)]


@pytest.mark.parametrize("mtp_loss", ["ce", "topk_kl"])
def test_the_loss_is_that_of_a_training_step(mtp_loss: MTPLoss) -> None:
    engine = TrainEngine(small_model(), OptimizerConfig(), TAGS)
    evaluated = engine.eval_rows(draw_packs(), tag_names=TAGS, mtp_loss=mtp_loss, mtp_top_k=4)
    trained = engine.step_rows(draw_packs(), lr=1e-2, mtp_weight=0.3, mtp_loss=mtp_loss, mtp_top_k=4).read()
    assert evaluated.keys() == {"loss", "loss/a", "loss/b", "mtp_loss/1", "mtp_loss/2"}
    # Float64: only the order of the sum over packs differs.
    assert evaluated == pytest.approx({name: trained[name] for name in evaluated}, rel=1e-14)


@pytest.mark.parametrize("stack", ["device", "host"])
def test_a_walk_evaluates_each_token_once_in_segments(stack: Literal["device", "host"]) -> None:
    engine = TrainEngine(small_model(), OptimizerConfig(), walk=WalkConfig(segment_tokens=4, stack=stack))
    sizes: list[int] = []
    engine.model.register_forward_pre_hook(lambda _, inputs: sizes.append(inputs[0].shape[0]))
    found = engine.eval_rows(draw_packs(), tag_names=TAGS)
    whole = TrainEngine(small_model(), OptimizerConfig()).eval_rows(draw_packs(), tag_names=TAGS)
    # Float64: sums over the keys of a segment, then over segments.
    assert found == pytest.approx(whole, rel=1e-12)
    assert max(sizes) == 4
    assert sum(sizes) == sum(pack.tokens.size for pack in draw_packs())


def test_evaluating_changes_no_weight_and_leaves_no_gradient() -> None:
    engine = TrainEngine(small_model(), OptimizerConfig(), router_bias="balanced")
    before = {name: tensor.clone() for name, tensor in engine.model.state_dict().items()}
    first = engine.eval_rows(draw_packs())
    assert engine.eval_rows(draw_packs()) == first
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.model.state_dict().items())
    assert all(parameter.grad is None for parameter in engine.model.parameters())


def test_padding_changes_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = TrainEngine(small_model(), OptimizerConfig())
    plain = engine.eval_rows(draw_packs(), pack_tokens=32)
    monkeypatch.setattr(TrainEngine, "pads", True)
    assert engine.eval_rows(draw_packs(), pack_tokens=32) == pytest.approx(plain, rel=1e-12)


def test_frozen_phases_select_by_the_loss_of_the_modules() -> None:
    metrics = {"eval/loss": 3.0, "eval/loss/a": 3.5, "eval/mtp_loss/1": 4.0, "eval/mtp_loss/2": 5.0}
    phase = PhaseConfig.model_validate(
        {"name": "a", "steps": 1, "context": 8, "pack_tokens": 8, "lr": {"start": 1e-3}, "mtp_weight": {"start": 0.1}}
    )
    assert selection_loss(phase, metrics) == 3.0
    assert selection_loss(phase.model_copy(update={"trains": "mtp"}), metrics) == 4.5
