"""The train engine: packs or token trees in, one optimizer step, metrics out.

    step_rows   packs of documents: exact mean of the language-model loss over all their targets
    eval_rows   packs of documents: the same loss without gradient and without update
    step        token trees with advantages: exact weighted mean of the policy loss over all their loss edges

    packs → loss divided by the step's denominator → accumulated gradients → clip → update → router biases

Denominators and expert loads cover the whole step, all packs and all ranks, so the update does not depend on how a step
is split over them. The engine holds the model and its optimizer and knows nothing of corpora, rewards, phases or files.
Metrics are returned as one tensor whose copy to the host is asynchronous, so a step needs no host sync.
"""

# Reading path: train. A training step over trees.
# The files that run, in reading order; dev/paths.py compares this list with a trace:
#     train/engine.py             the step: packs, forward and backward, update, report
#     tree/token_tree.py          a group's calls as one tree
#     train/batch.py              samples that cannot be trained; a pack's tensors
#     train/config.py             the loss and its limits
#     tree/pack.py                trees cut and packed into micro-batches
#     tree/flat.py                a pack in depth-first order, with its loss edges
#     model/plan.py               the attention mask of a pack
#     model/transformer.py        the network and its MTP modules
#     model/rotary.py             cos and sin of the rotary embedding
#     model/config.py             its sizes
#     kernels/arithmetic.py       precision, and the C kernels of a CPU
#     kernels/pointwise.py        norm, rotary embedding, gate
#     kernels/linear.py           matrix products
#     kernels/tree_attention.py   attention over a tree
#     kernels/expert.py           the experts
#     train/loss/policy.py        the policy loss at an edge
#     kernels/head_loss.py        head, logprobs and their gradient, chunk by chunk
#     train/loss/mtp.py           the loss of the MTP modules
#     train/optimizer.py          clipping, AdamW and Muon
#     kernels/adamw.py            the AdamW update
#     train/parallel.py           sums over ranks, and shards
#     train/step_metrics.py       the step's metrics and logprobs

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Literal, TypeAlias, TypeVar

import torch
from torch import Tensor

from m2forge.kernels.arithmetic import at_least_float32
from m2forge.model.path import PathPlan
from m2forge.model.plan import AttentionPlan
from m2forge.model.transformer import Output, Transformer, aux_loss, max_violation
from m2forge.records import FloatArray, Pack
from m2forge.train.batch import (
    Batch,
    BatchT,
    MicroBatches,
    Problem,
    TreeBatch,
    WholePack,
    blank_batch,
    blank_tree_batch,
    bucket_length,
    make_batch,
    make_tree_batch,
    num_replayed,
    num_targets,
    refuse_untrainable,
    replayable,
)
from m2forge.train.config import MTPLoss, OptimizerConfig, PolicyConfig, RouterBias, WalkConfig
from m2forge.train.context_parallel import ContextGroup, ContextPlan
from m2forge.train.loss.next_token import draft_agreement, next_token_loss
from m2forge.train.loss.policy import policy_loss
from m2forge.train.optimizer import Norms, Optimizer
from m2forge.train.parallel import SINGLE_RANK, Ranks, sharded_modules
from m2forge.train.step_metrics import PolicySums, RowSums, StepCounts, TokenLogprobs
from m2forge.train.walk import RowSegments, TreeSegments, TreeWalk, Walk
from m2forge.tree.flat import FlatTree
from m2forge.tree.pack import pack_trees
from m2forge.tree.token_tree import Sample, TokenTree


class PendingMetrics:
    """Metrics of one step. `read` waits for the device if it has not finished the step."""

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        self._names = tuple(values)
        stacked = torch.stack([value.detach().double() for value in values.values()]) if values else torch.empty(0)
        self._values = stacked.to("cpu", non_blocking=True)
        self._done = torch.cuda.Event() if stacked.is_cuda else None
        if self._done is not None:
            self._done.record()

    def read(self) -> dict[str, float]:
        """The metrics by name; the loss of a tag without targets is omitted."""
        if self._done is not None:
            self._done.synchronize()
        values = dict(zip(self._names, self._values.tolist(), strict=True))
        return {name: value for name, value in values.items() if not (name.startswith("loss/") and math.isnan(value))}


