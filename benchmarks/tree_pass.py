"""Forward and backward passes over token trees and over rows: what they compute, how long they take, what they hold.

All passes run the same network with the same loss, a weighted sum of log-probabilities at the loss edges; they differ
in their attention plans alone. FLOPs of forward + backward, with N tokens, P pairs of a token and one it sees, M edges:

    6 · active · N   +   12 · layers · q_width · P   +   6 · vocabulary · hidden · M

Shapes: N tokens, M loss edges, H query heads, G key/value heads, K head dimension.
"""

import gc
import inspect
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from report import times_s
from torch import Tensor
from tree_workload import Row

from m2forge.kernels.head_loss import linear_logprob
from m2forge.model.config import ModelConfig, WindowConfig
from m2forge.model.count import count
from m2forge.model.plan import Attend, AttentionPlan, CausalRows, Documents, Trees
from m2forge.model.transformer import Transformer
from m2forge.tree.flat import FlatTree

ENOUGH_S = 3.0
MOST_REPEATS = 5
"""Passes are repeated for `ENOUGH_S` seconds, at most `MOST_REPEATS` times."""


@dataclass(frozen=True)
class Work:
    """FLOPs by term."""

    num_tokens: int
    layers: float
    attention: float
    head: float

    @classmethod
    def of(cls, config: ModelConfig, num_tokens: int, num_pairs: int, num_edges: int) -> "Work":
        return cls(
            num_tokens,
            layers=6.0 * count(config).active_in_layers * num_tokens,
            attention=12.0 * config.num_layers * config.attention.q_width * num_pairs,
            head=6.0 * config.vocab_size * config.hidden_size * num_edges,
        )

    @classmethod
    def of_rows(cls, config: ModelConfig, rows: Sequence[Row]) -> "Work":
        lengths = [row.num_tokens for row in rows]
        return cls.of_lengths(config, lengths, sum(row.target.size for row in rows))

    @classmethod
    def of_lengths(cls, config: ModelConfig, lengths: Sequence[int], num_edges: int) -> "Work":
        return cls.of(config, sum(lengths), sum(length * (length + 1) // 2 for length in lengths), num_edges)

    @classmethod
    def of_tree(cls, config: ModelConfig, flat: FlatTree) -> "Work":
        num_pairs = int(flat.position_N.sum(dtype=np.int64)) + flat.num_tokens
        return cls.of(config, flat.num_tokens, num_pairs, flat.num_edges)

    @classmethod
    def sum(cls, works: Sequence["Work"]) -> "Work":
        return cls(sum(work.num_tokens for work in works), *map(sum, zip(*(work.terms for work in works), strict=True)))

    @property
    def terms(self) -> tuple[float, float, float]:
        return self.layers, self.attention, self.head

    @property
    def flops(self) -> float:
        return sum(self.terms)


@dataclass(frozen=True)
class Pass:
    tokens_N: Tensor
    make_plan: Callable[[], AttentionPlan]
    """Called in every pass, as in training, and timed with it."""
    position_M: Tensor
    target_M: Tensor
    weight_M: Tensor


Weights = npt.NDArray[np.float32]
PlanOf = Callable[[Sequence[int], torch.device], AttentionPlan]
"""Makes the attention plan of concatenated rows of these lengths."""


def tree_pass(flat: FlatTree, weight_S: Weights, device: torch.device, multiple: int = 1) -> Pass:
    """`weight_S`: weights of the tree's samples. `multiple`: the padded length is a multiple of it."""
    length = -(-flat.num_tokens // multiple) * multiple
    return Pass(
        _on(device, np.pad(flat.tokens_N, (0, length - flat.num_tokens))),
        partial(Trees, flat, device, length),
        _on(device, flat.edge_position_M),
        _on(device, flat.edge_target_M),
        torch.from_numpy(weight_S[flat.sample_S[flat.edge_sample_M]]).to(device),
    )


def row_passes(packs: Sequence[Sequence[Row]], weight_S: Weights, device: torch.device, plan_of: PlanOf) -> list[Pass]:
    """One pass per pack, all of one length: the others end in a row of padding, so that one compilation serves all."""
    length = max(sum(row.num_tokens for row in pack) for pack in packs)
    return [_row_pass(pack, length, weight_S, device, plan_of) for pack in packs]


def lengths_within(rows: Sequence[Row], num_tokens: int) -> list[int]:
    """Lengths of the first rows, the last one shortened, that add up to `num_tokens`."""
    ends = np.minimum(np.cumsum([row.num_tokens for row in rows]), num_tokens)
    lengths = np.diff(ends, prepend=0, append=num_tokens)
    return [int(length) for length in lengths if length]


def as_rows(tree: Pass, lengths: Sequence[int]) -> Pass:
    """A pass over the same tokens and edges that takes them for rows: as many tokens computed, another meaning."""
    return replace(tree, make_plan=partial(documents, lengths, tree.tokens_N.device))


def _row_pass(pack: Sequence[Row], length: int, weight_S: Weights, device: torch.device, plan_of: PlanOf) -> Pass:
    sizes = [row.num_tokens for row in pack]
    starts = np.cumsum([0, *sizes])
    num_padding = length - int(starts[-1])
    tokens = np.concatenate([*(row.tokens for row in pack), np.zeros(num_padding, np.int32)])
    position = np.concatenate([row.position + start for row, start in zip(pack, starts[:-1], strict=True)])
    return Pass(
        _on(device, tokens),
        partial(plan_of, [*sizes, num_padding] if num_padding else sizes, device),
        _on(device, position),
        _on(device, np.concatenate([row.target for row in pack])),
        torch.from_numpy(weight_S[np.concatenate([row.sample for row in pack])]).to(device),
    )


def _on(device: torch.device, array: npt.NDArray[np.integer]) -> Tensor:
    return torch.from_numpy(array.astype(np.int64)).to(device)


# -- attention over rows, fastest ways ---------------------------------------------------------------------------------


def documents(lengths: Sequence[int], device: torch.device) -> AttentionPlan:
    """FlexAttention with a document mask on CUDA, our kernel on a CPU."""
    return Documents(lengths, device)


def cudnn_rows(lengths: Sequence[int], device: torch.device) -> AttentionPlan:
    """cuDNN: all rows at once where they are of one length, else one after another."""
    if len(set(lengths)) == 1:
        return CausalRows(len(lengths), lengths[0], device)
    return RowByRow(lengths, device)


class RowByRow(Documents):
    def bind(self, window: WindowConfig | None) -> Attend:
        assert window is None
        return _RowByRowAttend(self.lengths)


@dataclass(frozen=True)
class _RowByRowAttend:
    lengths: tuple[int, ...]

    # Unrolled into the compiled block, many rows would take minutes to compile.
    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch does not type it
    def __call__(self, q_NHK: Tensor, k_NGK: Tensor, v_NGK: Tensor) -> Tensor:
        parts = (x.transpose(0, 1)[None].split(list(self.lengths), dim=2) for x in (q_NHK, k_NGK, v_NGK))
        outs = [
            F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            for q, k, v in zip(*parts, strict=True)
        ]
        return torch.cat(outs, dim=2)[0].transpose(0, 1)


class FlashRows(Documents):
    """Variable-length flash attention of torch, whose options differ between releases."""

    def bind(self, window: WindowConfig | None) -> Attend:
        from torch.nn.attention.varlen import varlen_attn

        assert window is None
        known = inspect.signature(varlen_attn).parameters
        options: dict[str, object] = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
        if "enable_gqa" in known:
            options["enable_gqa"] = True
        ends = torch.from_numpy(np.cumsum([0, *self.lengths]).astype(np.int32)).to(self.device)
        return _FlashAttend(cast("Callable[..., Tensor]", varlen_attn), options, ends, max(self.lengths))


@dataclass(frozen=True)
class _FlashAttend:
    attention: Callable[..., Tensor]
    options: dict[str, object]
    end_B: Tensor
    longest: int

    def __call__(self, q_NHK: Tensor, k_NGK: Tensor, v_NGK: Tensor) -> Tensor:
        if "enable_gqa" not in self.options:
            num_shared = q_NHK.shape[1] // k_NGK.shape[1]
            k_NGK, v_NGK = (x.repeat_interleave(num_shared, dim=1) for x in (k_NGK, v_NGK))
        q, k, v = (x.contiguous() for x in (q_NHK, k_NGK, v_NGK))
        return self.attention(q, k, v, self.end_B, self.end_B, self.longest, self.longest, **self.options)


def flash_rows(lengths: Sequence[int], device: torch.device) -> AttentionPlan:
    return FlashRows(lengths, device)


# -- measuring ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    seconds: float
    memory_gib: float
    """Most that was allocated at once; 0 on a CPU."""
    loss: float


def run(model: Transformer, passes: Sequence[Pass]) -> Tensor:
    """Forward + backward over all passes, gradients added up; the loss is returned."""
    model.zero_grad(set_to_none=True)
    losses = []
    for each in passes:
        hidden_ND = model(each.tokens_N, each.make_plan(), with_mtp=False).hidden_ND
        loss = linear_logprob(
            hidden_ND,
            model.head_weight,
            each.target_M,
            position_M=each.position_M,
            term=partial(_weighted, each.weight_M),
        ).loss
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()


def _weighted(weight_M: Tensor, logp_C: Tensor, chunk: slice) -> tuple[Tensor, Tensor]:
    slope_C = -weight_M[chunk]
    return slope_C * logp_C, slope_C


def measure(model: Transformer, passes: Sequence[Pass]) -> Measured:
    """On CUDA: the median time of all passes; the first, which compiles, and the first two are run ahead."""
    for num_ahead in (1, 2):
        run(model, passes[:num_ahead])
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    times: list[float] = []
    loss = 0.0
    while not times or (len(times) < MOST_REPEATS and sum(times) < ENOUGH_S):
        started_s = time.perf_counter()
        loss = float(run(model, passes))  # the number is there when all passes are done
        times.append(time.perf_counter() - started_s)
    return Measured(statistics.median(times), torch.cuda.max_memory_allocated() / 2**30, loss)


def measure_in_turns(model: Transformer, jobs: Sequence[Sequence[Pass]]) -> list[Measured]:
    """On a CPU, where a slow moment should meet all of them: the median of three."""
    losses = [float(run(model, passes)) for passes in jobs]
    times = times_s([partial(run, model, passes) for passes in jobs], repeats=3, warmup=0)
    return [Measured(statistics.median(each), 0.0, loss) for each, loss in zip(times, losses, strict=True)]


def forget(model: Transformer) -> None:
    """Give back what the last passes held, compiled code included: the next ones start as a program of their own."""
    model.zero_grad(set_to_none=True)
    gc.collect()
    torch.compiler.reset()
    torch.cuda.empty_cache()
