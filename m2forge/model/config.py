"""Model config of the families in `FamilyName`.

A family fixes the public tensor names (architecture.py); everything that changes the computation is a field here.
"""

import math
import re
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from m2forge.config import Config

MAX_SIZE, MAX_LAYERS = 1 << 24, 1 << 12
Size = Annotated[int, Field(gt=0, le=MAX_SIZE)]
"""A width or a count, bounded against overflow."""
Layers = Annotated[int, Field(gt=0, le=MAX_LAYERS)]
"""Number of layers, bounded far above any real network, because layers are built before their weights are checked."""
Experts = Annotated[int, Field(gt=0, le=1 << 14)]
Context = Annotated[int, Field(gt=0, le=1 << 40)]
"""A length in tokens."""

FamilyName = Literal["minimax_m2", "llama", "mistral", "qwen2", "qwen3", "qwen3_moe"]


class RopeScaling(Config):
    """How rotary frequencies are scaled beyond the trained context."""

    kind: Literal["linear", "llama3", "yarn"]
    factor: float = Field(gt=0)
    low_frequency_factor: float = 1.0
    """llama3: wavelengths longer than original_context / this are divided by `factor`."""
    high_frequency_factor: float = 4.0
    """llama3: wavelengths shorter than original_context / this stay unchanged."""
    original_context: Context = 8192
    """llama3 and yarn: the trained context."""
    beta_fast: float = Field(default=32.0, gt=0)
    """yarn: frequencies that turn more often than this within the trained context stay unchanged."""
    beta_slow: float = Field(default=1.0, gt=0)
    """yarn: frequencies that turn less often than this within the trained context are divided by `factor`."""
    truncate: bool = True
    """yarn: whether the bounds between which frequencies are blended are rounded to whole dimensions."""
    attention_factor: float | None = Field(default=None, ge=0)
    """yarn: multiplies cos and sin, so logits by its square; None: 0.1 · ln(factor) + 1, or 1 for a factor up to 1."""


