"""CUDA graphs of the decode step, one per shape, captured on first use.

A step is one graph launch however many kernels it holds; several steps run without a host sync, each on the output of
the last. Batches are padded to the next of a few sizes. A capture takes as long as hundreds of steps: a batch that
shrinks because completions end runs in a larger batch's graph, where padding rows cost little, until its size has
occurred often enough.
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from m2forge.rollout.decode import Shape, Step

NUM_WARM_UP = 2
"""Warm-up runs before a capture, which compile kernels and allocate persistent buffers."""
PATIENCE = 24
"""Calls that a larger graph serves before a shape gets its own."""


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    integers: Tensor
    reals: Tensor
    turn: Tensor
    """Index of the step within a call."""
    outs: Tensor
    experts: Tensor | None


class DecodeGraphs:
    def __init__(self, decoder: Step, nowhere_slot: int, device: torch.device) -> None:
        """`nowhere_slot`: the slot of padding sequences."""
        self._decoder, self._nowhere_slot, self._device = decoder, nowhere_slot, device
        self._captured: dict[Shape, _Captured] = {}
        self._num_missed = Counter[Shape]()
        self._pool = torch.cuda.graph_pool_handle()

    @property
    def num_captured(self) -> int:
        """Number of graphs; it grows in a call that spent time on a capture."""
        return len(self._captured)

    def __call__(
        self, shape: Shape, integers: Tensor, reals: Tensor, num_steps: int = 1
    ) -> tuple[Tensor, Tensor | None]:
        """As `Decoder`, with inputs in host memory; the returned tensors are on the device and valid until the next
        call."""
        num_sequences = shape.num_sequences
        padded = shape._replace(num_sequences=batch_size(num_sequences))
        if padded not in self._captured:
            self._num_missed[padded] += 1
            padded = serving_shape(padded, self._captured, self._num_missed[padded])
        if padded not in self._captured:
            self._captured[padded] = self._capture(padded)
        captured = self._captured[padded]
        all_integers, all_reals = self._blank(padded)
        all_integers[:num_sequences], all_reals[:num_sequences] = integers, reals
        captured.integers.copy_(all_integers, non_blocking=True)
        captured.reals.copy_(all_reals, non_blocking=True)
        captured.turn.zero_()
        for _ in range(num_steps):
            captured.graph.replay()
        experts = captured.experts
        if experts is not None:
            experts = experts[:num_steps, : num_sequences * shape.num_rows]
        return captured.outs[:num_steps, :num_sequences], experts

    def _blank(self, shape: Shape) -> tuple[Tensor, Tensor]:
        """Inputs of padding sequences."""
        integers = torch.zeros((shape.num_sequences, shape.num_integers), dtype=torch.int64, pin_memory=True)
        # A draft count of −1 makes all rows padding.
        integers[:, 2], integers[:, 4] = -1, self._nowhere_slot
        reals = torch.zeros((shape.num_sequences, sum(shape.widths_of_reals)), dtype=torch.float64, pin_memory=True)
        reals[:, 0] = 1.0
        return integers, reals

    def _capture(self, shape: Shape) -> _Captured:
        integers, reals = (x.to(self._device) for x in self._blank(shape))
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(NUM_WARM_UP):
                out, experts = self._decoder.step(shape, integers, reals)
        torch.cuda.current_stream(self._device).wait_stream(stream)
        turn = torch.zeros(1, dtype=torch.int64, device=self._device)
        outs = out.new_empty((shape.num_steps, *out.shape))
        all_experts = None if experts is None else experts.new_empty((shape.num_steps, *experts.shape))
        graph = torch.cuda.CUDAGraph()
        # Device calls of other threads must not invalidate the capture.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            out, experts = self._decoder.step(shape, integers, reals)
            outs.index_copy_(0, turn, out[None])
            if all_experts is not None and experts is not None:
                all_experts.index_copy_(0, turn, experts[None])
            turn += 1
        return _Captured(graph, integers, reals, turn, outs, all_experts)


def serving_shape(wanted: Shape, captured: Collection[Shape], num_missed: int) -> Shape:
    """The smallest larger captured shape; the shape itself if there is none or it has missed more than `PATIENCE`
    times."""
    larger = [
        shape
        for shape in captured
        if shape.num_sequences > wanted.num_sequences and shape._replace(num_sequences=wanted.num_sequences) == wanted
    ]
    return min(larger) if larger and num_missed <= PATIENCE else wanted


def batch_size(num_sequences: int) -> int:
    """Powers of two up to 64, then multiples of 64."""
    return 1 << (num_sequences - 1).bit_length() if num_sequences <= 64 else -(-num_sequences // 64) * 64
