"""The optimizer of one process: norms, packs that add up, and how gradients are bundled for other ranks."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from m2forge.model.transformer import Transformer
from m2forge.train import optimizer as room
from m2forge.train.config import OptimizerConfig
from m2forge.train.optimizer import Optimizer, Slot, _buckets, layer_of
from tests.train.draw import small_model


class TwoAlike:
    """What a rank hears when another one sends just what it sends itself."""

    rank, num_ranks = 0, 2

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor * 2

    def max_int(self, value: int) -> int:
        return value


def draw_gradients(model: Transformer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        weight.grad = torch.randn(weight.shape, generator=generator).to(weight)


def test_norms_are_those_of_all_gradients_and_of_each_layers() -> None:
    model = small_model()
    draw_gradients(model, 0)
    grads = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    norms = Optimizer(model, OptimizerConfig()).step(0.0)
    torch.testing.assert_close(norms.overall, torch.cat([grad.flatten() for grad in grads.values()]).norm())
    assert norms.by_layer.keys() == {"embedding", "layer_0", "layer_1", "mtp_0", "mtp_1", "norm", "head"}
    for layer, norm in norms.by_layer.items():
        found = [grad.flatten() for name, grad in grads.items() if layer_of(name) == layer]
        torch.testing.assert_close(norm, torch.cat(found).norm())


def test_gradients_of_packs_add_up_in_float32() -> None:
    """256 ones and a half: in bfloat16 the half would be lost."""
    model = small_model(torch.bfloat16)
    optimizer = Optimizer(model, OptimizerConfig(max_norm=1e9))
    weight = model.norm.weight
    for value in (256.0, 0.5):
        weight.grad = torch.full_like(weight, value)
        optimizer.collect()
    optimizer.step(0.0)
    torch.testing.assert_close(optimizer.slots["norm.weight"].tensors["mean"], torch.full((16,), 25.65))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_gradients_of_ranks_add_up_bundle_by_bundle(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Doubled by hand must step as does the sum of two ranks that have the same."""
    monkeypatch.setattr(room, "BUCKET_ELEMENTS", 300)
    models = [small_model(dtype), small_model(dtype)]
    for model in models:
        draw_gradients(model, 0)
        model.mtp[0].norm.weight.grad = None  # type: ignore[union-attr]
    for weight in models[1].parameters():
        if weight.grad is not None:
            weight.grad *= 2
    norms = [
        Optimizer(models[0], OptimizerConfig(), TwoAlike()).step(1e-2),
        Optimizer(models[1], OptimizerConfig()).step(1e-2),
    ]
    torch.testing.assert_close(norms[0].overall, norms[1].overall)
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert ours.grad is None
        torch.testing.assert_close(ours, theirs)


class OneMore:
    """What a rank hears when another one has a gradient of ones for every weight."""

    rank, num_ranks = 0, 2

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor + 1

    def max_int(self, value: int) -> int:
        return value


def test_a_rank_without_gradients_steps_with_those_of_the_others() -> None:
    models = [small_model(), small_model()]
    for weight in models[1].parameters():
        weight.grad = torch.ones_like(weight)
    Optimizer(models[0], OptimizerConfig(), OneMore()).step(1e-2)
    Optimizer(models[1], OptimizerConfig()).step(1e-2)
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


@given(
    sizes=st.lists(st.tuples(st.integers(1, 50), st.sampled_from([torch.float32, torch.float64])), max_size=12),
    limit=st.integers(1, 60),
)
def test_every_gradient_is_in_one_bucket_of_its_precision(sizes: list[tuple[int, torch.dtype]], limit: int) -> None:
    slots = [Slot(nn.Parameter(torch.zeros(size, dtype=dtype)), None, {}) for size, dtype in sizes]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(room, "BUCKET_ELEMENTS", limit)
        buckets = list(_buckets(slots))
    assert sorted(id(slot) for bucket in buckets for slot in bucket) == sorted(map(id, slots))
    for bucket in buckets:
        assert len({slot.exact.dtype for slot in bucket}) == 1
        assert len(bucket) == 1 or sum(slot.exact.numel() for slot in bucket) <= limit


def test_added_weights_get_slots_and_the_others_keep_theirs() -> None:
    model = small_model(num_mtp=1)
    optimizer = Optimizer(model, OptimizerConfig())
    draw_gradients(model, 0)
    optimizer.step(1e-2)
    before = copy.copy(optimizer.slots)
    model.expand_mtp(2)
    optimizer.follow(model)
    assert list(optimizer.slots) == [name for name, _ in model.named_parameters()]
    for name, slot in optimizer.slots.items():
        assert (slot is before.get(name)) == (not name.startswith("mtp.1."))
        assert slot.num_steps == int(name in before)
