"""Optimizer state in host memory: the same bits as on the device, however it is cut."""

import copy
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from m2forge.kernels.adamw import AdamWRule, AdamWState, adamw_
from m2forge.train import optimizer as offload
from m2forge.train.checkpoint import OptimizerFile
from m2forge.train.config import OptimizerConfig
from m2forge.train.optimizer import Optimizer, adamw_from_host_, to_host
from tests.train.draw import small_model

RULE = AdamWRule(lr=1e-2, decay=0.1, betas=(0.9, 0.95), eps=1e-15)
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")),
]


def draw_state(generator: torch.Generator, shape: list[int], dtype: torch.dtype, device: str) -> AdamWState:
    precision = torch.promote_types(dtype, torch.float32)
    weight, mean, square = (
        torch.randn(shape, generator=generator, dtype=torch.float64).to(device, precision) for _ in range(3)
    )
    master = weight if dtype != precision else None
    return AdamWState(weight.to(dtype), master, mean, square.square())


def at_host(state: AdamWState) -> AdamWState:
    master = None if state.master is None else to_host(state.master)
    return AdamWState(state.weight.clone(), master, to_host(state.mean), to_host(state.square))


def tensors_of(state: AdamWState) -> list[torch.Tensor]:
    return [x.cpu() for x in (state.weight, state.exact, state.mean, state.square)]


@pytest.mark.parametrize("device", DEVICES)
@given(
    seed=st.integers(0, 2**16),
    shapes=st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=2), min_size=1, max_size=3),
    # Whole vectors: what a CPU's vector instructions leave over may be rounded otherwise.
    chunk=st.sampled_from([64, 192, 1024]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.float64]),
    scale=st.sampled_from([1.0, 0.3, math.nan, math.inf]),
)
def test_a_step_from_host_memory_equals_one_on_the_device(
    device: str, seed: int, shapes: list[list[int]], chunk: int, dtype: torch.dtype, scale: float
) -> None:
    if device == "cuda":
        # The kernel there computes in float32.
        dtype = torch.float32 if dtype == torch.float64 else dtype
    generator = torch.Generator().manual_seed(seed)
    states = [draw_state(generator, shape, dtype, device) for shape in shapes]
    kept = [at_host(state) for state in states]
    factor = torch.tensor(scale, device=device)
    for time in (1, 2, 3):
        grads = [torch.randn(state.weight.shape, generator=generator).to(state.weight) for state in states]
        adamw_(states, grads, [time] * len(states), factor, RULE)
        adamw_from_host_(kept, grads, [time] * len(states), factor, RULE, chunk_elements=chunk)
    if device == "cuda":
        torch.cuda.synchronize()
    for state, other in zip(states, kept, strict=True):
        assert other.mean.device.type == "cpu"
        for x, y in zip(tensors_of(state), tensors_of(other), strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_optimizer_trains_alike_with_its_state_in_host_memory(
    monkeypatch: pytest.MonkeyPatch, device: str, kind: str, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(offload, "CHUNK_ELEMENTS", 128)
    config = OptimizerConfig.model_validate({"kind": kind, "max_norm": 0.5})
    model = small_model(dtype).to(device)
    twin = copy.deepcopy(model)
    optimizer, other = Optimizer(model, config), Optimizer(twin, config, offload="host")
    generator = torch.Generator().manual_seed(0)
    for step in range(4):
        for num_packs in range(1 + step % 2):
            for weight, same in zip(model.parameters(), twin.parameters(), strict=True):
                weight.grad = torch.randn(weight.shape, generator=generator).to(weight)
                same.grad = weight.grad.clone()
            if num_packs:
                optimizer.collect()
                other.collect()
        norms = [optimizer.step(1e-2), other.step(1e-2)]
        assert torch.equal(norms[0].overall, norms[1].overall)
    assert all(torch.equal(x, y) for x, y in zip(model.parameters(), twin.parameters(), strict=True))
    state, at_host_state = optimizer.held(), other.held()
    assert optimizer.num_steps == other.num_steps
    assert state.keys() == at_host_state.keys()
    for name, (tensor, _, _) in at_host_state.items():
        assert tensor.device.type == "cpu"
        assert tensor.is_pinned() == (device == "cuda")
        assert torch.equal(tensor, state[name].tensor.cpu())


def test_state_moves_between_host_and_device(tmp_path: Path) -> None:
    config = OptimizerConfig()
    model = small_model(torch.bfloat16)
    twin = copy.deepcopy(model)
    first, second = Optimizer(model, config, offload="host"), Optimizer(twin, config)
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    first.step(1e-2)
    save_file({name: rows.tensor for name, rows in first.held().items()}, tmp_path / "state")
    second.load(OptimizerFile(tmp_path / "state"), first.num_steps)
    assert set(second.num_steps.values()) == {1}
    expected = first.held()
    assert all(torch.equal(rows.tensor, expected[name].tensor) for name, rows in second.held().items())
