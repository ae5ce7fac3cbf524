"""Configs by name: the released model and three small ones of the same architecture.

`resolve_config` takes a preset's name, a TOML file, a model folder or a hub id, and overrides.
"""

from collections.abc import Sequence
from pathlib import Path

from m2forge.config import build, load
from m2forge.errors import ConfigError, NotFoundError, suggest
from m2forge.model.config import AttentionConfig, ModelConfig, MoEConfig
from m2forge.model.config_file import read_config
from m2forge.model.hub import find_model, is_hub_id, refuse_revision

PRESETS: dict[str, ModelConfig] = {
    "m2": ModelConfig(
        vocab_size=200_064,
        hidden_size=3072,
        num_layers=62,
        attention=AttentionConfig(
            num_heads=48, num_kv_heads=8, head_dim=128, rotary_dim=64, rope_theta=5e6, qk_norm="flat"
        ),
        moe=MoEConfig(num_experts=256, top_k=8, intermediate_size=1536),
        max_context=196_608,
    ),
    "m2-mini": ModelConfig(
        vocab_size=32_000,
        hidden_size=1024,
        num_layers=12,
        attention=AttentionConfig(
            num_heads=16, num_kv_heads=4, head_dim=64, rotary_dim=32, rope_theta=5e6, qk_norm="flat"
        ),
        moe=MoEConfig(num_experts=64, top_k=8, intermediate_size=512),
        max_context=32_768,
    ),
    "m2-tiny": ModelConfig(
        vocab_size=1024,
        hidden_size=96,
        num_layers=4,
        attention=AttentionConfig(
            num_heads=12, num_kv_heads=2, head_dim=16, rotary_dim=8, rope_theta=5e6, qk_norm="flat"
        ),
        moe=MoEConfig(num_experts=64, top_k=8, intermediate_size=48),
        max_context=4096,
        num_mtp=1,
    ),
    # A minute is few steps: a shallow network gets more of them, with larger initial weights and faster expert
    # balancing.
    "m2-nano": ModelConfig(
        vocab_size=512,
        hidden_size=128,
        num_layers=2,
        attention=AttentionConfig(
            num_heads=4, num_kv_heads=2, head_dim=32, rotary_dim=16, rope_theta=1e5, qk_norm="flat"
        ),
        moe=MoEConfig(num_experts=8, top_k=2, intermediate_size=128, bias_rate=1e-2),
        max_context=1024,
        num_mtp=1,
        init_std=0.06,
    ),
}

DESCRIPTIONS = {
    "m2": "the released MiniMax-M2: 62 layers, 256 experts, top-8",
    "m2-mini": "1.3B total, 0.2B active: trains on one GPU",
    "m2-tiny": "M2 at 1/32 of its widths: a training step in a fifth of a second on two CPU cores",
    "m2-nano": "the demo's model: learns to write code-like text in a minute on two CPU cores",
}


def preset(name: str) -> ModelConfig:
    if name not in PRESETS:
        raise NotFoundError(f"unknown preset {name!r}; {suggest(name, PRESETS)}")
    return PRESETS[name]


def resolve_config(
    model: str, *, revision: str | None = None, layers: int | None = None, overrides: Sequence[str] = ()
) -> ModelConfig:
    """The config that `model` names, with `overrides` such as `"moe.top_k=4"`, truncated to its first `layers`.
    `revision`: of a hub model; only its config is fetched."""
    config = _named(model, revision, overrides)
    if layers is None:
        return config
    if not 1 <= layers <= config.num_layers:
        raise ConfigError(f"layers {layers}: {model} has {config.num_layers}; give a number from 1 to that")
    return config.with_layers(layers)


def _named(model: str, revision: str | None, overrides: Sequence[str]) -> ModelConfig:
    if is_hub_id(model):
        return _overridden(read_config(find_model(model, revision, "config")), overrides, model)
    refuse_revision(model, revision)
    path = Path(model)
    if model in PRESETS:
        return _overridden(PRESETS[model], overrides, f"preset {model}")
    if path.is_dir():
        return _overridden(read_config(path), overrides, model)
    if path.is_file():
        return load(ModelConfig, path, overrides)
    raise NotFoundError(
        f"{model!r} is neither a preset nor a TOML file or model folder that exists, nor a hub id (OWNER/NAME); "
        f"presets: {suggest(model, PRESETS)}"
    )


def _overridden(config: ModelConfig, overrides: Sequence[str], origin: str) -> ModelConfig:
    return build(ModelConfig, config.model_dump(mode="json", exclude_none=True), overrides, origin)
