"""Resolves a preset's name, a TOML file or a model folder to a config."""

from collections.abc import Sequence
from pathlib import Path

from m2forge.config import build, load
from m2forge.errors import ConfigError, NotFoundError, suggest
from m2forge.model.config import ModelConfig
from m2forge.model.config_file import read_config
from m2forge.model.preset import PRESETS


def resolve_config(model: str, *, layers: int | None = None, overrides: Sequence[str] = ()) -> ModelConfig:
    """The config that `model` names, with `overrides` such as `"moe.top_k=4"`, truncated to its first `layers`."""
    config = _named(model, overrides)
    if layers is None:
        return config
    if not 1 <= layers <= config.num_layers:
        raise ConfigError(f"layers {layers}: {model} has {config.num_layers}; give a number from 1 to that")
    return config.with_layers(layers)


def _named(model: str, overrides: Sequence[str]) -> ModelConfig:
    path = Path(model)
    if model in PRESETS:
        return _overridden(PRESETS[model], overrides, f"preset {model}")
    if path.is_dir():
        return _overridden(read_config(path), overrides, model)
    if path.is_file():
        return load(ModelConfig, path, overrides)
    raise NotFoundError(
        f"{model!r} is neither a preset nor a TOML file or model folder that exists; presets: {suggest(model, PRESETS)}"
    )


def _overridden(config: ModelConfig, overrides: Sequence[str], origin: str) -> ModelConfig:
    return build(ModelConfig, config.model_dump(mode="json", exclude_none=True), overrides, origin)
