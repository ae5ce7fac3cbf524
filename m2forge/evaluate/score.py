"""Scores a sample's answers, by teacher forcing or by free decoding.

**Forced.** One forward pass over prompt and answers; an answer is correct if the argmax at every position before one of
its tokens is that token. For a single answer this equals greedy decoding at the cost of one pass: greedy decoding gives
a[0] exactly if argmax p(·|prompt) = a[0], then a[1] exactly if argmax p(·|prompt, a[0]) = a[1], and so on, and these
are the argmaxes that the forced pass computes, since attention is causal. If a sample has several answers, each is
scored given the correct earlier ones. Equal up to the rounding of differently shaped passes.

**Free.** The model decodes a completion of the prompt; an answer is correct if the completion contains it anywhere:
RULER's rule for answers that are sets. Text is compared as text, ignoring case, ids as ids.

The score of a sample is the share of its answers that are correct (RULER's recall); `exact` is whether all are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from m2forge.evaluate.predictor import Predictor, batches, complete
from m2forge.evaluate.prompts.sample import Sample

Decode = Callable[[list[int]], str]


@dataclass(frozen=True, slots=True)
class Outcome:
    sample: Sample
    right: tuple[bool, ...]
    """Whether each answer is correct."""

    @property
    def recall(self) -> float:
        return sum(self.right) / len(self.right)

    @property
    def is_exact(self) -> bool:
        return all(self.right)


def score_forced(predictor: Predictor, samples: Sequence[Sample], *, max_pack_tokens: int = 1 << 16) -> list[Outcome]:
    outcomes: list[Outcome | None] = [None] * len(samples)
    for batch in batches([len(sample.ids) for sample in samples], max_pack_tokens):
        members = [samples[index] for index in batch]
        logits_MV = predictor.logits([sample.ids for sample in members], [sample.predicting for sample in members])
        likeliest = logits_MV.argmax(-1).cpu().numpy()
        bounds = np.cumsum([len(sample.predicting) for sample in members])[:-1]
        for index, sample, chosen in zip(batch, members, np.split(likeliest, bounds), strict=True):
            outcomes[index] = Outcome(sample, _right_spans(sample, chosen.tolist()))
    return [outcome for outcome in outcomes if outcome is not None]


def score_free(
    predictor: Predictor,
    samples: Sequence[Sample],
    *,
    decode: Decode | None = None,
    max_new_tokens: int | None = None,
    max_pack_tokens: int = 1 << 16,
) -> list[Outcome]:
    """`decode` is required for text samples. Without `max_new_tokens` a completion is as long as everything after the
    prompt in its sample."""
    bounds = [max_new_tokens or len(sample.ids) - len(sample.prompt_ids) for sample in samples]
    prompts = [sample.prompt_ids for sample in samples]
    completions = complete(predictor, prompts, max_new_tokens=bounds, max_pack_tokens=max_pack_tokens)
    return [
        Outcome(sample, _contained(sample, completion, decode))
        for sample, completion in zip(samples, completions, strict=True)
    ]


def _right_spans(sample: Sample, chosen: Sequence[int]) -> tuple[bool, ...]:
    right, cursor = [], 0
    for answer in sample.answers:
        right.append(tuple(chosen[cursor : cursor + len(answer)]) == answer)
        cursor += len(answer)
    return tuple(right)


def _contained(sample: Sample, completion: list[int], decode: Decode | None) -> tuple[bool, ...]:
    if sample.references:
        if decode is None:
            raise ValueError("samples of text need `decode` to be scored by free completion")
        text = decode(completion).casefold()
        return tuple(reference.casefold() in text for reference in sample.references)
    return tuple(_contains(completion, answer) for answer in sample.answers)


def _contains(row: Sequence[int], part: tuple[int, ...]) -> bool:
    return any(tuple(row[start : start + len(part)]) == part for start in range(len(row) - len(part) + 1))
