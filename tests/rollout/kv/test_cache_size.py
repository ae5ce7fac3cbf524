"""The computed size of the KV cache equals that of its tensors."""

import pytest
import torch

from m2forge.rollout.config import RolloutConfig
from m2forge.rollout.kv.cache_size import cache_bytes
from m2forge.rollout.kv.paged_plan import PagedCache
from tests.model.draw import SMALL


@pytest.mark.parametrize("speculation", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_size_equals_that_of_the_tensors(dtype: torch.dtype, speculation: int) -> None:
    config = RolloutConfig(num_blocks=7, block_tokens=4, speculation=speculation)
    cache = PagedCache(SMALL, config.num_blocks, config.block_tokens, torch.device("cpu"), dtype, speculation)
    held = sum(tensor.nbytes for tensor in (cache.k_YPTGK, cache.v_YPTGK, cache.state_MPTD))
    assert cache_bytes(SMALL, config, dtype.itemsize) == held