def yarn_factor(factor: float, scale: float = 1.0) -> float:
    """YaRN's factor of cos and sin for a context that is `factor` times the trained one."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


class WindowConfig(Config):
    """Hybrid sliding-window attention: these layers see `size` tokens back, the others the whole context."""

    size: Size
    """Window size in tokens, including the current one."""
    layers: tuple[int, ...]
    num_sinks: int = Field(default=0, ge=0)
    """Attention sinks: first tokens of a document that every later token sees."""


class AttentionConfig(Config):
    num_heads: Size
    num_kv_heads: Size
    head_dim: Size
    rotary_dim: Size
    """Leading dimensions of a head that rotate; the rest have no positional encoding."""
    qkv_bias: bool = False
    """Whether the projections to q, k and v have biases."""
    rope_theta: float = Field(default=10_000.0, gt=0)
    rope_scaling: RopeScaling | None = None
    qk_norm: Literal["none", "flat", "head"] = "none"
    """flat: one RMSNorm over all heads of q (and of k) together; head: one over each head."""
    window: WindowConfig | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})")
        if self.rotary_dim > self.head_dim or self.rotary_dim % 2:
            raise ValueError(f"rotary_dim ({self.rotary_dim}) must be even and at most head_dim ({self.head_dim})")
        if self.rope_scaling is not None and self.rope_scaling.kind == "yarn" and self.rope_theta <= 1:
            raise ValueError(f"rope_theta ({self.rope_theta}) must be above 1 with rope_scaling.kind = yarn")
        return self

    @property
    def rotary_factor(self) -> float:
        """Multiplies cos and sin of the rotary embedding."""
        scaling = self.rope_scaling
        if scaling is None or scaling.kind != "yarn":
            return 1.0
        return yarn_factor(scaling.factor) if scaling.attention_factor is None else scaling.attention_factor

    @property
    def q_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.num_kv_heads * self.head_dim


class MoEConfig(Config):
    num_experts: Experts
    top_k: Size
    intermediate_size: Size
    scoring: Literal["sigmoid", "softmax"] = "sigmoid"
    normalize: bool = True
    """Divide the chosen experts' scores by their sum."""
    selection_bias: bool = True
    """Whether a per-expert bias is added to the scores for selection, but not for the weights."""
    bias_update: Literal["sign", "gradient", "none"] = "sign"
    """How the selection bias is updated: by the centred sign rule, by the auxiliary loss's gradient, or not at all."""
    bias_rate: float = Field(default=1e-3, ge=0)
    """Step size of the sign rule. Our choice: the report does not disclose it."""
    aux_loss_weight: float = Field(default=0.0, ge=0)
    """Weight of the auxiliary load-balancing loss. Our choice: off by default."""
    dense_layers: tuple[int, ...] = ()
    """Layers with a dense feed-forward network of ModelConfig.intermediate_size."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k ({self.top_k}) exceeds num_experts ({self.num_experts})")
        if self.bias_update == "gradient" and not (self.selection_bias and self.aux_loss_weight > 0):
            raise ValueError('bias_update = "gradient" needs selection_bias = true and aux_loss_weight > 0')
        return self


class ModelConfig(Config):
    family: FamilyName = "minimax_m2"
    vocab_size: Size
    hidden_size: Size
    num_layers: Layers
    attention: AttentionConfig
    moe: MoEConfig | None = None
    intermediate_size: Size | None = None
    """Width of dense feed-forward layers; required if any layer is dense."""
    norm_eps: float = Field(default=1e-6, gt=0)
    tied_head: bool = False
    """Whether the LM head shares the embedding's weights."""
    float32_head: bool = False
    """Whether logits are computed and stored in at least float32."""
    max_context: Context = 4096
    num_mtp: int = Field(default=0, ge=0, le=64)
    """Number of chained multi-token prediction (MTP) modules."""
    init_std: float = Field(default=0.02, gt=0)

    @model_validator(mode="after")
    def _check(self) -> Self:
        window = self.attention.window
        named = (*(window.layers if window else ()), *(self.moe.dense_layers if self.moe else ()))
        if any(layer not in range(self.num_layers) for layer in named) or len(named) > 2 * self.num_layers:
            received = f"{list(named[:8])}{'…' if len(named) > 8 else ''}"
            raise ValueError(
                f"window.layers and moe.dense_layers must lie in 0..{self.num_layers - 1}, each once, got {received}"
            )
        if self.intermediate_size is None and any(not self.is_sparse(layer) for layer in range(self.num_layers)):
            raise ValueError("intermediate_size is needed: some layers have a dense feed-forward network")
        return self

    def is_sparse(self, layer: int) -> bool:
        return self.moe is not None and layer not in self.moe.dense_layers

    def is_windowed(self, layer: int) -> bool:
        window = self.attention.window
        return window is not None and layer in window.layers

    def with_layers(self, num_layers: int) -> "ModelConfig":
        """The same network with its first `num_layers` layers only."""
        data = self.model_dump(exclude_none=True) | {"num_layers": num_layers}
        if self.moe:
            data["moe"]["dense_layers"] = tuple(layer for layer in self.moe.dense_layers if layer < num_layers)
        if self.attention.window:
            layers = tuple(layer for layer in self.attention.window.layers if layer < num_layers)
            data["attention"]["window"]["layers"] = layers
        return ModelConfig.model_validate(data)


class LoRAConfig(Config):
    """Low-rank adapters: chosen weights are frozen and get the product of two small matrices, which are trained."""

    rank: int = Field(default=16, gt=0, le=4096)
    alpha: float = Field(default=32.0, gt=0)
    """The product is multiplied by alpha / rank."""
    targets: tuple[str, ...] = Field(default=("q_proj", "k_proj", "v_proj", "o_proj"), min_length=1)
    """Layers with an adapter: regular expressions for the end of their public names, such as `v_proj` or
    `experts\\.\\d+\\.w[123]`. Projections of attention and FFNs can have one; of experts, all of a layer."""

    seed: int = Field(default=0, ge=0)
    """Seed of the first of the two matrices; the second is 0 at the start."""

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def matches(self, layer: str) -> list[str]:
        """The targets that name a layer."""
        return [pattern for pattern in self.targets if re.fullmatch(rf"(?:.*\.)?(?:{pattern})", layer)]

    @model_validator(mode="after")
    def _check(self) -> Self:
        for pattern in self.targets:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"targets: {pattern!r} is no regular expression ({error})") from error
        return self
