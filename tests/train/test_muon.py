"""Muon against torch's own, and over stacks against one matrix at a time."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from m2forge.train.optimizer import muon_, orthogonalize


@given(rows=st.integers(1, 24), columns=st.integers(1, 24), seed=st.integers(0, 2**16))
def test_singular_values_end_near_one(rows: int, columns: int, seed: int) -> None:
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    values = torch.linalg.svdvals(orthogonalize(x, 5))
    # Five iterations lift small singular values slowly: only those that began above a hundredth are promised.
    begun = torch.linalg.svdvals(x) / x.norm()
    assert values.max() < 1.3
    assert bool((values[begun > 0.01] > 0.3).all())


def test_steps_equal_torchs_muon() -> None:
    generator = torch.Generator().manual_seed(0)
    theirs = torch.nn.Parameter(torch.randn(12, 20, generator=generator))
    peer = torch.optim.Muon([theirs], lr=1e-2, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    ours, buffer = theirs.data.clone(), torch.zeros_like(theirs.data)
    for _ in range(5):
        theirs.grad = torch.randn(12, 20, generator=generator)
        peer.step()
        muon_([ours], [buffer], [theirs.grad], lr=1e-2, decay=0.1, momentum=0.95, iterations=5)
    # torch iterates in bfloat16, which is good to two or three digits of an update of size 5 · 1e-2 · 0.2 · √20.
    torch.testing.assert_close(ours, theirs.data, rtol=0, atol=2e-3)


def test_a_stack_equals_its_matrices_one_by_one() -> None:
    stack = torch.randn(3, 8, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    one_by_one = torch.stack([orthogonalize(matrix, 5) for matrix in stack])
    torch.testing.assert_close(orthogonalize(stack, 5), one_by_one, rtol=1e-12, atol=1e-12)
