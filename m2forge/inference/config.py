"""Config of inference: the engine's keys, as `LLM` takes them.

LLM("runs/demo/rl/model", device="cpu", num_blocks=4096)
"""

from typing import Literal

from m2forge.rollout.config import RolloutConfig, ServeConfig
from m2forge.text.format import FormatName


class LLMConfig(RolloutConfig):
    """The keyword arguments of `LLM`."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "stored", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of weights and KV cache. auto: as stored, except that a CPU that decodes faster in float32 uses that."""
    format: FormatName = "auto"
    """Chat format; auto uses the tokenizer's."""

    def serving(self) -> ServeConfig:
        """The config of the engine's core."""
        return ServeConfig(device=self.device, dtype=self.dtype, rollout=self)


class ModelServerConfig(ServeConfig):
    format: FormatName = "auto"
    """Chat format of /v1/chat/completions; auto uses the tokenizer's."""
    models: tuple[str, ...] = ()
    """Model names that GET /v1/models lists; empty: the folder's name. Requests may use any name, since there is only
    one model."""
