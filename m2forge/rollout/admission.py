"""Rejects prompts that can never be served, so that every waiting request can run eventually."""

import numpy as np

from m2forge.errors import RequestError
from m2forge.protocols import Prompt
from m2forge.rollout.config import RolloutConfig
from m2forge.rollout.scheduler import num_blocks_for


def refuse_unservable(id: str, prompt: Prompt, config: RolloutConfig, vocab_size: int, max_context: int) -> None:
    """Raises RequestError."""
    ids = np.asarray(prompt.ids)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise RequestError(f"prompt {id!r}: ids: expected a row of integers, received {ids.shape} of {ids.dtype}")
    strange = ids[(ids < 0) | (ids >= vocab_size)]
    if strange.size:
        found = strange[:8].tolist()
        raise RequestError(f"prompt {id!r}: ids outside 0..{vocab_size - 1}: {found}; another tokenizer's?")
    num_tokens = ids.size + prompt.max_tokens
    sizes = f"{ids.size} tokens and {prompt.max_tokens} to sample"
    if num_tokens > max_context:
        raise RequestError(f"prompt {id!r}: {sizes} exceed the context of {max_context}; ask for less")
    # The last token is sampled but never computed.
    if num_blocks_for(num_tokens - 1, config.block_tokens) > config.num_blocks:
        num_places = config.num_blocks * config.block_tokens
        raise RequestError(f"prompt {id!r}: {sizes} exceed a cache of {num_places}; ask for less, or raise num_blocks")
    if "" in prompt.stop_texts:
        raise RequestError(f"prompt {id!r}: stop_texts: expected text, received ''")
