"""The size of the paged KV cache, computed from the configs alone, without torch.

    (num_blocks + 1) · block_tokens · (2 · kv_width · (layers + modules) + hidden_size · modules) elements

`modules` are the MTP modules that draft (`speculation`), which also store the hidden states they take; one block more
than the pool's receives the writes of padding.
"""

from m2forge.model.config import ModelConfig
from m2forge.rollout.config import RolloutConfig


def cache_bytes(network: ModelConfig, config: RolloutConfig, element_bytes: int) -> int:
    """Bytes of the KV cache with `element_bytes` per element."""
    modules = config.speculation
    num_tokens = (config.num_blocks + 1) * config.block_tokens
    per_token = 2 * network.attention.kv_width * (network.num_layers + modules) + network.hidden_size * modules
    return num_tokens * per_token * element_bytes
