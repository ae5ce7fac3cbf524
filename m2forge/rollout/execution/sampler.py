"""Logits in; one sampled token per row out, with its logprob under the sampling distribution and under the raw softmax.

    x = logits                        raw: log softmax(x)
    x = penalised(x)                  repetition, then frequency and presence
    x = x / temperature               0: argmax
    x = −∞ where truncated            min_p, then top_k, then top_p of what is left; ties go to the lower id
    sampled from softmax(x)           by inverse CDF in the order of the ids

The random number for token t of sample s is a function of (seed, s, t) alone (Philox 4x32-10, a counter-based
generator), so neither batching nor preemption changes what is sampled. Drafts and their verification
(speculation/verify.py) use separate streams of random numbers.

Shapes: B rows, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from m2forge.kernels.arithmetic import raised
from m2forge.kernels.greedy import greedy
from m2forge.records import Sampling

_LOW = np.uint64(0xFFFFFFFF)
_WORD = np.uint64(32)
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_NUM_ROUNDS = 10

Stream = Literal["token", "draft", "verdict"]
_STREAMS: tuple[Stream, ...] = ("token", "draft", "verdict")

Words = tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64], npt.NDArray[np.uint64], npt.NDArray[np.uint64]]


@dataclass(frozen=True, slots=True)
class Row:
    """How the next token of one sequence is sampled."""

    sampling: Sampling
    seed: int
    sample: int
    index: int
    """Number of tokens sampled before it."""
    prompt_ids: Sequence[int] = ()
    """Read, like `sampled_ids`, only if there are penalties."""
    sampled_ids: Sequence[int] = ()
    is_seeded: bool = False
    """Whether the request gave a seed: then a draft must not change the token."""


class Drawn(NamedTuple):
    token_B: Tensor
    logprob_B: Tensor
    raw_logprob_B: Tensor


@torch.no_grad()
def draw(logits_BV: Tensor, rows: Sequence[Row]) -> Drawn:
    if all(row.sampling.temperature == 0 and not row.sampling.is_penalised for row in rows):
        token_B, raw_logprob_B = greedy(logits_BV)
        return Drawn(token_B, torch.zeros_like(raw_logprob_B), raw_logprob_B)
    raw_BV = raised(logits_BV)
    x_BV = penalised(raw_BV, rows)
    if all(row.sampling.temperature == 0 for row in rows):
        token_B = x_BV.argmax(-1)
        logprob_B = torch.zeros_like(x_BV[:, 0])
    else:
        logprob_BV = distribution(x_BV, rows)
        token_B = pick(logprob_BV, numbers(rows, "token", logits_BV.device))
        logprob_B = at(logprob_BV, token_B)
    return Drawn(token_B, logprob_B, at(raw_BV, token_B) - raw_BV.logsumexp(-1))


def penalised(x_BV: Tensor, rows: Sequence[Row]) -> Tensor:
    indices = [index for index, row in enumerate(rows) if row.sampling.is_penalised]
    if not indices:
        return x_BV
    index_C = torch.tensor(indices, device=x_BV.device)
    x_CV = x_BV[index_C]
    count_CV = _counts([rows[index].sampled_ids for index in indices], x_CV)
    is_there_CV = (count_CV > 0) | (_counts([rows[index].prompt_ids for index in indices], x_CV) > 0)
    repetition_C1, frequency_C1, presence_C1 = (
        x_BV.new_tensor([[getattr(rows[index].sampling, f"{name}_penalty")] for index in indices])
        for name in ("repetition", "frequency", "presence")
    )
    repelled_CV = torch.where(x_CV > 0, x_CV / repetition_C1, x_CV * repetition_C1)
    x_CV = torch.where(is_there_CV, repelled_CV, x_CV)
    x_CV = x_CV - frequency_C1 * count_CV - presence_C1 * (count_CV > 0).to(x_CV)
    return x_BV.index_put((index_C,), x_CV)


def distribution(x_BV: Tensor, rows: Sequence[Row]) -> Tensor:
    """Log-probability of every token under the sampling distribution, −∞ where truncated, from penalised logits."""
    x_BV = tempered(x_BV, x_BV.new_tensor([row.sampling.temperature or 1.0 for row in rows]))
    cut = [index for index, row in enumerate(rows) if _is_cut(row.sampling)]
    if cut:
        cut_C = torch.tensor(cut, device=x_BV.device)
        allowed_CV = allowed(x_BV[cut_C], [rows[index].sampling for index in cut])
        x_BV = x_BV.index_put((cut_C,), x_BV[cut_C].masked_fill(~allowed_CV, -torch.inf))
    return x_BV.log_softmax(-1)


def tempered(x_BV: Tensor, temperature_B: Tensor) -> Tensor:
    """Divides logits by temperature after shifting each row's maximum to 0, so that no temperature, however low, gives
    infinity."""
    temperature_B = temperature_B.to(x_BV.dtype).clamp(min=torch.finfo(x_BV.dtype).tiny)
    return (x_BV - x_BV.amax(-1, keepdim=True)) / temperature_B[:, None]


def allowed(x_BV: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Mask of the tokens that may be sampled: each rule keeps a prefix in order of probability, and so do all
    together."""
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
    """The first token id at which the cumulative probability exceeds the random number. In float64, whose rounding is
    far below any probability that matters; scaled by the rounded total, so that the search never passes the end."""
    cumulated_BV = logprob_BV.double().exp().cumsum(-1)
    threshold_B = uniform_B * cumulated_BV[:, -1]
    token_B = torch.searchsorted(cumulated_BV, threshold_B[:, None], right=True)[:, 0]
    # Only NaN logits get past the last id.
    return token_B.clamp(max=logprob_BV.shape[1] - 1)


