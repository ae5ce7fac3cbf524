"""Completions of many prompts at once by the plainest batched loop: a full forward pass per token, no cache.

For each prompt it gives what `m2forge.model.generate.generate` gives (with seed + index for prompt number index), up
to the rounding of a differently shaped batch. The cost is at most `max_new_tokens` passes over all prompts.
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
    """The tokens that follow each prompt: at most `max_new_tokens` (one bound, or one each), ending with the first
    that is in `stop_ids`. Temperature 0 takes the likeliest token. `advance` is told of prompts as they are done."""
    if temperature < 0:
        raise ValueError(f"temperature {temperature}: expected 0 (greedy) or above")
    if any(len(prompt) == 0 for prompt in prompts):
        raise ValueError("a prompt is empty; give each at least one token")
    bounds = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else list(max_new_tokens)
    generators = [torch.Generator().manual_seed(seed + index) for index in range(len(prompts))]
    texts = [np.asarray(prompt, np.int32) for prompt in prompts]
    new: list[list[int]] = [[] for _ in prompts]

    def is_open(index: int) -> bool:
        return len(new[index]) < bounds[index] and not (new[index] and new[index][-1] in stop_ids)

    num_done = 0
    while active := [index for index in range(len(prompts)) if is_open(index)]:
        advance(len(prompts) - len(active) - num_done)
        num_done = len(prompts) - len(active)
        for batch in batches([len(texts[index]) for index in active], max_pack_tokens):
            members = [active[index] for index in batch]
            last = [np.array([len(texts[index]) - 1], np.int32) for index in members]
            logits_MV = predictor.logits([texts[index] for index in members], last)
            for index, token in zip(
                members, _pick(logits_MV, temperature, [generators[i] for i in members]), strict=True
            ):
                new[index].append(token)
                texts[index] = np.append(texts[index], np.int32(token))
    advance(len(prompts) - num_done)
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
