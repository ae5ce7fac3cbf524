"""Tensor names and `config.json` of the public families.

`public_parts` maps every public tensor to its location in our state: a parameter, an expert in it, a range of rows.
`from_public` and `to_public` translate configs; they reject by name what a family cannot express. MTP modules were
never released, so their names are ours: `model.mtp_layers.N.*`.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from m2forge.errors import CheckpointError, ConfigError, suggest
from m2forge.model.config import (
    MAX_LAYERS,
    MAX_SIZE,
    AttentionConfig,
    FamilyName,
    LoRAConfig,
    ModelConfig,
    MoEConfig,
    RopeScaling,
    WindowConfig,
    yarn_factor,
)

if TYPE_CHECKING:
    from torch import Tensor

ARCHITECTURES: dict[FamilyName, str] = {
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
CONFIG_KEY = "m2forge"
"""Key of config.json that holds our whole config, as JSON text."""
QK_NORM: dict[str, Literal["none", "flat", "head"]] = {
    "minimax_m2": "flat",
    "llama": "none",
    "mistral": "none",
    "qwen2": "none",
    "qwen3": "head",
    "qwen3_moe": "head",
}
DEFAULT_WINDOW = 4096
"""Window of a public config that does not say `sliding_window`, which is not the same as null."""
DEFAULT_FULL_LAYERS = 28
"""Layers below the windowed ones in a Qwen config that does not say `max_window_layers`."""


@dataclass(frozen=True)
class Part:
    """Location of a public tensor in our state: parameter `name`, one `expert` of it, rows `start` to `stop`."""

    name: str
    expert: int | None = None
    start: int = 0
    stop: int | None = None

    def of(self, tensor: "Tensor") -> "Tensor":
        whole = tensor if self.expert is None else tensor[self.expert]
        return whole[self.start : self.stop]


def public_parts(config: ModelConfig) -> Iterator[tuple[str, Part]]:
    """(public name, part) of every tensor; covers each element of the state exactly once."""
    yield "model.embed_tokens.weight", Part("embedding.weight")
    for layer in range(config.num_layers):
        yield from _block_parts(config, layer, f"model.layers.{layer}.", f"blocks.{layer}.")
    yield "model.norm.weight", Part("norm.weight")
    if not config.tied_head:
        yield "lm_head.weight", Part("head.weight")
    for module in range(config.num_mtp):
        public, ours = f"model.mtp_layers.{module}.", f"mtp.{module}."
        yield public + "hidden_layernorm.weight", Part(ours + "state_norm.weight")
        yield public + "token_layernorm.weight", Part(ours + "embedding_norm.weight")
        yield public + "input_proj.weight", Part(ours + "projection.weight")
        yield public + "final_layernorm.weight", Part(ours + "norm.weight")
        yield from _block_parts(config, config.num_layers - 1, public, ours + "block.")


def _block_parts(config: ModelConfig, layer: int, public: str, ours: str) -> Iterator[tuple[str, Part]]:
    q, kv = config.attention.q_width, config.attention.kv_width
    yield public + "input_layernorm.weight", Part(ours + "attention_norm.weight")
    yield public + "post_attention_layernorm.weight", Part(ours + "ffn_norm.weight")
    for kind in ("weight", "bias") if config.attention.qkv_bias else ("weight",):
        qkv = f"{ours}attention.qkv.{kind}"
        yield f"{public}self_attn.q_proj.{kind}", Part(qkv, start=0, stop=q)
        yield f"{public}self_attn.k_proj.{kind}", Part(qkv, start=q, stop=q + kv)
        yield f"{public}self_attn.v_proj.{kind}", Part(qkv, start=q + kv, stop=q + 2 * kv)
    yield public + "self_attn.o_proj.weight", Part(ours + "attention.out.weight")
    if config.attention.qk_norm != "none":
        yield public + "self_attn.q_norm.weight", Part(ours + "attention.q_norm.weight")
        yield public + "self_attn.k_norm.weight", Part(ours + "attention.k_norm.weight")
    if config.moe is not None and config.is_sparse(layer):
        yield from _mixture_parts(config.family, config.moe, public, ours + "ffn.")
    else:
        yield from _swiglu_parts(public + "mlp.{}_proj.weight", ours + "ffn.{}.weight", config.intermediate_size or 0)


def _mixture_parts(family: FamilyName, moe: MoEConfig, public: str, ours: str) -> Iterator[tuple[str, Part]]:
    public += "block_sparse_moe." if family == "minimax_m2" else "mlp."
    yield public + "gate.weight", Part(ours + "router.weight")
    if moe.selection_bias:
        yield public + "e_score_correction_bias", Part(ours + "router.bias")
    names = {"gate": "w1", "up": "w3", "down": "w2"} if family == "minimax_m2" else None
    for expert in range(moe.num_experts):
        pattern = public + f"experts.{expert}." + ("{}.weight" if names else "{}_proj.weight")
        yield from _swiglu_parts(pattern, ours + "{}", moe.intermediate_size, expert, names)


def _swiglu_parts(
    public: str, ours: str, width: int, expert: int | None = None, names: Mapping[str, str] | None = None
) -> Iterator[tuple[str, Part]]:
    names = names or {"gate": "gate", "up": "up", "down": "down"}
    yield public.format(names["gate"]), Part(ours.format("w13"), expert, 0, width)
    yield public.format(names["up"]), Part(ours.format("w13"), expert, width, 2 * width)
    yield public.format(names["down"]), Part(ours.format("w2"), expert)


_ADAPTED = re.compile(r"\.(?:self_attn\.[qkvo]_proj|(?:mlp|experts\.\d+)\.(?:gate|up|down)_proj|experts\.\d+\.w[123])$")
"""Layers that can have an adapter."""


def adapted_layers(config: ModelConfig, lora: LoRAConfig) -> dict[str, Part]:
    """The layers with an adapter, by public name; raises ConfigError if a target names none, or one that cannot have
    an adapter."""
    found: dict[str, Part] = {}
    unused, example = set(lora.targets), ""
    for name, part in public_parts(config):
        layer = name.removesuffix(".weight")
        can = layer != name and _ADAPTED.search(layer) is not None
        example = example or (layer if can else "")
        if layer == name or not (targets := lora.matches(layer)):
            continue
        if not can:
            raise ConfigError(f"lora.targets: {layer} cannot have an adapter; projections of attention and FFNs can")
        unused.difference_update(targets)
        found[layer] = part
    if unused:
        raise ConfigError(f"lora.targets: no layer ends with {min(unused)!r}; one that could is {example}")
    return found


# -- configurations ---------------------------------------------------------------------------------------------------


def from_public(public: Mapping[str, Any]) -> ModelConfig:
    """Our config from the contents of a public `config.json`."""
    if CONFIG_KEY in public:
        return _from_config_key(public)
    family = public.get("model_type")
    if family not in ARCHITECTURES:
        raise CheckpointError(f"model_type {family!r} is not supported; {suggest(str(family), ARCHITECTURES)}")
    for field in ("attention_bias", "mlp_bias"):
        if public.get(field):
            raise CheckpointError(f"{field} = true is not supported: only the q, k and v of qwen2 have biases here")
    if public.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"hidden_act {public['hidden_act']!r} is not supported; every family here uses silu")
    _check_sizes(public)
    moe = {"minimax_m2": _minimax_moe, "qwen3_moe": _qwen_moe}.get(family)
    return ModelConfig(
        family=family,
        vocab_size=public["vocab_size"],
        hidden_size=public["hidden_size"],
        num_layers=public["num_hidden_layers"],
        attention=_attention_from_public(family, public),
        moe=moe(public) if moe else None,
        intermediate_size=None if family == "minimax_m2" else public["intermediate_size"],
        norm_eps=float(public.get("rms_norm_eps", 1e-6)),
        tied_head=bool(public.get("tie_word_embeddings", False)),
        max_context=public.get("max_position_embeddings", 4096),
        init_std=float(public.get("initializer_range", 0.02)),
    )


_LARGEST = dict.fromkeys(("num_hidden_layers", "max_window_layers", "decoder_sparse_step"), MAX_LAYERS) | dict.fromkeys(
    ("hidden_size", "num_attention_heads", "head_dim"), MAX_SIZE
)
"""Upper bounds of keys that are used in arithmetic before `ModelConfig` validates them."""


def _check_sizes(public: Mapping[str, Any]) -> None:
    for key, most in _LARGEST.items():
        value = public.get(key)
        if value is not None and (type(value) is not int or not 0 <= value <= most):
            raise ValueError(f"{key} is {str(value)[:40]}, expected an integer of at most {most}")


def _from_config_key(public: Mapping[str, Any]) -> ModelConfig:
    """Our own config; rejected if another program has changed the public keys beside it."""
    config = ModelConfig.model_validate_json(public[CONFIG_KEY])
    try:
        stated = from_public(to_public(config))
    except CheckpointError:
        return config  # the family cannot express it, so there is nothing public to compare
    around = from_public({key: value for key, value in public.items() if key != CONFIG_KEY})
    differing = _differences(stated.model_dump(), around.model_dump())
    if differing:
        raise CheckpointError(
            f"the key {CONFIG_KEY!r} and the public keys disagree on {', '.join(differing)}: another program changed "
            f"the model; remove the key {CONFIG_KEY!r} to read it as that program left it"
        )
    return config


def _attention_from_public(family: str, public: Mapping[str, Any]) -> AttentionConfig:
    heads = public["num_attention_heads"]
    head_dim = public.get("head_dim") or public["hidden_size"] // heads
    rope = dict(public.get("rope_parameters") or {}) or {**(public.get("rope_scaling") or {})}
    theta = rope.get("rope_theta", public.get("rope_theta", 5e6 if family == "minimax_m2" else 1e4))
    rotary_dim = head_dim
    if family == "minimax_m2":  # the others rotate whole heads and ignore this key
        factor = rope.get("partial_rotary_factor", public.get("partial_rotary_factor"))
        rotary_dim = int(head_dim * float(factor)) if factor is not None else public.get("rotary_dim") or head_dim
    return AttentionConfig(
        num_heads=heads,
        num_kv_heads=public.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        rope_theta=float(theta),
        rope_scaling=_scaling_from_public(rope, public),
        qkv_bias=family == "qwen2",
        qk_norm=QK_NORM[family],
        window=_window_from_public(family, public),
    )


def _scaling_from_public(rope: Mapping[str, Any], public: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling(kind="linear", factor=float(rope["factor"]))
    # A key beside the table comes before the one in it, as in transformers.
    original = public.get("original_max_position_embeddings") or rope.get(
        "original_max_position_embeddings", public.get("max_position_embeddings", 4096)
    )
    if kind == "llama3":
        return RopeScaling(
            kind="llama3",
            factor=float(rope["factor"]),
            low_frequency_factor=float(rope["low_freq_factor"]),
            high_frequency_factor=float(rope["high_freq_factor"]),
            original_context=original,
        )
    if kind == "yarn":
        factor = rope["factor"]
        factor = public["max_position_embeddings"] / original if factor is None else float(factor)
        return RopeScaling(
            kind="yarn",
            factor=factor,
            original_context=original,
            beta_fast=float(rope.get("beta_fast") or 32),
            beta_slow=float(rope.get("beta_slow") or 1),
            truncate=rope.get("truncate", True),
            attention_factor=_attention_factor(rope, factor),
        )
    raise CheckpointError(f"rope_type {kind!r} is not supported; known: default, linear, llama3, yarn")


def _attention_factor(rope: Mapping[str, Any], factor: float) -> float | None:
    """The stated one, or the ratio of two that DeepSeek's form states; None for YaRN's own."""
    stated, scale, scale_all = (rope.get(key) for key in ("attention_factor", "mscale", "mscale_all_dim"))
    if stated is not None:
        return float(stated)
    if scale and scale_all:
        return yarn_factor(factor, float(scale)) / yarn_factor(factor, float(scale_all))
    return None


def _window_from_public(family: str, public: Mapping[str, Any]) -> WindowConfig | None:
    windowed = family == "mistral" or (family.startswith("qwen") and public.get("use_sliding_window"))
    size = public.get("sliding_window", DEFAULT_WINDOW)
    if not windowed or size is None:
        return None
    num_layers = public["num_hidden_layers"]
    if family in ("mistral", "qwen3_moe"):  # their published code windows all layers or none
        return WindowConfig(size=size, layers=tuple(range(num_layers)))
    first = min(public.get("max_window_layers", DEFAULT_FULL_LAYERS), num_layers)
    types = public.get("layer_types") or ["full_attention"] * first + ["sliding_attention"] * (num_layers - first)
    layers = tuple(layer for layer, kind in enumerate(types[:num_layers]) if kind == "sliding_attention")
    return WindowConfig(size=size, layers=layers) if layers else None


def _minimax_moe(public: Mapping[str, Any]) -> MoEConfig:
    if public.get("scoring_func", "sigmoid") != "sigmoid":
        raise CheckpointError(f"scoring_func {public['scoring_func']!r} is not supported for minimax_m2; it is sigmoid")
    return MoEConfig(
        num_experts=public["num_local_experts"],
        top_k=public["num_experts_per_tok"],
        intermediate_size=public["intermediate_size"],
    )


def _qwen_moe(public: Mapping[str, Any]) -> MoEConfig:
    step, dense = public.get("decoder_sparse_step", 1), set(public.get("mlp_only_layers") or ())
    layers = range(public["num_hidden_layers"])
    return MoEConfig(
        num_experts=public.get("num_experts") or public["num_local_experts"],
        top_k=public["num_experts_per_tok"],
        intermediate_size=public["moe_intermediate_size"],
        scoring="softmax",
        normalize=bool(public.get("norm_topk_prob", False)),
        selection_bias=False,
        bias_update="none",
        dense_layers=tuple(layer for layer in layers if layer in dense or (layer + 1) % step),
    )


def to_public(config: ModelConfig) -> dict[str, Any]:
    """The public `config.json`; rejects a network that the family cannot express."""
    attention, moe = config.attention, config.moe
    if moe is None and config.family in ("minimax_m2", "qwen3_moe"):
        raise CheckpointError(f"the public {config.family} format cannot express a network without experts")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": attention.rope_theta}
    if attention.rotary_dim != attention.head_dim:
        rope["partial_rotary_factor"] = attention.rotary_dim / attention.head_dim
    if attention.rope_scaling is not None:
        rope |= _scaling_to_public(attention.rope_scaling)
    public: dict[str, Any] = {
        "architectures": [ARCHITECTURES[config.family]],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "rope_parameters": rope,
        "rope_theta": attention.rope_theta,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied_head,
        "max_position_embeddings": config.max_context,
        "initializer_range": config.init_std,
        "hidden_act": "silu",
        "intermediate_size": config.intermediate_size,
    }
    if moe is not None and config.family == "minimax_m2":
        public |= {
            "rotary_dim": attention.rotary_dim,
            "intermediate_size": moe.intermediate_size,
            "num_local_experts": moe.num_experts,
            "num_experts_per_tok": moe.top_k,
            "scoring_func": moe.scoring,
            "use_qk_norm": True,
            "use_routing_bias": True,
        }
    elif moe is not None:
        public |= {
            "num_experts": moe.num_experts,
            "num_experts_per_tok": moe.top_k,
            "moe_intermediate_size": moe.intermediate_size,
            "intermediate_size": config.intermediate_size or moe.intermediate_size,
            "norm_topk_prob": moe.normalize,
            "mlp_only_layers": list(moe.dense_layers),
            "decoder_sparse_step": 1,
        }
    public |= _window_to_public(config)
    _refuse_inexpressible(config, public)
    return public


def _window_to_public(config: ModelConfig) -> dict[str, Any]:
    window = config.attention.window
    if config.family == "mistral":  # null, because a reader takes an absent key for its default
        return {"sliding_window": None if window is None else window.size}
    if window is None:
        return {}
    kinds = ["sliding_attention" if config.is_windowed(i) else "full_attention" for i in range(config.num_layers)]
    return {
        "use_sliding_window": True,
        "sliding_window": window.size,
        "layer_types": kinds,
        "max_window_layers": config.num_layers,
    }


def _scaling_to_public(scaling: RopeScaling) -> dict[str, Any]:
    public: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "llama3":
        public |= {
            "low_freq_factor": scaling.low_frequency_factor,
            "high_freq_factor": scaling.high_frequency_factor,
            "original_max_position_embeddings": scaling.original_context,
        }
    if scaling.kind == "yarn":
        public |= {
            "original_max_position_embeddings": scaling.original_context,
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "truncate": scaling.truncate,
        }
        if scaling.attention_factor is not None:
            public["attention_factor"] = scaling.attention_factor
    return public


_PRIVATE_FIELDS = ("num_mtp", "float32_head")
"""Fields for training or drafting that do not change what the public network computes."""


def _refuse_inexpressible(config: ModelConfig, public: Mapping[str, Any]) -> None:
    """Checks that the public form, read back, is the same network."""
    back = from_public(public).model_dump()
    mine = config.model_dump()
    for name in _PRIVATE_FIELDS:
        back[name] = mine[name]
    if mine["moe"] and back["moe"]:
        for name in ("bias_update", "bias_rate", "aux_loss_weight"):
            back["moe"][name] = mine["moe"][name]
    if config.moe is not None and not config.moe.dense_layers:
        back["intermediate_size"] = mine["intermediate_size"]
    differing = _differences(mine, back)
    if differing:
        raise CheckpointError(f"the public {config.family} format cannot express {', '.join(differing)}")


def _differences(mine: Mapping[str, Any], back: Mapping[str, Any], prefix: str = "") -> list[str]:
    found = []
    for key, value in mine.items():
        other = back.get(key)
        if isinstance(value, dict) and isinstance(other, dict):
            found += _differences(value, other, f"{prefix}{key}.")
        elif value != other:
            found.append(prefix + key)
    return found
