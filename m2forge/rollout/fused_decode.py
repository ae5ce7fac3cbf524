"""A decode step on CUDA with as few kernel launches as its data dependencies allow.

Computes the same as `decode.Decoder`. Around the matrix products and blocks of the network, one kernel each prepares
the rows, verifies them and updates the sequences; for each MTP module one kernel prepares its rows and one samples its
drafts. The last norm writes the states to the cache, and for a module only the last row of each sequence goes to the
LM head.
"""

import torch
from torch import Tensor

from m2forge.kernels.norm import Norm
from m2forge.kernels.residual import Ending
from m2forge.model.block import Block
from m2forge.model.mtp import MTPModule
from m2forge.model.norm import RMSNorm
from m2forge.model.rope import Rotation
from m2forge.model.transformer import Transformer
from m2forge.rollout.decode import NUM_FIELDS, Shape
from m2forge.rollout.fused import FusedNetwork
from m2forge.rollout.paged_plan import Bundle, PagedCache, PagedPlan


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
            judged = judge(logits_NV, integers, reals, self._logq_SKV, *rows, shape.num_places)
        course, out = settle(integers, *judged, shape.depth)
        for module in range(shape.depth):
            self._draft(module, shape, integers, reals, course, out)
        return out, experts

    def _run_main(self, shape: Shape, integers: Tensor) -> tuple[Tensor, Tensor | None]:
        from m2forge.kernels.decode_rows_triton import begin

        model, cache = self._model, self._cache
        block = model.blocks[0]
        assert isinstance(block, Block)
        (position_N, slot_N, *turn), x_ND, normed_ND = begin(
            *(integers, shape.num_rows, NUM_FIELDS, cache.block_tokens, cache.nowhere),
            *(model.embedding.weight, _norm(block.attention_norm), self._network.frequency_R),
        )
        plan = self._plan(shape, integers, position_N, slot_N)
        states_PD = cache.state_MPTD[0].flatten(0, 1) if cache.num_modules else None
        hidden_ND, experts = self._network.begun_main(x_ND, normed_ND, Rotation(*turn), plan, Ending(states_PD, slot_N))
        return model.logits(hidden_ND), experts

    def _draft(self, module: int, shape: Shape, integers: Tensor, reals: Tensor, course: Tensor, out: Tensor) -> None:
        from m2forge.kernels.decode_rows_triton import begin_module
        from m2forge.kernels.verdict_triton import draft

        model, cache, part = self._model, self._cache, self._model.mtp[module]
        assert isinstance(part, MTPModule)
        (position_N, slot_N, *turn), target_N, joined = begin_module(
            *(module, integers, course, shape.num_rows, NUM_FIELDS, cache.nowhere, cache.state_MPTD[module]),
            *(model.embedding.weight, (_norm(part.state_norm), _norm(part.embedding_norm)), self._network.frequency_R),
        )
        plan = self._plan(shape, integers, position_N, slot_N, model.config.num_layers + module)
        states_PD = cache.state_MPTD[module + 1].flatten(0, 1) if module + 1 < cache.num_modules else None
        ending = Ending(states_PD, slot_N, target_N, shape.num_sequences)
        hidden_BD = self._network.begun_module(module, joined, Rotation(*turn), plan, ending)
        draft(
            *(module, model.logits(hidden_BD), integers, reals, course, self._logq_SKV, out),
            *(shape.num_rows, NUM_FIELDS, shape.num_places, shape.depth, shape.is_greedy),
        )

    def _plan(
        self, shape: Shape, integers: Tensor, position_N: Tensor, slot_N: Tensor, first_layer: int = 0
    ) -> PagedPlan:
        table_BS = integers[:, NUM_FIELDS + shape.num_drafts :]
        bundle = Bundle(0, table_BS, position_N.view(shape.num_sequences, -1))
        return PagedPlan(self._cache, [bundle], first_layer, position_N, slot_N)


def _norm(norm: RMSNorm) -> Norm:
    return Norm(norm.weight, norm.eps)
