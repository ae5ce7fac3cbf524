"""The decode step on CUDA, in as few kernel launches as its data dependencies allow, captured as CUDA graphs.

One graph per shape is captured on first use. A step is one graph launch however many kernels it holds; several steps
run without a host sync, each on the output of the last. Batches are padded to the next of a few sizes. A capture takes
as long as hundreds of steps: a batch that shrinks because completions end runs in a larger batch's graph, where padding
rows cost little, until its size has occurred often enough.

`FusedDecoder` computes the same as `decode.Decoder`. Around the matrix products and blocks of the network, one kernel
each prepares the rows, verifies them and updates the sequences; for each MTP module one kernel prepares its rows and
one samples its drafts. The last norm writes the states to the cache, and for a module only the last row of each
sequence goes to the LM head.
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from m2forge.kernels.pointwise import Norm
from m2forge.kernels.residual import Ending
from m2forge.model.rotary import Rotation
from m2forge.model.transformer import Block, MTPModule, RMSNorm, Transformer
from m2forge.rollout.execution.cuda_network import FusedNetwork
from m2forge.rollout.execution.decode import NUM_FIELDS, Shape, Step
from m2forge.rollout.kv.paged_plan import Bundle, PagedCache, PagedPlan


class FusedDecoder:
    """`logq_SKV`: log-probabilities that drafts were sampled from, by slot; a step reads those of its drafts and writes
    those of the new ones."""

    def __init__(self, model: Transformer, network: FusedNetwork, cache: PagedCache, logq_SKV: Tensor) -> None:
        self._model, self._network, self._cache, self._logq_SKV = model, network, cache, logq_SKV

    @torch.no_grad()
    def step(self, shape: Shape, integers: Tensor, reals: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns `out` and the experts of all rows, if there are any; `integers` then holds the next step's inputs."""
        from m2forge.kernels.decode_rows_triton import settle
        from m2forge.kernels.verdict_triton import judge, judge_greedy

        logits_NV, experts = self._run_main(shape, integers)
        rows = (shape.num_rows, NUM_FIELDS)
        if shape.is_greedy:
            judged = judge_greedy(logits_NV, integers, *rows)
        else:
            judged = judge(logits_NV, integers, reals, self._logq_SKV, *rows, shape.num_uniforms)
        course, out = settle(integers, *judged, shape.depth)
        for module in range(shape.depth):
            self._draft(module, shape, integers, reals, course, out)
        return out, experts

    def _run_main(self, shape: Shape, integers: Tensor) -> tuple[Tensor, Tensor | None]:
        from m2forge.kernels.decode_rows_triton import begin

        model, cache = self._model, self._cache
        block = model.blocks[0]
        assert isinstance(block, Block)
        (position_N, slot_N, *rotary), x_ND, normed_ND = begin(
            *(integers, shape.num_rows, NUM_FIELDS, cache.block_tokens, cache.scratch_slot),
            *(model.embedding.weight, _norm(block.attention_norm)),
            *(self._network.frequency_R, self._network.rotary_factor),
        )
        plan = self._plan(shape, integers, position_N, slot_N)
        states_PD = cache.state_MPTD[0].flatten(0, 1) if cache.num_modules else None
        hidden_ND, experts = self._network.begun_main(
            x_ND, normed_ND, Rotation(*rotary), plan, Ending(states_PD, slot_N)
        )
        return model.logits(hidden_ND), experts

    def _draft(self, module: int, shape: Shape, integers: Tensor, reals: Tensor, course: Tensor, out: Tensor) -> None:
        from m2forge.kernels.decode_rows_triton import begin_module
        from m2forge.kernels.verdict_triton import draft

        model, cache, part = self._model, self._cache, self._model.mtp[module]
        assert isinstance(part, MTPModule)
        (position_N, slot_N, *rotary), target_N, joined = begin_module(
            *(module, integers, course, shape.num_rows, NUM_FIELDS, cache.scratch_slot, cache.state_MPTD[module]),
            *(model.embedding.weight, (_norm(part.state_norm), _norm(part.embedding_norm))),
            *(self._network.frequency_R, self._network.rotary_factor),
        )
        plan = self._plan(shape, integers, position_N, slot_N, model.config.num_layers + module)
        states_PD = cache.state_MPTD[module + 1].flatten(0, 1) if module + 1 < cache.num_modules else None
        ending = Ending(states_PD, slot_N, target_N, shape.num_sequences)
        hidden_BD = self._network.begun_module(module, joined, Rotation(*rotary), plan, ending)
        draft(
            *(module, model.logits(hidden_BD), integers, reals, course, self._logq_SKV, out),
            *(shape.num_rows, NUM_FIELDS, shape.num_uniforms, shape.depth, shape.is_greedy),
        )

    def _plan(
        self, shape: Shape, integers: Tensor, position_N: Tensor, slot_N: Tensor, first_layer: int = 0
    ) -> PagedPlan:
        table_BS = integers[:, NUM_FIELDS + shape.num_drafts :]
        bundle = Bundle(0, table_BS, position_N.view(shape.num_sequences, -1))
        return PagedPlan(self._cache, [bundle], first_layer, position_N, slot_N)


def _norm(norm: RMSNorm) -> Norm:
    return Norm(norm.weight, norm.eps)


NUM_WARM_UP = 2
"""Warm-up runs before a capture, which compile kernels and allocate persistent buffers."""
PATIENCE = 24
"""Calls that a larger graph serves before a shape gets its own."""


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    integers: Tensor
    reals: Tensor
    step_index: Tensor
    """Index of the step within a call."""
    outs: Tensor
    experts: Tensor | None


class DecodeGraphs:
    def __init__(self, decoder: Step, padding_slot: int, device: torch.device) -> None:
        """`padding_slot`: the slot of padding sequences."""
        self._decoder, self._padding_slot, self._device = decoder, padding_slot, device
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
        captured.step_index.zero_()
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
        integers[:, 2], integers[:, 4] = -1, self._padding_slot
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
        step_index = torch.zeros(1, dtype=torch.int64, device=self._device)
        outs = out.new_empty((shape.num_steps, *out.shape))
        all_experts = None if experts is None else experts.new_empty((shape.num_steps, *experts.shape))
        graph = torch.cuda.CUDAGraph()
        # Device calls of other threads must not invalidate the capture.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            out, experts = self._decoder.step(shape, integers, reals)
            outs.index_copy_(0, step_index, out[None])
            if all_experts is not None and experts is not None:
                all_experts.index_copy_(0, step_index, experts[None])
            step_index += 1
        return _Captured(graph, integers, reals, step_index, outs, all_experts)


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
