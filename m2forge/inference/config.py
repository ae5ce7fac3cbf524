"""Config of inference: sampling parameters, the engine's keys as `LLM` takes them, and the keys of `m2forge serve`.

LLM("runs/demo/rl/model", device="cpu", num_blocks=4096).generate("def", temperature=0.7)
m2forge serve runs/demo/rl/model --set device=cpu --set rollout.num_blocks=4096 --set models='["policy"]'
"""

from typing import Annotated, Literal

from pydantic import Field

from m2forge.gateway.config import SamplingConfig
from m2forge.records import MAX_INT32
from m2forge.rollout.config import RolloutConfig, ServeConfig
from m2forge.text.message import FormatName, RewritePolicy

Count = Annotated[int, Field(gt=0, le=MAX_INT32)]


class SamplingParams(SamplingConfig):
    """Sampling parameters; frozen. The defaults sample from the model's own distribution."""

    max_tokens: Count | None = None
    """Maximum number of sampled tokens, thinking included; None: as many as the context leaves."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Texts that end the completion; they are not part of its text."""
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None
    """The same seed, prompt and weights sample the same tokens; None: a new seed each time."""
    n: Count = 1
    """Number of completions of each prompt; they share its prefill."""


class LLMConfig(RolloutConfig):
    """The keyword arguments of `LLM`."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "stored", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of weights and KV cache. auto: as stored, except that a CPU that decodes faster in float32 uses that."""
    format: FormatName = "auto"
    """Chat format; auto uses the tokenizer's, and the model's own chat template where there is none of ours."""
    prefix_rewrites: RewritePolicy = "allow"
    """Whether a chat format may render earlier messages differently because of later ones, which the prefix cache then
    does not serve. allow: a message at the start says when. refuse: such a format is refused."""

    def serving(self) -> ServeConfig:
        """The config of the engine's core."""
        return ServeConfig(device=self.device, dtype=self.dtype, rollout=self)


class ModelServerConfig(ServeConfig):
    format: FormatName = "auto"
    """Chat format of /v1/chat/completions; auto uses the tokenizer's, and the model's own chat template where there is
    none of ours."""
    prefix_rewrites: RewritePolicy = "allow"
    """Whether a chat format may render earlier messages differently because of later ones, which the prefix cache then
    does not serve. allow: a message at the start says when. refuse: such a format is refused."""
    models: tuple[str, ...] = ()
    """Model names that GET /v1/models lists; empty: the name of the folder or hub model. Requests may use any name,
    since there is only one model."""
