"""The plain computations that the engine must equal: a forward pass for every token, sampling rule by rule."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from m2forge.model.config import WindowConfig
from m2forge.model.plan import Attend, visible
from m2forge.model.transformer import Transformer
from m2forge.records import Sampling
from m2forge.rollout.execution.sampler import uniforms

Probabilities = npt.NDArray[np.float64]


class Behind:
    """Tokens behind others whose keys and values are given: the plainest cache there is."""

    def __init__(self, start: int, num_tokens: int, past: list[tuple[Tensor, Tensor]]) -> None:
        self.start, self.past, self.present = start, past, list[tuple[Tensor, Tensor]]()
        self.position_N = torch.arange(start, start + num_tokens)
        self.count_N: Tensor | None = None

    def bind(self, window: WindowConfig | None) -> Attend:
        end = self.start + len(self.position_N)
        mask = visible(end, window, self.start)
        seen = torch.ones(end, end).tril()[self.start :] > 0 if mask is None else mask

        def attend(q_NHK: Tensor, k_NGK: Tensor, v_NGK: Tensor) -> Tensor:
            if self.past:
                k_NGK, v_NGK = (
                    torch.cat(pair) for pair in zip(self.past[len(self.present)], (k_NGK, v_NGK), strict=True)
                )
            self.present.append((k_NGK, v_NGK))
            q, k, v = (x.transpose(0, 1) for x in (q_NHK, k_NGK, v_NGK))
            repeats = q.shape[0] // k.shape[0]
            k, v = k.repeat_interleave(repeats, 0), v.repeat_interleave(repeats, 0)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(0, 1)

        return attend

    def to_parent(self, x_ND: Tensor) -> Tensor:
        raise NotImplementedError


@torch.no_grad()
def all_logits(model: Transformer, ids: Sequence[int]) -> Tensor:
    """Behind each token, by one forward pass of the network as it is trained."""
    return model.logits(model(torch.tensor([ids]), with_mtp=False).hidden_ND)


@torch.no_grad()
def next_logits(weights: Sequence[Transformer], ids: Sequence[int], runs: Sequence[tuple[int, int]]) -> Tensor:
    """Logits behind `ids` where each part of them was computed by the weights that `runs` names."""
    past: list[tuple[Tensor, Tensor]] = []
    ends = [*(first for first, _ in runs[1:]), len(ids)]
    for (first, by), end in zip(runs, ends, strict=True):
        plan = Behind(first, end - first, past)
        hidden_ND = weights[by](torch.tensor(ids[first:end]), plan, with_mtp=False).hidden_ND
        past = plan.present
    return weights[runs[-1][1]].logits(hidden_ND[-1:])[0]


def plain_distribution(
    logits: Tensor, sampling: Sampling, prompt: Sequence[int], sampled: Sequence[int]
) -> Probabilities:
    """Probabilities by the rules, one at a time, in numpy."""
    x: Probabilities = logits.double().numpy().copy()
    for token in {*prompt, *sampled}:
        x[token] = x[token] / sampling.repetition_penalty if x[token] > 0 else x[token] * sampling.repetition_penalty
    for token in set(sampled):
        x[token] -= sampling.frequency_penalty * list(sampled).count(token) + sampling.presence_penalty
    if sampling.temperature == 0:
        greedy: Probabilities = np.eye(len(x))[int(x.argmax())]
        return greedy
    p: Probabilities = np.exp((x - x.max()) / sampling.temperature)
    p /= p.sum()
    order = sorted(range(len(p)), key=lambda token: (-p[token], token))
    order = [token for token in order if p[token] >= sampling.min_p * p.max()]
    order = order[: sampling.top_k or None]
    total, reached = sum(p[token] for token in order), 0.0
    kept: list[int] = []
    for token in order:
        if kept and reached >= sampling.top_p * total:
            break
        kept.append(token)
        reached += p[token]
    cut = np.zeros_like(p)
    cut[kept] = p[kept]
    cut /= cut.sum()
    return cut


def plain_pick(p: Probabilities, seed: int, sample: int, place: int) -> int:
    (u,) = uniforms([seed], [sample], [place])
    return next(token for token, reached in enumerate(np.cumsum(p)) if reached > u * p.sum())
