"""Decode steps as one function of tensors, from the last tokens to the next drafts.

The main model verifies the drafts and samples, then the MTP modules run over the sampled tokens and draft again: what
core.py and model_runner.py do in parts, here without a host sync. A step updates its inputs in place for the next one,
so that several run between host syncs. On CUDA a graph holds a step (cuda_decode.py).

    integers   per sequence: the last sampled token, its position, the number of drafts after it, the tokens that fit
               in its blocks from there on, its slot, whether it is seeded, its position in the first step, how many
               modules have run over it and over the drafts before their own; its drafts; its block table
    reals      its temperature, and random numbers by position from the first step on: tokens, verdicts, drafts
    out        the tokens of each row, how many of them count, how many drafts were verified, the new drafts; both
               log-probabilities of the tokens

Padding rows have position −1: they attend to nothing and write to a scratch block. They belong to sequences with fewer
drafts than others or without free blocks, or to padding sequences. Tokens that a module ran in the step before, the
last token and the accepted drafts, have no row.

Shapes: B sequences, K drafts to verify, J = K + 1 rows, D drafts to make, S blocks, V vocabulary, W rows of a module, X
positions.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from m2forge.kernels.arithmetic import raised
from m2forge.model.transformer import Transformer
from m2forge.rollout.execution.sampler import tempered
from m2forge.rollout.kv.paged_plan import Bundle, PagedCache, PagedPlan
from m2forge.rollout.speculation.verify import Drafts, Verified, drafted, judged, judged_greedy

NUM_FIELDS = 8


class Network(Protocol):
    """The main model and its MTP modules over a paged cache."""

    def main(self, token_N: Tensor, plan: PagedPlan) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns hidden states, the LM head's input, and the chosen experts, if there are any."""
        ...

    def module(self, index: int, parent_ND: Tensor, token_N: Tensor, plan: PagedPlan) -> tuple[Tensor, Tensor]:
        """As `Transformer.run_module`."""
        ...


class Shape(NamedTuple):
    num_sequences: int
    num_drafts: int
    """Largest number of drafts that a sequence verifies."""
    depth: int
    """Number of drafts to make."""
    num_blocks: int
    is_greedy: bool
    """Whether all sequences sample greedily; otherwise none does."""
    num_steps: int
    """Largest number of steps that the random numbers suffice for."""

    @property
    def num_rows(self) -> int:
        return self.num_drafts + 1

    @property
    def num_integers(self) -> int:
        return NUM_FIELDS + self.num_drafts + self.num_blocks

    @property
    def num_uniforms(self) -> int:
        """Number of positions with random numbers."""
        return 0 if self.is_greedy else self.num_steps * self.num_rows

    @property
    def widths_of_reals(self) -> tuple[int, int, int, int]:
        """Widths of the temperature and of the random numbers for tokens, verdicts and drafts."""
        return 1, self.num_uniforms, self.num_uniforms, 0 if self.is_greedy else self.num_uniforms + self.depth

    @property
    def widths_of_output(self) -> tuple[int, int, int, int, int, int]:
        return self.num_rows, 1, 1, self.depth, self.num_rows, self.num_rows


class Step(Protocol):
    """A decode step: `Decoder`, or its CUDA counterpart in cuda_decode.py."""

    def step(self, shape: Shape, integers: Tensor, reals: Tensor) -> tuple[Tensor, Tensor | None]: ...


