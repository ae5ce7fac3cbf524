"""Slow paths: which types and sizes take them, and the warning that names reason and remedy."""

import pytest
import torch

from m2forge.kernels.expert import grouped_rows, grouped_weights
from m2forge.kernels.slow_path import (
    expert_kernel_problem,
    paged_kernel_problem,
    tree_kernel_problem,
    tree_kernel_serves,
)
from m2forge.observe import log

HALF = (torch.bfloat16, torch.float16)
DTYPES = (*HALF, torch.float32, torch.float64)


@pytest.fixture(autouse=True)
def fresh() -> None:
    log.warn_once.cache_clear()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [8, 16, 48, 64, 96, 128, 256])
def test_every_tree_that_the_kernel_does_not_take_has_a_problem(dtype: torch.dtype, head_dim: int) -> None:
    problem = tree_kernel_problem(dtype, head_dim)
    assert (problem is None) == tree_kernel_serves(dtype, head_dim) == (dtype in HALF and head_dim in (16, 64, 128))


def test_problems_name_reason_and_remedy() -> None:
    expected = "takes head_dim 16, 32, 64 or 128, the network has 48; change head_dim"
    assert expected in str(tree_kernel_problem(torch.bfloat16, 48))
    assert expected in str(paged_kernel_problem(torch.bfloat16, 48, 16))
    assert "takes bfloat16 or float16, the network is float32; use bfloat16" in str(
        tree_kernel_problem(torch.float32, 64)
    )
    assert "power of two as block_tokens, received 24" in str(paged_kernel_problem(torch.bfloat16, 64, 24))
    assert (
        "float16 experts need hidden_size and intermediate_size in multiples of 64, the network has 96 and 64"
        in str(expert_kernel_problem(torch.float16, 96, 64))
    )
    assert paged_kernel_problem(torch.float16, 64, 16) is None
    assert expert_kernel_problem(torch.float16, 128, 64) is expert_kernel_problem(torch.bfloat16, 96, 32) is None


@pytest.mark.parametrize(
    ("dtype", "width", "expected"),
    [
        (torch.float16, 16, "no grouped product takes float16 operands of row sizes 16 and 16 on cpu; use bfloat16 or"),
        (
            torch.float32,
            6,
            "row sizes 6 and 6 on cpu; use hidden and expert sizes whose rows are multiples of 16 bytes",
        ),
        (torch.float32, 16, None),
        (torch.float64, 16, None),
    ],
)
def test_grouped_products_that_run_one_by_one_warn_once(
    dtype: torch.dtype, width: int, expected: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = (torch.ones(4, width, dtype=dtype) for _ in range(2))
    ends = torch.tensor([1, 4], dtype=torch.int32)
    for _ in range(2):
        grouped_rows(a, torch.ones(2, width, width, dtype=dtype), ends)
        grouped_weights(a, b, ends)
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == (expected is not None)
    assert all("experts run one after another, which is slow" in text and str(expected) in text for text in texts)
