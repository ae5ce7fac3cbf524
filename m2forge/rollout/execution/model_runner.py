"""All tensor work of a step: the main model's forward pass, sampling, and the drafts of the MTP modules.

With h_0 the states of the main model, module k predicts the token after n from (model/transformer.py)

    h_k[n] = Block_k( P_k [ norm h_{k−1}[n−1] ; norm embedding[x_n] ] )

When the main model has computed the tokens before e, and x_e is sampled, module 1 runs up to e and drafts x_{e+1},
module 2 runs up to e+1, over that draft, and drafts x_{e+2}, and so on: one forward pass per module, and one product
with the LM head per draft.

The paged cache stores the states h_0 … h_{K−1} beside the keys and values, K hidden sizes per token. So a module can
resume at any position, also after a prefix that another request has prefilled: when speculation is switched on again
the modules prefill the tokens that ran without them, and drafts equal those of the whole network run over the whole
sequence.

Rejected drafts leave stale cache entries from e on, which no token attends to: the next run begins at e or before, or
after the accepted drafts (decode.py), continues without a gap, writes before it reads, and attends only up to itself.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from m2forge.kernels import linear as products
from m2forge.kernels.linear import biased_linear, native_linear
from m2forge.kernels.pointwise import Norm, rotate_into_cache
from m2forge.model.rotary import Rotation, frequencies, rotation
from m2forge.model.transformer import (
    Attention,
    Block,
    DenseFFN,
    MTPModule,
    RMSNorm,
    Transformer,
)
from m2forge.observe.log import warn_once
from m2forge.rollout.config import RolloutConfig
from m2forge.rollout.execution import cuda_network
from m2forge.rollout.execution.cuda_decode import DecodeGraphs, FusedDecoder
from m2forge.rollout.execution.decode import NUM_FIELDS, Decoder, Network, Shape
from m2forge.rollout.execution.sampler import Row, Stream, draw, uniforms
from m2forge.rollout.kv.paged_plan import PagedCache, PagedPlan, Span, arranged, planned
from m2forge.rollout.kv.scheduler import Copy
from m2forge.rollout.request import Drawn, Request
from m2forge.rollout.speculation.verify import Drafts, draft, is_free, verify

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Candidate:
    """A sequence that samples its next token, after verifying its drafts."""

    last: int
    """Row of the step that predicts the token after all drafts."""
    drafts: Sequence[int]
    slot: int
    rows: Sequence[Row]
    """Sampling parameters of each row, one more than there are drafts."""


@dataclass(frozen=True)
class MTPSequence:
    """The tokens of one sequence that the MTP modules run over."""

    ids: Sequence[int]
    """All known tokens: at least one more than the main model has computed."""
    starts: Sequence[int]
    """Position at which each module resumes."""
    end: int
    """End of the tokens, all computed by the main model, that the modules run over."""
    rows: Sequence[Row]
    """Sampling parameters of the drafts after `end`: one for each draft, or empty."""
    blocks: npt.NDArray[np.int64]
    slot: int

    def num_tokens(self, module: int) -> int:
        num_drafts = module + 1 if module < len(self.rows) else 0
        return self.end - self.starts[module] + num_drafts


@dataclass(frozen=True)
class DecodeBatch:
    """A decode batch: each sequence runs its last sampled token and the drafts after it. Each list has one entry per
    sequence."""

    tokens: Sequence[int]
    starts: Sequence[int]
    """Positions of `tokens`."""
    drafts: Sequence[Sequence[int]]
    capacities: Sequence[int]
    """Tokens that fit in the sequence's blocks, from its last sampled token on."""
    table_BS: npt.NDArray[np.int64]
    slots: Sequence[int]
    temperatures: Sequence[float]
    seeds: Sequence[int]
    samples: Sequence[int]
    is_seeded: Sequence[bool]
    indices: Sequence[int]
    """Number of tokens sampled before."""

    @classmethod
    def of(
        cls,
        requests: Sequence[Request],
        drafts: Sequence[Sequence[int]],
        capacities: Sequence[int],
        table_BS: npt.NDArray[np.int64],
    ) -> "DecodeBatch":
        return cls(
            tokens=[request.ids[-1] for request in requests],
            starts=[request.num_computed for request in requests],
            drafts=drafts,
            capacities=capacities,
            table_BS=table_BS,
            slots=[request.slot for request in requests],
            temperatures=[request.prompt.sampling.temperature for request in requests],
            seeds=[request.seed for request in requests],
            samples=[request.sample for request in requests],
            is_seeded=[request.prompt.seed is not None for request in requests],
            indices=[request.num_sampled for request in requests],
        )


