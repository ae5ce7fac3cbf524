"""Generates text by the simplest loop: the whole sequence through the network for every token, without a KV cache.

Slow on purpose: the reference for faster engines.
"""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from m2forge.model.transformer import Transformer


@torch.no_grad()
def generate(
    model: Transformer,
    prompt_ids: Sequence[int] | Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    stop_ids: Collection[int] = (),
) -> list[int]:
    """The tokens that follow the prompt: at most `max_new_tokens`, ending with the first in `stop_ids`.

    Temperature 0 takes the argmax token; otherwise tokens are sampled from softmax(logits / temperature). Sampling
    depends on the seed and the logits, not on the device.
    """
    if temperature < 0:
        raise ValueError(f"temperature {temperature}: expected 0 (greedy) or above")
    device = model.embedding.weight.device
    tokens = _checked(prompt_ids, model.config.vocab_size)
    generator = torch.Generator().manual_seed(seed)
    new: list[int] = []
    while len(new) < max_new_tokens and not (new and new[-1] in stop_ids):
        hidden_ND = model(torch.tensor([tokens + new], device=device), with_mtp=False).hidden_ND
        new.append(_pick(model.logits(hidden_ND[-1:])[0], temperature, generator))
    return new


def _checked(prompt_ids: Sequence[int] | Tensor, vocab_size: int) -> list[int]:
    tokens = [int(token) for token in prompt_ids]
    if not tokens:
        raise ValueError("the prompt is empty; give at least one token, such as the one that begins a text")
    strange = [token for token in tokens if not 0 <= token < vocab_size]
    if strange:
        raise ValueError(f"the prompt holds ids outside 0..{vocab_size - 1}: {strange[:8]}; another tokenizer's?")
    return tokens


def _pick(logits_V: Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits_V.argmax())
    probability_V = (logits_V.double().cpu() / temperature).softmax(-1)
    return int(torch.multinomial(probability_V, 1, generator=generator))