class Decoder:
    """`logq_SKV`: log-probabilities that drafts were sampled from, by slot; a step reads those of its drafts and writes
    those of the new ones."""

    def __init__(self, model: Transformer, network: Network, cache: PagedCache, logq_SKV: Tensor) -> None:
        self._model, self._network, self._cache, self._logq_SKV = model, network, cache, logq_SKV

    @torch.no_grad()
    def __call__(
        self, shape: Shape, integers: Tensor, reals: Tensor, num_steps: int = 1
    ) -> tuple[Tensor, Tensor | None]:
        """Returns `out` of every step, in float64, and the experts of all its rows, if there are any."""
        steps = [self.step(shape, integers, reals) for _ in range(num_steps)]
        experts = [chosen for _, chosen in steps if chosen is not None]
        return torch.stack([out for out, _ in steps]), torch.stack(experts) if experts else None

    @torch.no_grad()
    def step(self, shape: Shape, integers: Tensor, reals: Tensor) -> tuple[Tensor, Tensor | None]:
        """Runs one step; `integers` then holds the next step's inputs."""
        fields = integers[:, :NUM_FIELDS].clone().unbind(1)
        token_B, start_B, num_drafts_B, capacity_B, slot_B, seeded_B, first_B, num_run_B = fields
        draft_BK, table_BS = integers[:, NUM_FIELDS:].split((shape.num_drafts, shape.num_blocks), 1)
        draft_BK = draft_BK.clone()
        temperature_B1, *numbers = reals.split(shape.widths_of_reals, 1)
        is_free_B = (seeded_B == 0) & (temperature_B1[:, 0] > 0)
        row_J = torch.arange(shape.num_rows, device=integers.device)
        is_there_BJ = (row_J <= num_drafts_B[:, None]) & (row_J < capacity_B[:, None])
        plan = PagedPlan(self._cache, [Bundle(0, table_BS, torch.where(is_there_BJ, start_B[:, None] + row_J, -1))])
        state_ND, hidden_ND, experts = self._network.main(torch.cat((token_B[:, None], draft_BK), 1).flatten(), plan)
        if self._cache.num_modules:
            self._cache.write_states(0, plan, state_ND)
        raw_BJV = raised(self._model.logits(hidden_ND)).unflatten(0, (-1, shape.num_rows))
        logq_BKV = None if shape.is_greedy else self._logq_SKV[slot_B, : shape.num_drafts]
        drafts = Drafts(draft_BK, num_drafts_B, logq_BKV)
        if shape.is_greedy:
            drawn = judged_greedy(raw_BJV, raw_BJV, drafts)
        else:
            number_BJ, verdict_BJ = (_numbers(part, start_B - first_B, row_J) for part in numbers[:2])
            logp_RV = tempered(raw_BJV.flatten(0, 1), temperature_B1.repeat_interleave(shape.num_rows)).log_softmax(-1)
            drawn = judged(raw_BJV, logp_RV.view_as(raw_BJV), number_BJ, verdict_BJ, drafts, is_free_B)
        known = torch.cat((token_B[:, None], drawn.token_BJ), 1)
        for module in range(shape.depth):
            last_B = drawn.num_B + module
            # The module has already run over the last token and the drafts before its own; count the accepted ones
            # among them.
            num_done_B = torch.where(module < num_run_B, drawn.num_B.clamp(max=module + 1), 0)
            hidden_BD = self._run_module(module, known, drawn, start_B, capacity_B, table_BS, num_done_B, last_B)
            logits_BV = self._model.logits(hidden_BD)
            if shape.is_greedy:
                new_B = logits_BV.argmax(-1)
            else:
                logq_BV = tempered(raised(logits_BV), temperature_B1[:, 0]).log_softmax(-1)
                number_B = _numbers(numbers[2], start_B - first_B, last_B[:, None])[:, 0]
                new_B = drafted(logits_BV, logq_BV, number_B, is_free_B)
                self._logq_SKV[slot_B, module] = logq_BV
            known = torch.cat((known, new_B[:, None]), 1)
        new_BD = known[:, shape.num_rows + 1 :]
        capacity_B = (capacity_B - drawn.num_B).clamp(min=0)
        integers[:, 0] = known.gather(1, drawn.num_B[:, None])[:, 0]
        integers[:, 1] = start_B + drawn.num_B
        integers[:, 2] = torch.where(num_drafts_B < 0, -1, (capacity_B - 1).clamp(0, shape.depth))
        integers[:, 3] = capacity_B
        integers[:, 7] = integers[:, 2].clamp(0, shape.depth)
        integers[:, NUM_FIELDS : NUM_FIELDS + shape.depth] = new_BD
        counts = (drawn.token_BJ, drawn.num_B[:, None], num_drafts_B[:, None], new_BD)
        logprobs = (drawn.logprob_BJ, drawn.raw_logprob_BJ)
        return torch.cat([part.double() for part in (*counts, *logprobs)], 1), experts

    def _run_module(
        self,
        module: int,
        known: Tensor,
        drawn: Verified,
        start_B: Tensor,
        capacity_B: Tensor,
        table_BS: Tensor,
        num_done_B: Tensor,
        last_B: Tensor,
    ) -> Tensor:
        """Returns the LM head's input at the last row of each sequence. `known`: the previous token, those of all rows,
        and the new drafts. `num_done_B`: how many of these the module has already run over."""
        cache, num_rows = self._cache, drawn.token_BJ.shape[1]
        num_known, num_B1 = num_rows + 1 + module, drawn.num_B[:, None]
        which_BW = num_done_B[:, None] + torch.arange(num_known, device=known.device)
        is_there_BW = (which_BW <= last_B[:, None]) & (which_BW < capacity_B[:, None])
        position_BW = torch.where(is_there_BW, start_B[:, None] + which_BW, -1)
        plan = PagedPlan(cache, [Bundle(0, table_BS, position_BW)], self._model.config.num_layers + module)
        # The new drafts follow the last token that counts.
        at_BW = torch.where(which_BW <= num_B1, which_BW, which_BW - num_B1 + num_rows)
        token_BW = known.gather(1, at_BW.clamp(max=num_known - 1))
        parent_ND = cache.parent_states(module, plan)
        state_ND, hidden_ND = self._network.module(module, parent_ND, token_BW.flatten(), plan)
        if module + 1 < cache.num_modules:
            cache.write_states(module + 1, plan, state_ND)
        hidden_BWD = hidden_ND.unflatten(0, (-1, num_known))
        last_BD: Tensor = hidden_BWD[torch.arange(last_B.shape[0], device=known.device), last_B - num_done_B]
        return last_BD


def _numbers(number_BX: Tensor, offset_B: Tensor, row: Tensor) -> Tensor:
    """Random numbers of each sequence's rows; the sequence is `offset_B` positions past its first step's."""
    return number_BX.gather(1, (offset_B[:, None] + row).clamp(max=number_BX.shape[1] - 1))
