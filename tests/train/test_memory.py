"""The memory figures equal what a network, its gradients and its optimizer really take."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from m2forge.model.build import build
from m2forge.model.config import LoRAConfig, ModelConfig
from m2forge.model.lora import attach
from m2forge.train.config import OptimizerConfig
from m2forge.train.memory import TrainingMemory, training_memory, weight_bytes
from m2forge.train.optimizer import Optimizer
from tests.model.draw import SMALL, model_configs

assert SMALL.moe is not None
LEARNED_BIASES = SMALL.moe.model_copy(update={"bias_update": "gradient", "aux_loss_weight": 0.1})


def measured(
    network: ModelConfig, config: OptimizerConfig, dtype: torch.dtype, lora: LoRAConfig | None = None
) -> TrainingMemory:
    model = build(network, dtype=dtype)
    if lora is not None:
        attach(model, lora, Path("base"))
    optimizer = Optimizer(model, config)
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
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
def test_of_adapters_alone_there_is_training_state(data: st.DataObject) -> None:
    network = data.draw(model_configs(num_mtp=data.draw(st.integers(0, 2))))
    lora = LoRAConfig(rank=data.draw(st.integers(1, 5)), targets=("q_proj|v_proj|o_proj", "(gate|down)_proj|w[12]"))
    found = training_memory(network, OptimizerConfig(kind="muon"), 2, lora)
    assert found == measured(network, OptimizerConfig(kind="muon"), torch.bfloat16, lora)