def numbers(rows: Sequence[Row], stream: Stream, device: torch.device) -> Tensor:
    seeds, samples, indices = ([getattr(row, name) for row in rows] for name in ("seed", "sample", "index"))
    return torch.from_numpy(uniforms(seeds, samples, indices, stream)).to(device)


def uniforms(
    seeds: Sequence[int], samples: Sequence[int], indices: npt.ArrayLike, stream: Stream | Sequence[Stream] = "token"
) -> npt.NDArray[np.float64]:
    """Random numbers in [0, 1) with 52 bits: times any total, they stay below it. One for each row, or several: indices
    (rows, numbers), and a stream for each number."""
    index, shape = np.asarray(indices, np.uint64), (-1, *[1] * (np.ndim(indices) - 1))
    seed = np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], np.uint64).reshape(shape)
    sample = np.array(samples, np.uint64).reshape(shape)
    streams = [stream] if isinstance(stream, str) else stream
    number = np.array([_STREAMS.index(each) for each in streams], np.uint64)
    low, high, _, _ = philox((index & _LOW, index >> _WORD, sample, number), (seed & _LOW, seed >> _WORD))
    return ((high << _WORD | low) >> np.uint64(12)).astype(np.float64) * 2.0**-52


def philox(counter: Words, key: tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]) -> Words:
    """Philox 4x32-10 (Salmon et al. 2011) of many counters at once; 32-bit words in 64 bits."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_NUM_ROUNDS):
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (second >> _WORD) ^ c1 ^ k0, second & _LOW, (first >> _WORD) ^ c3 ^ k1, first & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def is_bare(sampling: Sampling) -> bool:
    """Whether temperature is the only sampling parameter in effect."""
    is_untruncated = sampling.top_p == 1 and sampling.top_k == 0 and sampling.min_p == 0
    return (is_untruncated or sampling.temperature == 0) and not sampling.is_penalised


def _is_cut(sampling: Sampling) -> bool:
    return sampling.temperature == 0 or sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0


def _counts(ids: Sequence[Sequence[int]], x_BV: Tensor) -> Tensor:
    """Occurrences of each token, row by row, shaped as `x_BV`."""
    offset_B = np.arange(len(ids)) * x_BV.shape[1]
    flat = np.repeat(offset_B, [len(row) for row in ids]) + np.array([token for row in ids for token in row], np.int64)
    where = torch.from_numpy(flat).to(x_BV.device)
    return torch.zeros_like(x_BV).flatten().scatter_add_(0, where, x_BV.new_ones(len(flat))).view_as(x_BV)


def at(x_BV: Tensor, token_B: Tensor) -> Tensor:
    """The value at each row's token."""
    return x_BV.gather(-1, token_B[..., None])[..., 0]
