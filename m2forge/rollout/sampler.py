"""Logits in; a token of each row out, with its log-probability under what it was drawn from and under the bare softmax.

    x = logits                        raw: log softmax(x)
    x = penalised(x)                  repetition, then frequency and presence
    x = x / temperature               0: the likeliest token alone
    x = −∞ where cut off              min_p, then top_k, then top_p of what is left; ties go to the lower id
    drawn from softmax(x)             by inverse CDF in the order of the ids

The number that draws token t of sample s is a function of (seed, s, t) and of nothing else (Philox 4x32-10, a
counter-based generator), so neither batching nor preemption changes what is drawn.

Shapes: B rows, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from m2forge.kernels.precision import raised
from m2forge.records import Sampling

_LOW = np.uint64(0xFFFFFFFF)
_WORD = np.uint64(32)
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_NUM_ROUNDS = 10

Words = tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64], npt.NDArray[np.uint64], npt.NDArray[np.uint64]]


@dataclass(frozen=True, slots=True)
class Row:
    """How the next token of one sequence is drawn."""

    sampling: Sampling
    seed: int
    sample: int
    place: int
    """Tokens drawn before it."""
    prompt_ids: Sequence[int] = ()
    """This and the next are looked at only where there are penalties."""
    sampled_ids: Sequence[int] = ()


class Drawn(NamedTuple):
    token_B: Tensor
    logprob_B: Tensor
    raw_logprob_B: Tensor


@torch.no_grad()
def draw(logits_BV: Tensor, rows: Sequence[Row]) -> Drawn:
    raw_BV = raised(logits_BV)
    x_BV = penalised(raw_BV, rows)
    if all(row.sampling.temperature == 0 for row in rows):
        token_B = x_BV.argmax(-1)
        logprob_B = torch.zeros_like(x_BV[:, 0])
    else:
        logprob_BV = distribution(x_BV, rows)
        uniform = uniforms([row.seed for row in rows], [row.sample for row in rows], [row.place for row in rows])
        token_B = pick(logprob_BV, torch.from_numpy(uniform).to(logits_BV.device))
        logprob_B = _at(logprob_BV, token_B)
    return Drawn(token_B, logprob_B, _at(raw_BV, token_B) - raw_BV.logsumexp(-1))


def penalised(x_BV: Tensor, rows: Sequence[Row]) -> Tensor:
    places = [place for place, row in enumerate(rows) if row.sampling.is_penalised]
    if not places:
        return x_BV
    x_BV, vocab_size = x_BV.clone(), x_BV.shape[1]
    for place in places:
        sampling, x_V = rows[place].sampling, x_BV[place]
        # In the precision of the logits: an integer times a number of Python's would be float32.
        count_V = _counts(rows[place].sampled_ids, vocab_size).to(x_V)
        is_there_V = (count_V > 0) | (_counts(rows[place].prompt_ids, vocab_size).to(x_V.device) > 0)
        repelled_V = torch.where(x_V > 0, x_V / sampling.repetition_penalty, x_V * sampling.repetition_penalty)
        x_V = torch.where(is_there_V, repelled_V, x_V)
        x_V = x_V - sampling.frequency_penalty * count_V - sampling.presence_penalty * (count_V > 0).to(x_V)
        x_BV[place] = x_V
    return x_BV


def distribution(x_BV: Tensor, rows: Sequence[Row]) -> Tensor:
    """Log-probability of every token under what it is drawn from, −∞ where it is cut off; of penalised logits."""
    temperature_B = x_BV.new_tensor([row.sampling.temperature or 1.0 for row in rows])
    temperature_B = temperature_B.clamp(min=torch.finfo(x_BV.dtype).tiny)
    # Less their largest first: then no temperature, however low, makes the likeliest token's infinite.
    x_BV = (x_BV - x_BV.amax(-1, keepdim=True)) / temperature_B[:, None]
    cut = [place for place, row in enumerate(rows) if _is_cut(row.sampling)]
    if cut:
        cut_C = torch.tensor(cut, device=x_BV.device)
        kept_CV = kept(x_BV[cut_C], [rows[place].sampling for place in cut])
        x_BV = x_BV.index_put((cut_C,), x_BV[cut_C].masked_fill(~kept_CV, -torch.inf))
    return x_BV.log_softmax(-1)


def kept(x_BV: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Which tokens may be drawn: each rule keeps the first few in order of probability, and so do all together."""
    vocab_size = x_BV.shape[1]
    sorted_BV, order_BV = x_BV.sort(stable=True, dim=-1, descending=True)
    rank_V = torch.arange(vocab_size, device=x_BV.device)
    most_B = x_BV.new_tensor([1 if s.temperature == 0 else min(s.top_k or vocab_size, vocab_size) for s in samplings])
    min_p_B, top_p_B = (x_BV.new_tensor([getattr(s, name) for s in samplings]) for name in ("min_p", "top_p"))
    likely_BV = sorted_BV >= sorted_BV[:, :1] + min_p_B.log()[:, None]
    keep_BV = likely_BV & (rank_V < most_B[:, None])
    share_BV = sorted_BV.masked_fill(~keep_BV, -torch.inf).softmax(-1)
    keep_BV &= share_BV.cumsum(-1) - share_BV < top_p_B[:, None]
    keep_BV[:, 0] = True
    return torch.zeros_like(keep_BV).scatter(1, order_BV, keep_BV)


def pick(logprob_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """The first token, in order of the ids, at which the cumulated probability exceeds the number. In float64, whose
    steps are far below any probability that matters; the total is what rounding makes it, and so is never missed."""
    cumulated_BV = logprob_BV.double().exp().cumsum(-1)
    threshold_B = uniform_B * cumulated_BV[:, -1]
    token_B = torch.searchsorted(cumulated_BV, threshold_B[:, None], right=True)[:, 0]
    # Only logits that are no numbers get past the last id.
    return token_B.clamp(max=logprob_BV.shape[1] - 1)


def uniforms(seeds: Sequence[int], samples: Sequence[int], places: Sequence[int]) -> npt.NDArray[np.float64]:
    """Numbers in [0, 1) of 52 bits: times any total, they stay below it."""
    seed_B = np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], np.uint64)
    place_B, sample_B = np.array(places, np.uint64), np.array(samples, np.uint64)
    counter = (place_B & _LOW, place_B >> _WORD, sample_B, np.zeros_like(place_B))
    low_B, high_B, _, _ = philox(counter, (seed_B & _LOW, seed_B >> _WORD))
    return ((high_B << _WORD | low_B) >> np.uint64(12)).astype(np.float64) * 2.0**-52


def philox(counter: Words, key: tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]) -> Words:
    """Philox 4x32-10 (Salmon et al. 2011) of many counters at once; words of 32 bits in 64."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_NUM_ROUNDS):
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (second >> _WORD) ^ c1 ^ k0, second & _LOW, (first >> _WORD) ^ c3 ^ k1, first & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def _is_cut(sampling: Sampling) -> bool:
    return sampling.temperature == 0 or sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0


def _counts(ids: Sequence[int], vocab_size: int) -> Tensor:
    return torch.from_numpy(np.bincount(np.asarray(ids, np.int64), minlength=vocab_size))


def _at(x_BV: Tensor, token_B: Tensor) -> Tensor:
    return x_BV.gather(1, token_B[:, None])[:, 0]
