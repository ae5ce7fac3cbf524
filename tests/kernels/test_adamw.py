"""The AdamW step against its formula and against torch's optimizer."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from m2forge.kernels.adamw import AdamWRule, AdamWState, adamw_, adamw_plain_

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


def draw_state(generator: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> AdamWState:
    precision = torch.promote_types(dtype, torch.float32)
    exact = torch.randn(shape, generator=generator, dtype=precision)
    moments = (
        torch.randn(shape, generator=generator, dtype=precision),
        torch.rand(shape, generator=generator).to(precision),
    )
    weight = exact.to(dtype)
    return AdamWState(weight, None if precision == dtype else exact, *moments)


def moved(state: AdamWState, device: str) -> AdamWState:
    master = None if state.master is None else state.master.to(device, copy=True)
    return AdamWState(
        state.weight.to(device, copy=True), master, *(x.to(device, copy=True) for x in (state.mean, state.square))
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(
    seed=st.integers(0, 2**16), sizes=st.lists(st.integers(1, 5000), min_size=1, max_size=3), time=st.integers(1, 50)
)
def test_fast_paths_equal_the_formula(device: str, dtype: torch.dtype, seed: int, sizes: list[int], time: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    states = [draw_state(generator, (size,), dtype) for size in sizes]
    grads = [torch.randn(size, generator=generator).to(dtype) for size in sizes]
    rule = AdamWRule(lr=1e-2, decay=0.1, betas=(0.9, 0.95), eps=1e-8)
    ours = [moved(state, device) for state in states]
    times = [time + index for index in range(len(sizes))]
    adamw_(ours, [grad.to(device) for grad in grads], times, torch.tensor(0.5, device=device), rule)
    for state, grad, when, fast in zip(states, grads, times, ours, strict=True):
        adamw_plain_(state, grad, when, 0.5, rule)
        # The rounding of a handful of float32 operations.
        torch.testing.assert_close(fast.exact.cpu(), state.exact, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(fast.mean.cpu(), state.mean, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(fast.square.cpu(), state.square, rtol=1e-5, atol=1e-6)
        assert torch.equal(fast.weight, fast.exact.to(dtype))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf])
def test_a_scale_that_is_not_finite_changes_nothing(device: str, scale: float) -> None:
    before = moved(draw_state(torch.Generator().manual_seed(0), (100,), torch.bfloat16), device)
    after = moved(before, device)
    grad = torch.ones(100, dtype=torch.bfloat16, device=device)
    rule = AdamWRule(lr=1e-2, decay=0.1, betas=(0.9, 0.95), eps=1e-8)
    adamw_([after], [grad], [1], torch.tensor(scale, device=device), rule)
    assert torch.equal(after.weight, before.weight)
    assert torch.equal(after.exact, before.exact)
    assert torch.equal(after.mean, before.mean)
    assert torch.equal(after.square, before.square)


def test_many_steps_equal_torchs_optimizer() -> None:
    generator = torch.Generator().manual_seed(0)
    theirs = torch.nn.Parameter(torch.randn(7, 5, generator=generator, dtype=torch.float64))
    peer = torch.optim.AdamW([theirs], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    zeros = torch.zeros_like(theirs.data)
    ours = AdamWState(theirs.data.clone(), None, zeros, zeros.clone())
    rule = AdamWRule(lr=1e-2, decay=0.1, betas=(0.9, 0.95), eps=1e-8)
    for time in range(1, 11):
        theirs.grad = torch.randn(7, 5, generator=generator, dtype=torch.float64)
        peer.step()
        adamw_([ours], [theirs.grad], [time], torch.tensor(1.0), rule)
    torch.testing.assert_close(ours.weight, theirs.data, rtol=1e-12, atol=1e-12)
