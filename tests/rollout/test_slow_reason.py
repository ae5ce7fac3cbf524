"""An engine that decodes slowly says why, once."""

import pytest
import torch

from m2forge.model.build import build
from m2forge.model.config import ModelConfig
from m2forge.observe import log
from m2forge.rollout.config import RolloutConfig
from m2forge.rollout.execution.cuda_network import slow_reason
from m2forge.rollout.execution.model_runner import Runner
from tests.model.draw import SMALL

CONFIG = RolloutConfig(num_blocks=4)


def sized(head_dim: int = 64, hidden_size: int = 128) -> ModelConfig:
    attention = SMALL.attention.model_copy(update={"head_dim": head_dim})
    return SMALL.model_copy(update={"attention": attention, "hidden_size": hidden_size})


def test_what_cuda_graphs_cannot_hold_has_a_reason() -> None:
    assert slow_reason(sized(), "cuda", torch.bfloat16, 16) is None
    assert "without CUDA graphs and fused kernels" in str(slow_reason(sized(48), "cuda", torch.bfloat16, 16))
    assert "block_tokens, received 24" in str(slow_reason(sized(), "cuda", torch.bfloat16, 24))
    assert "without CUDA graphs, which is slow: float16 experts" in str(
        slow_reason(sized(hidden_size=96), "cuda", torch.float16, 16)
    )


@pytest.mark.parametrize(("dtype", "num"), [(torch.float16, 1), (torch.bfloat16, 0), (torch.float64, 0)])
def test_an_engine_in_float16_on_a_cpu_warns_once(
    dtype: torch.dtype, num: int, caplog: pytest.LogCaptureFixture
) -> None:
    log.warn_once.cache_clear()
    model = build(SMALL, dtype=dtype)
    for _ in range(2):
        Runner(model, CONFIG)
    texts = [record.getMessage() for record in caplog.records]
    assert texts == ["no CPU kernel takes float16, which decodes slowly; use bfloat16 or float32"] * num
