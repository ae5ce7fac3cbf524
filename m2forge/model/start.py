"""The weights that training starts from, or resumes from: those of a folder, or drawn ones.

A network is built without memory, divided among ranks where there are several, and then filled with the rows that this
process holds: a rank that trains a part of a network reads and holds no more than that part.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from m2forge.model.architecture import public_parts
from m2forge.model.build import empty, skeleton
from m2forge.model.checkpoint import open_source
from m2forge.model.config import LoRAConfig, ModelConfig
from m2forge.model.config_file import is_sharded_folder
from m2forge.model.lora import (
    add_adapters,
    base_of,
    draw_adapters,
    fill_adapters,
    is_adapter,
    is_adapter_folder,
    read_lora,
)
from m2forge.model.rows import Rows, draw_rows, fill_rows, whole
from m2forge.model.tensor_source import TokenIds, refuse_misfits
from m2forge.model.transformer import Transformer


@dataclass(frozen=True)
class Start:
    config: ModelConfig
    folder: Path | None = None
    """Model folder or GGUF file with the weights; None: they are drawn."""
    seed: int = 0
    """Seed of the random initial weights, where there is no folder."""
    token_ids: TokenIds = field(default_factory=dict)
    lora: LoRAConfig | None = None
    """Adapters, trained in place of the weights."""
    adapter: Path | None = None
    """Folder of the adapters to resume from; None: they change nothing yet."""

    def network(self, device: torch.device | str, dtype: torch.dtype) -> Transformer:
        """The network without its weights; on the meta device without memory for them."""
        is_meta = torch.device(device).type == "meta"
        model = skeleton(self.config).to(dtype) if is_meta else empty(self.config, device, dtype)
        model.token_ids = self.token_ids
        if self.lora is not None:
            assert self.folder is not None
            add_adapters(model, self.lora, self.folder)
        return model

    def fill(self, held: Mapping[str, Rows]) -> None:
        """Give the rows that this process holds of each tensor of the network's state their values."""
        base = {name: rows for name, rows in held.items() if not is_adapter(name)}
        if self.folder is None:
            draw_rows(base, self.config.init_std, self.seed)
        elif is_sharded_folder(self.folder) and not is_adapter_folder(self.folder):
            from m2forge.model.sharded_folder import ShardedFolder

            ShardedFolder(self.folder).read(base)
        else:
            source = open_source(self.folder)
            fill_rows(base, public_parts(source.config), source.read)
        if self.adapter is not None:
            fill_adapters(held, self.adapter, self.config)
        elif self.lora is not None:
            draw_adapters(held, self.lora.seed)

    def build(self, device: torch.device | str, dtype: torch.dtype) -> Transformer:
        """The whole network."""
        model = self.network(device, dtype)
        self.fill(whole(model.state_dict()))
        return model


def start_from(folder: Path, lora: LoRAConfig | None = None) -> Start:
    """Start from the weights of a folder, merged with its base if it holds an adapter or a delta."""
    source = open_source(folder)
    refuse_misfits(source)
    return Start(source.config, folder, token_ids=source.token_ids, lora=lora)


def resume_from(folder: Path) -> Start:
    """Resume training from `folder`: as `start_from`, but an adapter is not merged."""
    merged = start_from(folder)
    if not is_adapter_folder(folder):
        return merged
    return Start(merged.config, base_of(folder), token_ids=merged.token_ids, lora=read_lora(folder), adapter=folder)
