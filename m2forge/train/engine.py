"""The train engine: packs in, one optimizer step, metrics out.

    loss over the packs (exact mean over all their targets) → gradients → clip → update → router biases

The engine holds the network and its optimizer and knows nothing of corpora, phases or files. Metrics come back as one
tensor still on its way from the device, so that reading them need not stop it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from m2forge.model.router import max_violation
from m2forge.model.transformer import Output, Transformer
from m2forge.records import Pack
from m2forge.train.batch import Batch, make_batch, num_targets
from m2forge.train.config import OptimizerConfig
from m2forge.train.loss.next_token import NextTokenLoss, draft_agreement, next_token_loss
from m2forge.train.optimizer import Norms, Optimizer


class PendingMetrics:
    """Figures of one step. `read` waits for the device if it has not finished the step."""

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        self._names = tuple(values)
        stacked = torch.stack([value.detach().double() for value in values.values()])
        self._values = stacked.to("cpu", non_blocking=True)
        self._done = torch.cuda.Event() if stacked.is_cuda else None
        if self._done is not None:
            self._done.record()

    def read(self) -> dict[str, float]:
        """A tag that no target had is left out."""
        if self._done is not None:
            self._done.synchronize()
        values = dict(zip(self._names, self._values.tolist(), strict=True))
        return {name: value for name, value in values.items() if not (name.startswith("loss/") and math.isnan(value))}


@dataclass
class _Sums:
    """What the packs of a step add up."""

    nll_T: Tensor
    """Loss per tag."""
    edges_T: Tensor
    mtp: list[Tensor]
    load_LE: Tensor | None
    agreement: list[Tensor]


class TrainEngine:
    def __init__(self, model: Transformer, config: OptimizerConfig, tag_names: Sequence[str] = ()) -> None:
        self.model = model
        self.optimizer = Optimizer(model, config)
        self.tag_names = tuple(tag_names)
        """What `Pack.tags` index into, for metrics."""

    @property
    def device(self) -> torch.device:
        return self.model.embedding.weight.device

    def step(
        self, packs: Sequence[Pack], *, rate: float, mtp_weight: float = 0.0, measure_agreement: bool = False
    ) -> PendingMetrics:
        """One optimizer step over all targets of `packs`, each counting alike."""
        num_edges = sum(num_targets(pack) for pack in packs)
        sums = self._empty_sums()
        for pack in packs:
            batch = make_batch(pack, self.device)
            output = self.model(batch.tokens_N, batch.plan)
            loss = next_token_loss(
                self.model,
                output,
                batch,
                num_edges=num_edges,
                mtp_weight=mtp_weight,
                pack_share=pack.tokens.size / sum(other.tokens.size for other in packs),
            )
            if loss.total.requires_grad:
                loss.total.backward()
            if len(packs) > 1:
                self.optimizer.collect()
            self._add(sums, batch, output, loss)
            if measure_agreement and pack is packs[-1]:
                sums.agreement = draft_agreement(self.model, output, batch)
        norms = self.optimizer.step(rate)
        if sums.load_LE is not None:
            # A load of nothing moves no bias: a step that is skipped is skipped whole, without asking the device.
            self.model.update_router_biases(sums.load_LE * norms.overall.isfinite())
        return PendingMetrics(self._metrics(sums, norms, num_edges))

    def _empty_sums(self) -> _Sums:
        zeros_T = torch.zeros(max(1, len(self.tag_names)), dtype=torch.float64, device=self.device)
        return _Sums(zeros_T, zeros_T.clone(), [zeros_T.new_zeros(()) for _ in self.model.mtp], None, [])

    def _add(self, sums: _Sums, batch: Batch, output: Output, loss: NextTokenLoss) -> None:
        tag_M = batch.tag_M if self.tag_names else torch.zeros_like(batch.tag_M)
        # One row per tag rather than a scatter: sums in a fixed order give the same bits each time.
        is_tag_TM = tag_M == torch.arange(sums.nll_T.shape[0], device=tag_M.device)[:, None]
        sums.nll_T += is_tag_TM.double() @ loss.nll_M.double()
        sums.edges_T += is_tag_TM.sum(-1)
        for total, mtp_sum in zip(sums.mtp, loss.mtp_sums, strict=True):
            total += mtp_sum
        if output.load_LE is not None:
            sums.load_LE = output.load_LE if sums.load_LE is None else sums.load_LE + output.load_LE

    def _metrics(self, sums: _Sums, norms: Norms, num_edges: int) -> dict[str, Tensor]:
        edges = max(1, num_edges)
        metrics = {"loss": sums.nll_T.sum() / edges, "grad_norm": norms.overall}
        for index, name in enumerate(self.tag_names):
            metrics[f"loss/{name}"] = sums.nll_T[index] / sums.edges_T[index]
        for depth, total in enumerate(sums.mtp, start=1):
            metrics[f"mtp_loss/{depth}"] = total / edges
        for depth, share in enumerate(sums.agreement, start=1):
            metrics[f"draft_agreement/{depth}"] = share
        for layer, norm in norms.by_layer.items():
            metrics[f"grad_norm/{layer}"] = norm
        if sums.load_LE is not None:
            violation_L = max_violation(sums.load_LE)
            metrics["max_vio"] = violation_L.mean()
            share_LE = sums.load_LE.double() / sums.load_LE.sum(-1, keepdim=True).clamp(min=1)
            for index, share_E in enumerate(share_LE):
                metrics[f"expert_load_max/{index}"] = share_E.max()
                metrics[f"expert_load_min/{index}"] = share_E.min()
        return metrics
