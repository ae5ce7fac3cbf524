"""The memory figures equal what a network, its gradients and its optimizer really take."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from m2forge.errors import ConfigError
from m2forge.model.build import build, empty
from m2forge.model.config import LoRAConfig, ModelConfig
from m2forge.model.lora import attach
from m2forge.model.preset import preset
from m2forge.train.activation import MicroBatch
from m2forge.train.config import MeshConfig, OptimizerConfig
from m2forge.train.engine import TrainEngine
from m2forge.train.memory import (
    TrainingMemory,
    TrainingStep,
    rank_memory,
    refuse_unfit,
    training_memory,
    weight_bytes,
    weights,
)
from m2forge.train.optimizer import Norms, Optimizer
from m2forge.train.parallel import ProcessRanks, local, shard_model
from tests.model.draw import SMALL, model_configs
from tests.train.draw import draw_pack
from tests.train.processes import run_ranks

assert SMALL.moe is not None
LEARNED_BIASES = SMALL.moe.model_copy(update={"bias_update": "gradient", "aux_loss_weight": 0.1})


def measured(
    network: ModelConfig,
    config: OptimizerConfig,
    dtype: torch.dtype,
    lora: LoRAConfig | None = None,
    freezes_main: bool = False,
) -> TrainingMemory:
    model = build(network, dtype=dtype)
    model.freeze_main(freezes_main)
    if lora is not None:
        attach(model, lora, Path("base"))
    optimizer = Optimizer(model, config)
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight) if weight.requires_grad or not freezes_main else None
    optimizer.collect()
    totals = [slot.total for slot in optimizer.slots.values() if slot.total is not None]
    masters = [slot.master for slot in optimizer.slots.values() if slot.master is not None]
    moments = [tensor for slot in optimizer.slots.values() for tensor in slot.tensors.values()]
    sizes = (
        sum(tensor.nbytes for tensor in tensors) for tensors in (model.state_dict().values(), totals, moments, masters)
    )
    return TrainingMemory(*sizes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["adamw", "muon"])
@given(st.data())
def test_figures_equal_the_real_sizes(kind: str, dtype: torch.dtype, data: st.DataObject) -> None:
    network = data.draw(model_configs(num_mtp=data.draw(st.integers(0, 2))))
    config = OptimizerConfig.model_validate({"kind": kind})
    assert training_memory(network, config, dtype.itemsize) == measured(network, config, dtype)
    assert weight_bytes(network, dtype.itemsize) == measured(network, config, dtype).weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_biases_with_a_gradient_are_trained(dtype: torch.dtype) -> None:
    network = SMALL.model_copy(update={"moe": LEARNED_BIASES})
    config = OptimizerConfig()
    assert training_memory(network, config, dtype.itemsize) == measured(network, config, dtype)


@given(st.data())
def test_frozen_weights_have_moments_and_no_gradients(data: st.DataObject) -> None:
    network, config = data.draw(model_configs(num_mtp=data.draw(st.integers(1, 2)))), OptimizerConfig(kind="muon")
    found = training_memory(network, config, 2, freezes_main=True)
    assert found == measured(network, config, torch.bfloat16, freezes_main=True)
    assert 0 < found.gradients < training_memory(network, config, 2).gradients


@given(st.data())
def test_of_adapters_alone_there_is_training_state(data: st.DataObject) -> None:
    network = data.draw(model_configs(num_mtp=data.draw(st.integers(0, 2))))
    lora = LoRAConfig(rank=data.draw(st.integers(1, 5)), targets=("q_proj|v_proj|o_proj", "(gate|down)_proj|w[12]"))
    found = training_memory(network, OptimizerConfig(kind="muon"), 2, lora)
    assert found == measured(network, OptimizerConfig(kind="muon"), torch.bfloat16, lora)


SHARDED = SMALL.model_copy(update={"vocab_size": 33, "num_layers": 2, "num_mtp": 1})
KINDS = ("adamw", "muon")


class CollectingOptimizer(Optimizer):
    """Remembers the bytes of the gradients that a step begins with."""

    num_gradient_bytes = 0

    def step(self, lr: float) -> Norms:
        self.num_gradient_bytes = sum(slot.total.nbytes for slot in self.slots.values() if slot.total is not None)
        return super().step(lr)


def sharded_sizes(ranks: ProcessRanks) -> dict[str, TrainingMemory]:
    """What a rank really holds in a step of two micro-batches."""
    found = {}
    for kind in KINDS:
        model = build(SHARDED, seed=0)
        shard_model(model, MeshConfig(shard="auto"), ranks)
        engine = TrainEngine(model, OptimizerConfig(), ranks=ranks)
        engine.optimizer = optimizer = CollectingOptimizer(model, OptimizerConfig.model_validate({"kind": kind}), ranks)
        engine.step_rows([draw_pack(ranks.rank, [9, 6]), draw_pack(2, [7])], lr=1e-3, mtp_weight=0.1)
        slots = optimizer.slots.values()
        found[kind] = TrainingMemory(
            weights=sum(local(tensor).nbytes for tensor in model.state_dict().values()),
            gradients=optimizer.num_gradient_bytes,
            moments=sum(tensor.nbytes for slot in slots for tensor in slot.tensors.values()),
            masters=sum(slot.master.nbytes for slot in slots if slot.master is not None),
        )
    return found


def test_a_rank_holds_the_predicted_shard(tmp_path: Path) -> None:
    first: Any = run_ranks(sharded_sizes, tmp_path)[0]
    for kind in KINDS:
        assert first[kind] == training_memory(SHARDED, OptimizerConfig.model_validate({"kind": kind}), 4, shard=2)


@pytest.mark.parametrize("name", ["m2", "m2-mini", "m2-tiny"])
def test_listed_weights_are_those_of_a_preset(name: str) -> None:
    network = preset(name)
    model = empty(network, "meta", torch.bfloat16)
    listed = Counter(weight.shape for weight in weights(network))
    assert listed == Counter(tuple(tensor.shape) for tensor in model.state_dict().values())


@given(st.integers(1, 64), st.integers(1, 64), st.data())
def test_more_ranks_never_hold_more_each(few: int, more: int, data: st.DataObject) -> None:
    few, more = sorted((few, more))
    network = data.draw(model_configs(num_mtp=1))
    batch = MicroBatch(64, 64, 64, 1)
    sizes = [
        rank_memory(TrainingStep(network, OptimizerConfig(), batch, is_compiled=False, shard=shard)).total
        for shard in (max(2, few), max(2, more))
    ]
    assert sizes[1] <= sizes[0]


@given(st.integers(1, 4096), st.integers(1, 8))
def test_recomputing_never_saves_more(num_tokens: int, num_batches: int) -> None:
    batch = MicroBatch(num_tokens, num_tokens, num_tokens, 1)
    whole, recomputed = (
        rank_memory(TrainingStep(SMALL, OptimizerConfig(), batch, num_batches, recompute=mode))
        for mode in ("none", "block")
    )
    assert recomputed.components.get("activations", 0) <= whole.components.get("activations", 0)
    assert whole.total >= training_memory(SMALL, OptimizerConfig(), 2).weights


def test_what_cannot_fit_is_refused_with_what_does() -> None:
    step = TrainingStep(preset("m2-mini"), OptimizerConfig(), MicroBatch(131_072, 131_072, 131_072))
    refuse_unfit(step, 141e9, "phase main")
    with pytest.raises(ConfigError, match=r'phase main: .* 60\.0 GB are free; set train\.machine\.recompute = "block"'):
        refuse_unfit(step, 60e9, "phase main")
    with pytest.raises(ConfigError, match="use more or larger GPUs"):
        refuse_unfit(step, 1e8, "phase main")
