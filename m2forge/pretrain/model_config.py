"""The network of a pre-training run, found without torch: that of a preset, a TOML file, a folder or a hub model."""

from pathlib import Path

from m2forge.corpus.manifest import read_manifest
from m2forge.errors import ConfigError
from m2forge.model.config import ModelConfig
from m2forge.model.hub import find_folder, is_hub_id
from m2forge.model.preset import PRESETS, resolve_config
from m2forge.pretrain.config import PretrainConfig

VOCAB_MULTIPLE = 64
"""Vocabulary sizes are rounded up to a multiple of this, for faster matrix products."""


def network_config(config: PretrainConfig) -> ModelConfig:
    """The model configuration of a run, with the vocabulary of its corpus."""
    vocab_size = read_manifest(Path(config.corpus)).vocab_size
    if has_weights(config):
        network = resolve_config(config.model, revision=config.revision)
        if config.model_set:
            raise ConfigError(f"model_set changes a network that {config.model} has weights for; leave it out")
        if network.vocab_size < vocab_size:
            raise ConfigError(f"the corpus has {vocab_size} token ids, {config.model} knows {network.vocab_size}")
        return network
    rounded = -(-vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    overrides = (*config.model_set, f"vocab_size={rounded}")
    return resolve_config(config.model, revision=config.revision, overrides=overrides)


def has_weights(config: PretrainConfig) -> bool:
    """Whether training starts from the weights of a folder or hub model. A preset's name means the preset, even if such
    a folder exists."""
    return config.model not in PRESETS and (Path(config.model).is_dir() or is_hub_id(config.model))


def start_folder(config: PretrainConfig) -> Path | None:
    """The folder whose weights training starts from."""
    return find_folder(config.model, config.revision) if has_weights(config) else None
