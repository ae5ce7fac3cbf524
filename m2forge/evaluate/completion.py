"""Batched decoding: completions of many prompts at once.

Each completion equals that of `m2forge.model.generate.generate` (with seed + index for prompt number index), up to the
rounding of a differently shaped batch.
"""

from collections.abc import Callable, Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from m2forge.evaluate.predictor import Predictor, batches
from m2forge.records import IntArray


def complete(
    predictor: Predictor,
    prompts: Sequence[Sequence[int] | IntArray],
    *,
    max_new_tokens: int | Sequence[int],
    stop_ids: Collection[int] = (),
    temperature: float = 0.0,
    seed: int = 0,
    max_pack_tokens: int = 1 << 16,
    advance: Callable[[int], None] = lambda count: None,
) -> list[list[int]]:
    """The completion of each prompt: at most `max_new_tokens` (one limit, or one each), ending with the first token in
    `stop_ids`. Temperature 0 decodes greedily. `advance` is called with the number of prompts finished."""
    if temperature < 0:
        raise ValueError(f"temperature {temperature}: expected 0 (greedy) or above")
    if any(len(prompt) == 0 for prompt in prompts):
        raise ValueError("a prompt is empty; give each at least one token")
    bounds = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else list(max_new_tokens)
    new: list[list[int]] = [[] for _ in prompts]
    wanted = [index for index, bound in enumerate(bounds) if bound > 0]
    advance(len(prompts) - len(wanted))
    for batch in batches([len(prompts[index]) + bounds[index] for index in wanted], max_pack_tokens):
        members = [wanted[place] for place in batch]
        generators = {index: torch.Generator().manual_seed(seed + index) for index in members}
        texts = predictor.continuation([np.asarray(prompts[index], np.int32) for index in members])
        while members:
            tokens = _pick(texts.logits(), temperature, [generators[index] for index in members])
            for index, token in zip(members, tokens, strict=True):
                new[index].append(token)
            kept = [
                place
                for place, (index, token) in enumerate(zip(members, tokens, strict=True))
                if token not in stop_ids and len(new[index]) < bounds[index]
            ]
            texts.extend(tokens, kept)
            advance(len(members) - len(kept))
            members = [members[place] for place in kept]
    return new


def _pick(logits_MV: Tensor, temperature: float, generators: Sequence[torch.Generator]) -> list[int]:
    if temperature == 0:
        tokens: list[int] = logits_MV.argmax(-1).tolist()
        return tokens
    probability_MV = (logits_MV.double().cpu() / temperature).softmax(-1)
    return [
        int(torch.multinomial(probability_V, 1, generator=generator))
        for probability_V, generator in zip(probability_MV, generators, strict=True)
    ]