class StepReport(PendingMetrics):
    """Result of a step over trees."""

    def __init__(
        self,
        values: Mapping[str, Tensor],
        known: Mapping[str, float],
        problems: tuple[Problem, ...],
        logprobs: TokenLogprobs,
    ) -> None:
        """`known`: metrics known on the host. `logprobs`: copied before `values`, so complete when they are."""
        super().__init__(values)
        self._logprobs = logprobs
        self._known = dict(known)
        self.problems = problems
        """Refused samples; the group of each problem is the index of its tree."""
        self.is_empty = not values
        """Nothing was trainable on any rank: no weight, moment or bias has changed."""

    def read(self) -> dict[str, float]:
        return super().read() | self._known

    def logprobs(self) -> list[tuple[Sample, FloatArray]]:
        """Logprobs of the trained tokens, by sample, under the policy before the update. Waits like `read`."""
        super().read()
        return self._logprobs.read()


MIN_BUCKET = 128
"""Segments of a walk are padded by at most an eighth, or to a multiple of this."""
_PackT = TypeVar("_PackT")
_ToRun: TypeAlias = Sequence[MicroBatches[Batch]] | Sequence[MicroBatches[TreeBatch]]


@dataclass(frozen=True)
class _StepTotals:
    """What the backward pass of one batch needs to know about all batches of its step."""

    num_batches: int
    """Batches of this rank, blank ones included."""
    num_tokens: float
    """Input tokens of all ranks, each counted as often as samples contain it."""
    load_LE: Tensor | None = None
    """Expert loads of all batches and ranks, for the balance loss; None: the only batch's own loads are all."""