@dataclass(frozen=True)
class Decoded:
    """Results of decode steps, by sequence."""

    drawn: list[Drawn]
    drafts: list[list[int]]
    """New drafts, made in the last step."""
    num_accepted_BN: npt.NDArray[np.int64]
    """Accepted drafts in each step."""
    num_drafts_BN: npt.NDArray[np.int64]
    experts_BNJLK: Tensor | None
    """Experts of every row of each step."""
    is_token_BNJ: npt.NDArray[np.bool_]
    """Rows whose token is part of the completion."""

    def drafted(self, num_appended_B: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Number of drafts and of accepted drafts in each step that gave at least one of the first `num_appended_B`
        tokens."""
        num_drawn_BN = 1 + self.num_accepted_BN
        is_used_BN = num_drawn_BN.cumsum(1) - num_drawn_BN < num_appended_B[:, None]
        return self.num_drafts_BN[is_used_BN], self.num_accepted_BN[is_used_BN]


class PlainNetwork:
    """The training network over the paged cache: the reference for the fused networks, `CPUNetwork` (bfloat16) and
    that in cuda_network.py."""

    def __init__(self, model: Transformer) -> None:
        self._model = model

    def main(self, token_N: Tensor, plan: PagedPlan) -> tuple[Tensor, Tensor, Tensor | None]:
        output = self._model(token_N, plan, with_mtp=False, returns_experts=True)
        return output.state_ND, output.hidden_ND, output.experts_NLK

    def module(self, index: int, parent_ND: Tensor, token_N: Tensor, plan: PagedPlan) -> tuple[Tensor, Tensor]:
        return self._model.run_module(index, parent_ND, token_N, plan)


def serves_on_cpu(model: Transformer, cache: PagedCache) -> bool:
    """Whether the native bfloat16 product supports every matrix and norm of the network."""
    parts = [part for part in model.modules() if isinstance(part, (torch.nn.Linear, RMSNorm))]
    weights = [weight.detach() for part in parts for weight in part.parameters(recurse=False)]
    return products.serves(cache.k_YPTGK, *weights)


class CPUNetwork:
    """The network over the paged cache in bfloat16 on a CPU, in six native calls per dense layer. Its CUDA counterpart
    is in cuda_network.py.

    Computes the same as `PlainNetwork`, its reference. It fuses each norm with the product after it, the gate and each
    residual sum with the product before it, and the QK norms and rotary embeddings with the cache writes. Sums and
    gates are rounded once.
    """

    def __init__(self, model: Transformer, cache: PagedCache) -> None:
        self._model, self._cache = model, cache
        self._layers = list(zip(cache.k_YPTGK, cache.v_YPTGK, strict=True))
        self._frequency_R = frequencies(model.config.attention)
        self._rotary_factor = model.config.attention.rotary_factor

    def main(self, token_N: Tensor, plan: PagedPlan) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns hidden states, the LM head's input, and the chosen experts (N, layers, K), if there are any."""
        model, chosen = self._model, list[Tensor]()
        x_ND = model.embedding(token_N)
        rotary = rotation(plan.position_N, self._frequency_R, x_ND.dtype, self._rotary_factor)
        for layer, block in enumerate(model.blocks):
            assert isinstance(block, Block)
            x_ND, expert_NK = self._block(block, layer, layer, x_ND, rotary, plan)
            chosen += [] if expert_NK is None else [expert_NK]
        return x_ND, model.norm(x_ND), torch.stack(chosen, 1) if chosen else None

    def module(self, index: int, parent_ND: Tensor, token_N: Tensor, plan: PagedPlan) -> tuple[Tensor, Tensor]:
        """As `Transformer.run_module`."""
        model, module = self._model, self._model.mtp[index]
        assert isinstance(module, MTPModule)
        rotary = rotation(plan.position_N, self._frequency_R, parent_ND.dtype, self._rotary_factor)
        joined = torch.cat((module.state_norm(parent_ND), module.embedding_norm(model.embedding(token_N))), -1)
        x_ND = native_linear(joined, module.projection.weight, joined.dtype)
        last, depth = model.config.num_layers - 1, model.config.num_layers + index
        x_ND, _ = self._block(module.block, last, depth, x_ND, rotary, plan)
        return x_ND, module.norm(x_ND)

    def _block(
        self, block: Block, layer: int, depth: int, x_ND: Tensor, rotary: Rotation, plan: PagedPlan
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the state after the block, and the chosen experts. `layer` selects the attention window, `depth` the
        layer of the cache."""
        window = self._model.config.attention.window if self._model.config.is_windowed(layer) else None
        sight = None if window is None else (window.size, window.num_sinks)
        attention, ffn, dtype = block.attention, block.ffn, x_ND.dtype
        qkv_NW = _project_qkv(x_ND, attention, _norm_of(block.attention_norm))
        k_PTGK, v_PTGK = self._layers[depth]
        q_NHK = rotate_into_cache(qkv_NW, k_PTGK, v_PTGK, plan.slot_N, rotary, *_qk_norms(attention))
        mixed_NHK = plan.attend(q_NHK, k_PTGK, v_PTGK, sight)
        x_ND = native_linear(mixed_NHK.flatten(1), attention.out.weight, dtype, onto=x_ND)
        if isinstance(ffn, DenseFFN):
            h_NF = native_linear(x_ND, ffn.w13.weight, dtype, _norm_of(block.ffn_norm), is_gated=True)
            return native_linear(h_NF, ffn.w2.weight, dtype, onto=x_ND), None
        out_ND, balance = ffn(block.ffn_norm(x_ND))
        return x_ND + out_ND, balance.expert_NK


def _project_qkv(x_ND: Tensor, attention: Attention, norm: Norm) -> Tensor:
    qkv = attention.qkv
    if not attention.config.qkv_bias:
        return native_linear(x_ND, qkv.weight, x_ND.dtype, norm)
    return biased_linear(x_ND, qkv.weight, qkv.bias, norm)


def _norm_of(norm: RMSNorm) -> Norm:
    return Norm(norm.weight, norm.eps)


def _qk_norms(attention: Attention) -> tuple[Norm, Norm] | tuple[None, None]:
    if attention.config.qk_norm == "none":
        return None, None
    return _norm_of(attention.q_norm), _norm_of(attention.k_norm)


class Runner:
    def __init__(self, model: Transformer, config: RolloutConfig) -> None:
        self.model = model
        weight, self.num_modules = model.embedding.weight, config.speculation
        self.cache = PagedCache(
            model.config, config.num_blocks, config.block_tokens, weight.device, weight.dtype, self.num_modules
        )
        dtype = torch.promote_types(weight.dtype, torch.float32)
        # One extra slot for padding sequences.
        shape = (config.max_running + 1, self.num_modules, model.config.vocab_size)
        self._logq_SKV = torch.zeros(shape, device=weight.device, dtype=dtype)
        """Log-probabilities that unverified drafts were sampled from, by the slot of their request."""
        is_fused = cuda_network.serves(self.cache)
        self._network: Network = PlainNetwork(model)
        if is_fused:
            self._network = cuda_network.FusedNetwork(model, self.cache)
        elif serves_on_cpu(model, self.cache):
            self._network = CPUNetwork(model, self.cache)
        self._step: DecodeGraphs | Decoder = Decoder(model, self._network, self.cache, self._logq_SKV)
        if isinstance(self._network, cuda_network.FusedNetwork):
            decoder = FusedDecoder(model, self._network, self.cache, self._logq_SKV)
            self._step = DecodeGraphs(decoder, config.max_running, weight.device)
        self._most_steps = config.steps_per_sync
        self.multi_step = is_fused and cuda_network.is_capturable(model)
        """Whether `decode` is faster than the separate calls."""
        # With MTP modules a step also writes their input states and runs them over the prompts, which no graph holds.
        has_graphs = self.multi_step and not self.num_modules
        self._prefill = cuda_network.PrefillGraphs(self._network, self.cache, model.config) if has_graphs else None
        reason = cuda_network.slow_reason(model.config, weight.device.type, weight.dtype, config.block_tokens)
        if reason is not None and weight.dtype != torch.float64:
            warn_once(_log, reason)

    @property
    def num_captured(self) -> int:
        """Number of captured CUDA graphs of decode steps; it grows in a step that spent time on a capture."""
        return self._step.num_captured if isinstance(self._step, DecodeGraphs) else 0

    def copy(self, copies: Sequence[Copy]) -> None:
        self.cache.copy(copies)

    def decode(self, batch: DecodeBatch, depth: int, num_steps: int) -> "Decoded":
        """Runs `num_steps` decode steps; returns each sequence's next tokens and `depth` new drafts. All sequences are
        greedy or none is; none uses penalties or truncation; the modules have run over all tokens the main model has
        computed."""
        nums = [len(drafts) for drafts in batch.drafts]
        num_drafts, num_blocks = max(depth, *nums), batch.table_BS.shape[1]
        shape = Shape(len(nums), num_drafts, depth, num_blocks, batch.temperatures[0] == 0, self._most_steps)
        integers = np.zeros((len(nums), shape.num_integers), np.int64)
        fields = (batch.tokens, batch.starts, nums, batch.capacities, batch.slots, batch.is_seeded, batch.starts)
        # The last field stays 0: the blocks that held only drafts were freed, and the depth may have changed.
        integers[:, : len(fields)] = np.array(fields, np.int64).T
        if num_drafts:
            padded = [[*drafts, *[0] * (num_drafts - num)] for drafts, num in zip(batch.drafts, nums, strict=True)]
            integers[:, NUM_FIELDS:-num_blocks] = padded
        integers[:, -num_blocks:] = batch.table_BS
        reals = torch.from_numpy(_reals(shape, batch))
        outs, experts = self._step(shape, torch.from_numpy(integers), reals, num_steps)
        tokens, counts, drafts_there, new_drafts, logprobs, raw_logprobs = np.split(
            outs.cpu().numpy().swapaxes(0, 1), np.cumsum(shape.widths_of_output)[:-1], axis=2
        )
        count_BN = counts[..., 0].astype(np.int64)
        is_token = np.arange(shape.num_rows) < count_BN[..., None]
        columns = [
            [row[mask].tolist() for row, mask in zip(rows, is_token, strict=True)]
            for rows in (tokens.astype(np.int64), logprobs, raw_logprobs)
        ]
        if experts is not None:
            experts = experts.unflatten(1, (len(nums), -1)).transpose(0, 1)
        return Decoded(
            [Drawn(*drawn) for drawn in zip(*columns, strict=True)],
            new_drafts[:, -1].astype(np.int64).tolist(),
            count_BN - 1,
            drafts_there[..., 0].astype(np.int64),
            experts,
            is_token,
        )

    def main(self, tokens: Sequence[int], spans: Sequence[Span]) -> tuple[Tensor, Tensor | None]:
        """Runs the main model over `tokens`, whose `spans` are in the order of `arranged`; returns the LM head's input
        and the experts."""
        if self._prefill is not None and (found := self._prefill.run(tokens, spans)) is not None:
            return found
        plan = planned(self.cache, spans)
        state_ND, hidden_ND, experts_NLK = self._network.main(self._to_device(tokens), plan)
        if self.num_modules:
            self.cache.write_states(0, plan, state_ND)
        return hidden_ND, experts_NLK

    def sample(self, hidden_ND: Tensor, candidates: Sequence[Candidate]) -> list[Drawn]:
        """Samples the next tokens of each candidate: its accepted drafts and one more."""
        rows = [row for candidate in candidates for row in candidate.rows]
        hidden_rows = [
            candidate.last - back for candidate in candidates for back in range(len(candidate.drafts), -1, -1)
        ]
        logits_RV = self.model.logits(hidden_ND[self._to_device(hidden_rows)])
        if len(rows) == len(candidates):
            drawn = draw(logits_RV, rows)
            return [Drawn(*([x] for x in token)) for token in zip(*(column.tolist() for column in drawn), strict=True)]
        most = max(len(candidate.drafts) for candidate in candidates)
        indices, end = [], 0
        for candidate in candidates:
            indices += [end + min(index, len(candidate.drafts)) for index in range(most + 1)]
            end += len(candidate.rows)
        is_even = len(indices) == len(rows)
        logits_BJV = (logits_RV if is_even else logits_RV[self._to_device(indices)]).unflatten(0, (-1, most + 1))
        verified = verify(logits_BJV, [rows[index] for index in indices], self._drafts(candidates, most))
        columns = (column.tolist() for column in verified)
        return [
            Drawn(tokens[:num], logprobs[:num], raw_logprobs[:num])
            for tokens, logprobs, raw_logprobs, num in zip(*columns, strict=True)
        ]

    def _drafts(self, candidates: Sequence[Candidate], most: int) -> Drafts:
        tokens = [[*candidate.drafts, *[0] * (most - len(candidate.drafts))] for candidate in candidates]
        logq_BKV = None
        if any(is_free(candidate.rows[0]) for candidate in candidates):
            logq_BKV = self._logq_SKV[self._to_device([candidate.slot for candidate in candidates]), :most]
        return Drafts(
            self._to_device(tokens), self._to_device([len(candidate.drafts) for candidate in candidates]), logq_BKV
        )

    def run_mtp(self, sequences: Sequence[MTPSequence], depth: int) -> list[list[int]]:
        """Run the first `depth` MTP modules; returns the drafts of each sequence."""
        draft_BK = torch.zeros((len(sequences), depth), dtype=torch.int64, device=self.cache.device)
        for module in range(depth):
            self._run_module(module, sequences, draft_BK)
        return [drafts[: len(sequence.rows)] for drafts, sequence in zip(draft_BK.tolist(), sequences, strict=True)]

    def _run_module(self, module: int, sequences: Sequence[MTPSequence], draft_BK: Tensor) -> None:
        members = [index for index, sequence in enumerate(sequences) if sequence.num_tokens(module)]
        if not members:
            return
        spans = [
            Span(sequences[index].starts[module], sequences[index].num_tokens(module), sequences[index].blocks)
            for index in members
        ]
        order = arranged(spans)
        members, spans = [members[index] for index in order], [spans[index] for index in order]
        plan = planned(self.cache, spans, self.model.config.num_layers + module)
        token_N, drafters, drafter_B, last_row_B = self._tokens(module, sequences, members, draft_BK)
        parent_ND = self.cache.parent_states(module, plan)
        state_ND, hidden_ND = self._network.module(module, parent_ND, token_N, plan)
        if module + 1 < self.num_modules:
            self.cache.write_states(module + 1, plan, state_ND)
        if drafters:
            logits_BV = self.model.logits(hidden_ND[last_row_B])
            token_B, logq_BV = draft(logits_BV, [sequences[index].rows[module] for index in drafters])
            draft_BK[drafter_B, module] = token_B
            if logq_BV is not None:
                self._logq_SKV[self._to_device([sequences[index].slot for index in drafters]), module] = logq_BV

    def _tokens(
        self, module: int, sequences: Sequence[MTPSequence], members: Sequence[int], draft_BK: Tensor
    ) -> tuple[Tensor, list[int], Tensor, Tensor]:
        """Returns the tokens that a module runs, including drafts of earlier modules; which sequences draft, as list
        and tensor; and the row of each draft."""
        tokens: list[int] = []
        drafters, last_rows = [], []
        for index in members:
            sequence = sequences[index]
            drafts = module < len(sequence.rows)
            tokens += sequence.ids[sequence.starts[module] : sequence.end + drafts]
            if drafts:
                tokens += [0] * module
                drafters.append(index)
                last_rows.append(len(tokens) - 1)
        token_N, (drafter_B, last_row_B) = self._to_device(tokens), self._to_device([drafters, last_rows])
        if module and drafters:
            back_K = torch.arange(1 - module, 1, device=token_N.device)
            token_N[last_row_B[:, None] + back_K] = draft_BK[drafter_B, :module]
        return token_N, drafters, drafter_B, last_row_B

    def _to_device(self, integers: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(integers, dtype=torch.int64, device=self.cache.device)


def _reals(shape: Shape, batch: DecodeBatch) -> npt.NDArray[np.float64]:
    """The float inputs of a decode step: temperatures and random numbers."""
    temperature_B1 = np.array(batch.temperatures, np.float64)[:, None]
    if shape.is_greedy:
        return temperature_B1
    _, num_tokens, num_verdicts, num_drafts = shape.widths_of_reals
    counts: dict[Stream, int] = {"token": num_tokens, "verdict": num_verdicts, "draft": num_drafts}
    streams = [stream for stream, num in counts.items() for _ in range(num)]
    offset_X = np.concatenate([np.arange(num) for num in counts.values()])
    index_BX = np.array(batch.indices)[:, None] + offset_X
    return np.concatenate((temperature_B1, uniforms(batch.seeds, batch.samples, index_BX, streams)), 1)
