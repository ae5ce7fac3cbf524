"""Predicted activation memory equals what autograd saves in the real training step."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from m2forge.kernels import arithmetic
from m2forge.model import plan
from m2forge.model.build import build
from m2forge.model.config import ModelConfig
from m2forge.model.transformer import Transformer
from m2forge.records import Pack
from m2forge.train.activation import (
    Execution,
    MicroBatch,
    block_bytes,
    index_bytes,
    module_bytes,
    outer_bytes,
    shared_bytes,
)
from m2forge.train.config import MeshConfig, OptimizerConfig, WalkConfig
from m2forge.train.engine import TrainEngine
from m2forge.train.parallel import ProcessRanks, context_group
from tests.model.draw import SMALL, model_configs
from tests.train.processes import run_ranks

NATIVE = pytest.mark.skipif(arithmetic.library() is None, reason="needs a C compiler")


def draw_pack(lengths: list[int], vocab_size: int) -> Pack:
    generator, num_tokens = np.random.default_rng(0), sum(lengths)
    tokens, targets = (generator.integers(0, vocab_size, num_tokens).astype(np.int32) for _ in range(2))
    return Pack(tokens, targets, np.array(lengths, np.int32), np.zeros(len(lengths), np.int32))


class Saved:
    """Bytes of the storages that autograd saves, each once, without the model's own."""

    def __init__(self, model: Transformer) -> None:
        self._own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
        self.storages: dict[int, int] = {}

    @contextmanager
    def counting(self) -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor):
            yield

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._own:
            self.storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    @property
    def num_bytes(self) -> int:
        return sum(self.storages.values())


def train_step(
    model: Transformer, lengths: list[int], walk: WalkConfig | None = None, mtp_weight: float = 0.1
) -> Saved:
    saved = Saved(model)
    engine = TrainEngine(model, OptimizerConfig(), walk=walk)
    with saved.counting():
        engine.step_rows([draw_pack(lengths, model.config.vocab_size)], lr=1e-3, mtp_weight=mtp_weight)
    return saved


def predicted(network: ModelConfig, num_tokens: int, item_bytes: int, execution: Execution) -> int:
    batch = MicroBatch(num_tokens, num_tokens, num_tokens, network.num_mtp)
    layers = [*range(network.num_layers), *[network.num_layers - 1] * network.num_mtp]
    blocks = sum(block_bytes(network, layer, num_tokens, item_bytes, execution) for layer in layers)
    modules = network.num_mtp * module_bytes(network, num_tokens, item_bytes, execution)
    return blocks + modules + outer_bytes(network, batch, item_bytes, execution)


@NATIVE
@settings(max_examples=15)
@given(st.data())
def test_saved_bytes_are_those_of_the_step(data: st.DataObject) -> None:
    network = data.draw(model_configs(num_mtp=data.draw(st.integers(0, 2))))
    attention = network.attention.model_copy(update={"window": None})
    network = network.model_copy(update={"attention": attention})
    num_tokens = data.draw(st.integers(2, 24))
    saved = train_step(build(network), [num_tokens])
    assert saved.num_bytes == predicted(network, num_tokens, 4, "native")


@NATIVE
@pytest.mark.parametrize("num_mtp", [1, 2])
def test_a_frozen_main_model_saves_nothing(num_mtp: int) -> None:
    network, num_tokens = SMALL.model_copy(update={"num_mtp": num_mtp}), 24
    model = build(network)
    model.freeze_main()
    saved = train_step(model, [num_tokens])
    batch = MicroBatch(num_tokens, num_tokens, num_tokens, num_mtp, trains_main=False, freezes_main=True)
    block = block_bytes(network, network.num_layers - 1, num_tokens, 4, "native")
    modules = num_mtp * (block + module_bytes(network, num_tokens, 4, "native"))
    assert saved.num_bytes == modules + outer_bytes(network, batch, 4, "native")


def test_plain_torch_saves_norms_in_float32() -> None:
    """On a CPU, bfloat16 with gradients has no native kernels; attention there copies its output, and the router's
    product its operands, which CUDA's do not."""
    network, num_tokens = SMALL.model_copy(update={"num_mtp": 0}), 24
    saved = train_step(build(network, dtype=torch.bfloat16), [num_tokens])
    assert network.moe is not None
    copied = num_tokens * network.attention.q_width * 2
    raised = (num_tokens + network.moe.num_experts) * network.hidden_size * 4
    extra = network.num_layers * (copied + raised)
    assert saved.num_bytes == predicted(network, num_tokens, 2, "plain") + extra


@NATIVE
def test_recomputed_blocks_save_their_inputs() -> None:
    model, num_tokens = build(SMALL), 24
    model.recompute = "block"
    saved = train_step(model, [num_tokens])
    outer = outer_bytes(SMALL, MicroBatch(num_tokens, num_tokens, num_tokens, SMALL.num_mtp), 4, "native")
    inputs = (SMALL.num_layers + SMALL.num_mtp) * num_tokens * SMALL.hidden_size * 4
    # Rotary angles are held for the recomputation, not saved.
    rotary = num_tokens * SMALL.attention.rotary_dim * 4
    assert saved.num_bytes == outer + inputs - rotary


THREE_HEADS = SMALL.model_copy(
    update={"attention": SMALL.attention.model_copy(update={"num_heads": 3, "num_kv_heads": 1})}
)
"""Two ranks that share a pack divide its queries."""


class Sparing(torch.autograd.Function):
    """Attention that saves what a kernel saves: its inputs, its output and a float32 number for each query and head."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = q.clone()
        ctx.save_for_backward(q, k, v, out, q.new_zeros(q.shape[:2]))
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.zeros_like(x) for x in ctx.saved_tensors[:3])


def sparing_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object) -> torch.Tensor:
    out: torch.Tensor = Sparing.apply(q, k, v)  # type: ignore[no-untyped-call]
    return out


def save_on(ranks: ProcessRanks, network: ModelConfig) -> dict[str, int]:
    """Bytes that a rank saves of 12 tokens: of a pack of its own, and as its part of a shared one."""
    found = {}
    for name, mesh, num_tokens in (("own", MeshConfig(replicate=2), 12), ("shared", MeshConfig(context=2), 24)):
        model = build(network, seed=0)
        saved = Saved(model)
        engine = TrainEngine(model, OptimizerConfig(), ranks=ranks, context=context_group(mesh, ranks, model.config))
        with saved.counting(), patch.object(plan, "run_attention", sparing_attention):
            engine.step_rows([draw_pack([num_tokens], network.vocab_size)], lr=1e-3, mtp_weight=0.1)
        found[name] = saved.num_bytes
    return found


@NATIVE
@pytest.mark.parametrize("network", [SMALL, THREE_HEADS], ids=["heads divided", "queries divided"])
def test_ranks_that_share_a_pack_save_what_travels_too(network: ModelConfig, tmp_path: Path) -> None:
    found: Any = run_ranks(partial(save_on, network=network), tmp_path)[0]
    in_blocks = (network.num_layers + network.num_mtp) * shared_bytes(network, 12, 4, 2)
    indices = index_bytes(network, MicroBatch(12, 24, 12, network.num_mtp), 2)
    assert found["shared"] - found["own"] == in_blocks + indices