class TrainEngine:
    def __init__(
        self,
        model: Transformer,
        config: OptimizerConfig,
        tag_names: Sequence[str] = (),
        ranks: Ranks = SINGLE_RANK,
        policy: PolicyConfig | None = None,
        offload: Literal["none", "host"] = "none",
        router_bias: RouterBias = "frozen",
        walk: WalkConfig | None = None,
        context: ContextGroup | None = None,
    ) -> None:
        """`walk`: run packs segment by segment. `context`: the ranks that pass the same packs or trees to a step, and
        train a part of each."""
        self.model, self.ranks, self.router_bias, self.walk = model, ranks, router_bias, walk
        self.context = context
        self.optimizer = Optimizer(model, config, ranks, offload)
        self.tag_names = tuple(tag_names)
        """Names that `Pack.tags` index into, for metrics."""
        self.policy = policy or PolicyConfig()
        self._num_backward = 0
        """Backward passes of the current step."""
        self.before_update: set[Callable[[], None]] = set()
        """Called between the backward pass and the update: threads may still be reading weights and moments."""

    @property
    def device(self) -> torch.device:
        return self.model.embedding.weight.device

    @property
    def pads(self) -> bool:
        """Whether packs are padded to few lengths, to limit recompilation on CUDA. A CPU is faster on short packs."""
        return self.device.type == "cuda"

    # -- rows ---------------------------------------------------------------------------------------------------------

    def step_rows(
        self,
        packs: Sequence[Pack],
        *,
        lr: float,
        pack_tokens: int | None = None,
        mtp_weight: float = 0.0,
        mtp_loss: MTPLoss = "ce",
        mtp_top_k: int = 32,
        measure_agreement: bool = False,
    ) -> PendingMetrics:
        """Run one optimizer step over all targets of `packs`, equally weighted. Each rank passes its own packs.
        `pack_tokens`: maximum tokens per pack, and the length to pad to where this engine pads."""
        num_edges, num_tokens = self._totals(
            sum(num_targets(pack) for pack in packs), sum(pack.tokens.size for pack in packs)
        )
        sums = RowSums(self.tag_names, len(self.model.mtp), self.device)
        to_run = [self._row_batches(pack, pack_tokens) for pack in self._begin(packs)]
        to_run += [self._row_batches(None, None)] * self._num_missing(to_run)
        totals = self._step_totals(to_run, num_tokens)
        most_edges = 0

        def train(batch: Batch) -> Tensor | None:
            """Run one batch forward and backward; its output is freed when this returns, before the next one starts."""
            nonlocal most_edges
            batch = self._part(batch)
            output = self._run_rows(batch)
            found = next_token_loss(
                self.model,
                output,
                batch,
                num_edges=num_edges,
                mtp_weight=mtp_weight,
                mtp_loss=mtp_loss,
                mtp_top_k=mtp_top_k,
            )
            sums.add(batch, found)
            num_here, is_last = batch.position_M.shape[0], sums.num_packs == len(packs)
            if measure_agreement and (is_last if self.walk is None else num_here > most_edges):
                # Of a walk, the batch with the most edges: the last one may have none.
                sums.agreement, most_edges = draft_agreement(self.model, output, batch), num_here
            self._backward(found.total, output, batch.plan, totals)
            return output.load_LE

        load_LE = self._sum_loads(train(batch) for micro in to_run for batch in micro.batches())
        norms = self._update(load_LE, lr)
        return PendingMetrics(sums.figures(num_edges, self.ranks) | _shared_figures(norms, load_LE))

    @torch.no_grad()
    def eval_rows(
        self,
        packs: Iterable[Pack],
        *,
        tag_names: Sequence[str] = (),
        pack_tokens: int | None = None,
        mtp_loss: MTPLoss = "ce",
        mtp_top_k: int = 32,
    ) -> dict[str, float]:
        """The loss of `packs`, as `step_rows` computes it. Every rank passes all packs and runs its share of them.

        The figures have the same bits on any number of ranks that do not share packs: each pack's sums are computed by
        one rank alone, and their total is rounded once.
        """
        blank, index = RowSums(tag_names, len(self.model.mtp), self.device), self.ranks.rank // self._num_sharing
        sums_PW: list[Tensor] = []

        def add(batch: Batch) -> None:
            """Run one batch; its output is freed when this returns, before the next one starts."""
            batch = self._part(batch)
            output = self._run_rows(batch)
            found = next_token_loss(
                self.model, output, batch, num_edges=1.0, mtp_weight=0.0, mtp_loss=mtp_loss, mtp_top_k=mtp_top_k
            )
            mine.add(batch, found)

        for group in _groups(packs, self.ranks.num_ranks // self._num_sharing):
            mine = RowSums(tag_names, len(self.model.mtp), self.device)
            to_run = [self._row_batches(group[index] if index < len(group) else None, pack_tokens)]
            # All ranks run as many forward passes per group, because a sharded model communicates in them.
            to_run += [self._row_batches(None, None)] * self._num_missing(to_run)
            for micro in to_run:
                for batch in micro.sweep():
                    add(batch)
            sums_PW += [mine.sums() if number == index else blank.sums() for number in range(len(group))]
        # Frees the weights that FSDP gathered, as the end of a step does.
        self.optimizer.reshard()
        if not sums_PW:
            return {}
        columns = self.ranks.sum(torch.stack(sums_PW)).T.tolist()
        total_W = torch.tensor([math.fsum(column) for column in columns], dtype=torch.float64)
        return PendingMetrics(blank.figures_of(total_W)).read()

    def _row_batches(self, pack: Pack | None, pack_tokens: int | None) -> MicroBatches[Batch]:
        walk, length = self.walk, pack_tokens if self.pads else None
        if walk is None or pack is None:
            return WholePack(partial(self._row_batch, pack, length), self._run_row_part)
        length = None if length is None else min(length, walk.segment_tokens)
        segments = RowSegments(pack, self.device, walk.segment_tokens, length, self._num_sharing)
        return Walk(segments, self._run_row_part, walk)

    def _run_row_part(self, batch: Batch) -> Output:
        return self._run_rows(self._part(batch))

    def _run_rows(self, batch: Batch) -> Output:
        output: Output = self.model(batch.tokens_N, batch.plan)
        return output

    def _row_batch(self, pack: Pack | None, length: int | None) -> Batch:
        if pack is None:
            return blank_batch(self.device)
        if pack.tokens.size < self._num_sharing:
            length = self._num_sharing
        return make_batch(pack, self.device, length)

    # -- trees --------------------------------------------------------------------------------------------------------

    def step(self, trees: Sequence[TokenTree], *, lr: float, version: int | None = None) -> StepReport:
        """Run one optimizer step over all loss edges of `trees`. Untrainable samples are refused and reported by name;
        the rest is trained. Each rank passes its own trees. `version`: the current policy version, to measure
        staleness."""
        trainable, problems = refuse_untrainable(trees, self.model.config, self.policy)
        packs = self._packs(trainable)
        counts = StepCounts(
            *self._totals(
                sum(float(pack.weight_S[pack.edge_sample_M].sum()) for pack in packs),
                sum(pack.num_edges for pack in packs),
                sum(pack.num_input_tokens for pack in packs),
                sum(pack.num_tokens for pack in packs),
                sum(num_replayed(pack) for pack in packs),
            )
        )
        if not counts.num_edges:
            return StepReport({}, _token_figures(counts), problems, TokenLogprobs((), (), ()))
        sums = PolicySums(self.policy, self._num_drafts(), self.device, version)
        to_run = [self._tree_batches(pack, counts.weight) for pack in self._begin(packs)]
        to_run += [self._tree_batches(None, counts.weight)] * self._num_missing(to_run)
        totals = self._step_totals(to_run, counts.num_input_tokens)

        def train(batch: TreeBatch) -> Tensor | None:
            """Run one batch forward and backward; its output is freed when this returns, before the next one starts."""
            batch = self._part(batch)
            output = self._run_trees(batch)
            found = policy_loss(self.model, output, batch, self.policy)
            sums.add(batch, found)
            if self.context is not None:
                sums.logp[-1] = self.context.join_edges(sums.logp[-1], batch.plan)
            self._backward(found.total, output, batch.plan, totals)
            return output.load_LE

        def train_pack(micro: MicroBatches[TreeBatch]) -> Iterator[Tensor | None]:
            num_before = len(sums.logp)
            yield from map(train, micro.batches())
            if isinstance(micro, TreeWalk):
                sums.logp[num_before:] = [micro.in_pack_order(sums.logp[num_before:])]

        load_LE = self._sum_loads(load_LE for micro in to_run for load_LE in train_pack(micro))
        norms = self._update(load_LE, lr)
        logprobs = TokenLogprobs(trainable, packs, sums.logp)
        figures = sums.figures(counts, self.ranks) | _shared_figures(norms, load_LE)
        return StepReport(figures, _token_figures(counts), problems, logprobs)

    def _packs(self, trees: Sequence[TokenTree]) -> list[FlatTree]:
        if self.policy.replay == "none":
            return pack_trees(trees, self.policy.pack_tokens, with_experts=False)
        return [replayable(pack, self.model.config) for pack in pack_trees(trees, self.policy.pack_tokens)]

    @property
    def _precision(self) -> torch.dtype:
        return at_least_float32(self.model.embedding.weight.dtype)

    def _num_drafts(self) -> int:
        return len(self.model.mtp) if self.policy.mtp_weight else 0

    def _tree_batches(self, pack: FlatTree | None, total_weight: float) -> MicroBatches[TreeBatch]:
        make = partial(self._tree_batch, total_weight=total_weight)
        if self.walk is None or pack is None:
            return WholePack(partial(make, pack), self._run_tree_part)
        return TreeWalk(TreeSegments(pack, make, self.walk.segment_tokens), self._run_tree_part, self.walk)

    def _tree_batch(self, pack: FlatTree | None, total_weight: float) -> TreeBatch:
        if pack is None:
            return blank_tree_batch(self.device, self._precision)
        bucket, most = self.policy.bucket_tokens, self.policy.pack_tokens
        if self.walk is not None:
            most = min(most, self.walk.segment_tokens)
            # Branches cut a path into many short segments, which a bucket of padding each would multiply.
            bucket = min(bucket, max(MIN_BUCKET, (1 << (pack.num_tokens - 1).bit_length()) // 8))
        length = bucket_length(pack.num_tokens, bucket, most) if self.pads else pack.num_tokens
        return make_tree_batch(
            pack,
            self.device,
            self.policy,
            total_weight=total_weight,
            dtype=self._precision,
            length=max(length, self._num_sharing),
        )

    def _run_tree_part(self, batch: TreeBatch) -> Output:
        return self._run_trees(self._part(batch))

    def _run_trees(self, batch: TreeBatch) -> Output:
        output: Output = self.model(
            batch.tokens_N,
            batch.plan,
            with_mtp=self._num_drafts() > 0,
            mtp_gradient=self.policy.mtp_gradient,
            experts_NLK=batch.experts_NLK,
        )
        return output

    # -- what both share ----------------------------------------------------------------------------------------------

    def _totals(self, *values: float) -> list[float]:
        """Each value summed over the ranks; of ranks that share their packs, over one."""
        totals = self.ranks.sum(torch.tensor(values, dtype=torch.float64))
        once: list[float] = (totals / self._num_sharing).tolist()
        return once

    @property
    def _num_sharing(self) -> int:
        """Number of ranks that train a pack together."""
        return 1 if self.context is None else self.context.size

    def _part(self, batch: BatchT) -> BatchT:
        """What this rank trains of a batch; of a blank one, all."""
        is_shared = self.context is not None and batch.tokens_N.shape[0] >= self.context.size
        return self.context.split(batch) if self.context is not None and is_shared else batch

    def _begin(self, packs: Sequence[_PackT]) -> list[_PackT | None]:
        """Discard old gradients; returns the micro-batches of the step. A rank with fewer packs than another runs blank
        ones (None) in addition, because each backward pass communicates."""
        self.optimizer.clear()
        self._num_backward = 0
        self.model.freeze_learnt_biases(self.router_bias == "frozen")
        return [*packs, *[None] * (self.ranks.max_int(len(packs)) - len(packs))]

    @property
    def _walks_in_step(self) -> bool:
        """Whether ranks that shard a model walk: all must run forward, and backward, at the same time."""
        return self.walk is not None and bool(sharded_modules(self.model))

    def _num_missing(self, to_run: _ToRun) -> int:
        """Number of blank batches that this rank runs in addition, because another rank has more segments."""
        num_batches = sum(micro.num_batches for micro in to_run)
        return self.ranks.max_int(num_batches) - num_batches if self._walks_in_step else 0

    def _step_totals(self, to_run: _ToRun, num_tokens: float) -> _StepTotals:
        """Runs all packs forward first if the balance loss needs the loads of several batches, or other ranks do so."""
        moe, num_batches = self.model.config.moe, sum(micro.num_batches for micro in to_run)
        is_alone = num_batches == 1 and self.ranks.num_ranks == 1
        balances = moe is not None and moe.aux_loss_weight > 0 and not is_alone
        if not balances and not self._walks_in_step:
            return _StepTotals(num_batches, num_tokens)
        with torch.no_grad():
            loads = (load_LE for micro in to_run for load_LE in micro.loads())
            return _StepTotals(num_batches, num_tokens, self._sum_loads(loads))

    def _backward(self, loss: Tensor, output: Output, plan: AttentionPlan, totals: _StepTotals) -> None:
        """Accumulate the gradients of one batch: those of its share of the loss and of the balance loss, and in a walk
        those that the segments below it have found."""
        moe, local_LE = self.model.config.moe, output.load_LE
        if moe is not None and local_LE is not None and output.affinity_LE is not None:
            load_LE = local_LE if totals.load_LE is None else totals.load_LE
            loss = loss + moe.aux_loss_weight * aux_loss(load_LE, output.affinity_LE, int(totals.num_tokens))
        whole = plan.whole if isinstance(plan, ContextPlan) else plan
        states, grads = whole.roots() if isinstance(whole, PathPlan) else ([], [])
        self._num_backward += 1
        self.optimizer.add_up_replicas(is_last=self._num_backward == totals.num_batches)
        if loss.requires_grad:
            torch.autograd.backward([loss, *states], [None, *grads])
        if totals.num_batches > 1:
            self.optimizer.collect()

    def _sum_loads(self, loads: Iterable[Tensor | None]) -> Tensor | None:
        """Expert loads summed over packs and ranks; None if the model has no experts."""
        total_LE: Tensor | None = None
        for load_LE in loads:
            if load_LE is not None:
                total_LE = load_LE if total_LE is None else total_LE + load_LE
        return None if total_LE is None else self.ranks.sum(total_LE)

    def _update(self, load_LE: Tensor | None, lr: float) -> Norms:
        if not 0 <= lr < math.inf:
            raise ValueError(f"learning rate {lr}: expected a finite number, 0 or above")
        for wait in self.before_update:
            wait()
        norms = self.optimizer.step(lr)
        if load_LE is not None and self.router_bias == "balanced":
            # Zero loads move no bias: a step with non-finite gradients is skipped entirely, without a host sync.
            self.model.update_router_biases(load_LE * norms.overall.isfinite())
        return norms


def _groups(packs: Iterable[Pack], size: int) -> Iterator[list[Pack]]:
    left = iter(packs)
    while group := list(islice(left, size)):
        yield group


def _token_figures(counts: StepCounts) -> dict[str, float]:
    return {
        "num_edges": counts.num_edges,
        "tokens_computed": counts.num_tokens,
        "tokens_saved": counts.num_input_tokens - counts.num_tokens,
        "token_ratio": counts.num_input_tokens / max(1.0, counts.num_tokens),
        "replayed_share": counts.num_replayed / max(1.0, counts.num_tokens),
    }


def _shared_figures(norms: Norms, load_LE: Tensor | None) -> dict[str, Tensor]:
    figures = {"grad_norm": norms.overall}
    for layer, norm in norms.by_layer.items():
        figures[f"grad_norm/{layer}"] = norm
    if load_LE is not None:
        violation_L = max_violation(load_LE)
        figures["max_vio"] = violation_L.mean()
        share_LE = load_LE.double() / load_LE.sum(-1, keepdim=True).clamp(min=1)
        for index, share_E in enumerate(share_LE):
            figures[f"max_vio/{index}"] = violation_L[index]
            figures[f"expert_load_max/{index}"] = share_E.max()
            figures[f"expert_load_min/{index}"] = share_E.min()
    return figures
