"""Pending weight updates: validated against the network on arrival, copied into it when due."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from m2forge.errors import CheckpointError, M2ForgeError
from m2forge.model.checkpoint import fill
from m2forge.model.config import ModelConfig
from m2forge.model.folder import FolderSource
from m2forge.model.source import refuse_misfits
from m2forge.model.transformer import Transformer
from m2forge.records import PolicyVersion

_TRAINING_FIELDS = {
    "init_std": True,
    "max_context": True,
    "moe": {"bias_update", "bias_rate", "aux_loss_weight"},
}
"""Config fields that do not change how the network computes."""


@dataclass(frozen=True)
class WeightUpdate:
    version: PolicyVersion
    fill: Callable[[Transformer], None]
    """Copies the weights into the network against which they were validated."""


def from_folder(model: Transformer, folder: Path, version: PolicyVersion) -> WeightUpdate:
    """The files stay open until the update is done, so the folder may be deleted before."""
    try:
        source = FolderSource(folder)
    except M2ForgeError:
        raise
    except Exception as error:
        # The weights have not changed yet, so a bad path or file is a rejected request, not an engine failure.
        raise CheckpointError(f"{folder} cannot be read ({type(error).__name__}: {error}); give another") from error
    if _arithmetic(source.config) != _arithmetic(model.config):
        raise CheckpointError(f"{folder} holds another network than the one being served; start an engine for it")
    refuse_misfits(source)
    return WeightUpdate(version, lambda served: fill(served, source))


def from_memory(
    model: Transformer, tensors: Mapping[str, Tensor], version: PolicyVersion, *, copies: bool = False
) -> WeightUpdate:
    """`copies`: clone the tensors, in case the caller changes them before the update is due."""
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    misfits = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if misfits:
        shown = "; ".join(
            f"{name}: expected {expected.get(name, 'none')}, received {found.get(name, 'none')}" for name in misfits[:8]
        )
        raise CheckpointError(f"{len(misfits)} tensors do not fit the network being served: {shown}")

    if copies:
        tensors = {name: tensor.detach().clone() for name, tensor in tensors.items()}

    @torch.no_grad()
    def copy(served: Transformer) -> None:
        state = served.state_dict()
        for name, tensor in tensors.items():
            state[name].copy_(tensor)

    return WeightUpdate(version, copy)


def _arithmetic(config: ModelConfig) -> dict[str, object]:
    return config.model_dump(exclude=_TRAINING_FIELDS)  # type: ignore[arg-type]
