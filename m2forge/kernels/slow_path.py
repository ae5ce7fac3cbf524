"""Which dtypes and sizes the CUDA kernels support, and for others a message with the reason and the remedy.

Imports no kernel, so that it works on a machine without CUDA. float64 also takes the slow paths, but serves exact
comparisons: callers warn only about other dtypes.
"""

import torch

HEAD_DIMS = (16, 32, 64, 128)
"""Head dimensions that the tree attention and paged attention kernels support."""
EXPERT_MULTIPLE = 64
"""The few-token expert kernels need hidden size and expert width in multiples of this."""


def tree_kernel_serves(dtype: torch.dtype, head_dim: int) -> bool:
    return dtype in (torch.bfloat16, torch.float16) and head_dim in HEAD_DIMS


def tree_kernel_problem(dtype: torch.dtype, head_dim: int) -> str | None:
    """Why tree attention runs node by node on CUDA; None if the kernel serves."""
    slow = "attention over trees runs node by node, which is slow"
    if head_dim not in HEAD_DIMS:
        return (
            f"{slow}: its CUDA kernel takes head_dim {_either(HEAD_DIMS)}, the network has {head_dim}; change head_dim"
        )
    if not tree_kernel_serves(dtype, head_dim):
        return f"{slow}: its CUDA kernel takes bfloat16 or float16, the network is {name(dtype)}; use bfloat16"
    return None


def paged_kernel_problem(dtype: torch.dtype, head_dim: int, block_tokens: int) -> str | None:
    """Why paged attention on CUDA gathers the cache first; None if the kernel serves."""
    if head_dim not in HEAD_DIMS:
        return f"paged attention takes head_dim {_either(HEAD_DIMS)}, the network has {head_dim}; change head_dim"
    if block_tokens & (block_tokens - 1):
        return f"paged attention takes a power of two as block_tokens, received {block_tokens}; use 16"
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"paged attention takes bfloat16, float16 or float32, the network is {name(dtype)}; use bfloat16"
    return None


def expert_kernel_problem(dtype: torch.dtype, hidden_size: int, width: int) -> str | None:
    """Why experts of few tokens are sorted first on CUDA, with a host sync; None for bfloat16 or supported sizes."""
    if dtype == torch.bfloat16 or not (hidden_size % EXPERT_MULTIPLE or width % EXPERT_MULTIPLE):
        return None
    return (
        f"{name(dtype)} experts need hidden_size and intermediate_size in multiples of {EXPERT_MULTIPLE}, the network "
        f"has {hidden_size} and {width}; use bfloat16"
    )


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _either(values: tuple[int, ...]) -> str:
    return f"{', '.join(map(str, values[:-1]))} or {values[-1]}"
