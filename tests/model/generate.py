"""Greedy decoding by the simplest loop, the whole sequence through the network for every token: the reference for the
engine."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from m2forge.model.transformer import Transformer


@torch.no_grad()
def generate(
    model: Transformer, prompt_ids: Sequence[int] | Tensor, *, max_new_tokens: int, stop_ids: Collection[int] = ()
) -> list[int]:
    """The tokens that follow the prompt: at most `max_new_tokens`, ending with the first in `stop_ids`."""
    prompt, new = [int(token) for token in prompt_ids], list[int]()
    while len(new) < max_new_tokens and not (new and new[-1] in stop_ids):
        hidden_ND = model(torch.tensor([prompt + new], device=model.embedding.weight.device), with_mtp=False).hidden_ND
        new.append(int(model.logits(hidden_ND[-1:])[0].argmax()))
    return new
