"""The network of a pre-training run: that of a preset, a TOML file or a folder with weights, found without torch."""

from pathlib import Path

from m2forge.corpus.manifest import read_manifest
from m2forge.errors import ConfigError
from m2forge.model.config import ModelConfig
from m2forge.model.preset import PRESETS, resolve_config
from m2forge.pretrain.config import PretrainConfig

VOCAB_MULTIPLE = 64
"""Vocabulary sizes are rounded up to a multiple of this, for faster matrix products."""


def network_config(config: PretrainConfig) -> ModelConfig:
    """The model configuration of a run, with the vocabulary of its corpus."""
    vocab_size = read_manifest(Path(config.corpus)).vocab_size
    if start_folder(config) is not None:
        network = resolve_config(config.model)
        if config.model_set:
            raise ConfigError(f"model_set changes a network that {config.model} has weights for; leave it out")
        if network.vocab_size < vocab_size:
            raise ConfigError(f"the corpus has {vocab_size} token ids, {config.model} knows {network.vocab_size}")
        return network
    rounded = -(-vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    return resolve_config(config.model, overrides=(*config.model_set, f"vocab_size={rounded}"))


def start_folder(config: PretrainConfig) -> Path | None:
    """The folder whose weights training starts from. A preset's name means the preset, even if such a folder exists."""
    folder = Path(config.model)
    return folder if config.model not in PRESETS and folder.is_dir() else None
