"""Weight sources: anything with a config that can return tensors by their public names.

A `Source` knows every tensor's shape and dtype before any is read. `refuse_misfits` compares them with the config and
raises one error that names every mismatch, before memory is allocated for a model that cannot load. A config that
requires many more tensors than there are is rejected before its network is built.
"""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from m2forge.errors import CheckpointError
from m2forge.model.architecture import public_parts
from m2forge.model.build import skeleton
from m2forge.model.config import ModelConfig
from m2forge.model.transformer import Transformer

TokenIds = Mapping[str, int | list[int] | None]
TOKEN_ID_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")

_NUM_SHOWN = 20
_MAX_MISSING = 1000
"""Missing tensors tolerated, beyond as many as there are, before the config is taken for another model's."""


class TensorHeader(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype
    """The stored dtype; for a quantised tensor, one that holds its values well enough."""


class Source(Protocol):
    @property
    def origin(self) -> str:
        """Name of the source in error messages."""
        ...

    @property
    def config(self) -> ModelConfig: ...

    @property
    def headers(self) -> Mapping[str, TensorHeader]:
        """Headers of every readable tensor, by public name."""
        ...

    @property
    def problems(self) -> tuple[str, ...]:
        """Problems of single tensors other than presence and shape, one line each."""
        ...

    @property
    def token_ids(self) -> TokenIds:
        """Ids of the known special tokens, under the keys of TOKEN_ID_KEYS."""
        ...

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """One tensor for use in `dtype`: a quantised one is dequantised and rounded once to `dtype`; others keep their
        stored dtype."""
        ...


class ModelSource:
    """A network in memory, as the source of its public tensors."""

    problems: tuple[str, ...] = ()

    def __init__(self, model: Transformer) -> None:
        self.origin = "the model"
        self.config = model.config
        self.token_ids: TokenIds = model.token_ids
        self._state: Mapping[str, Tensor] = model.state_dict()
        self._parts = dict(public_parts(model.config))
        views = ((name, self._view(name)) for name in self._parts)
        self.headers = {name: TensorHeader(tuple(t.shape), t.dtype) for name, t in views}

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        return self._view(name)

    def _view(self, name: str) -> Tensor:
        part = self._parts[name]
        return part.of(self._state[part.name])


def usual_dtype(source: Source) -> torch.dtype:
    """The dtype of most weights."""
    num_elements: Counter[torch.dtype] = Counter()
    for header in source.headers.values():
        num_elements[header.dtype] += torch.Size(header.shape).numel()
    return num_elements.most_common(1)[0][0]


def refuse_misfits(source: Source) -> None:
    """Raise one CheckpointError that names every missing, extra, misshapen or unusable tensor, if there is any."""
    found, most = source.headers, 2 * len(source.headers) + _MAX_MISSING
    parts = dict(itertools.islice(public_parts(source.config), most + 1))
    if len(parts) > most:
        raise CheckpointError(
            f"{source.origin}: its configuration ({source.config.family}, {source.config.num_layers} layers) asks for "
            f"more than {most} tensors, and there are {len(found)}; fetch the configuration that belongs to the weights"
        )
    state = skeleton(source.config).state_dict()
    expected = {name: tuple(part.of(state[part.name]).shape) for name, part in parts.items()}
    missing = [f"{name}, shape {list(shape)}" for name, shape in expected.items() if name not in found]
    extra = [
        f"{name}, shape {list(header.shape)}"
        for name, header in found.items()
        if name not in expected and not _is_redundant(name, source.config)
    ]
    misshapen = [
        f"{name} has shape {list(found[name].shape)}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name].shape != shape
    ]
    kinds = {"missing": missing, "extra": extra, "misshapen": misshapen, "unusable": source.problems}
    num_misfits = sum(len(lines) for lines in kinds.values())
    if num_misfits == 0:
        return
    tensors = f"{num_misfits} tensor{'s do' if num_misfits > 1 else ' does'} not fit"
    raise CheckpointError(
        "\n  ".join(
            [
                f"{source.origin}: {tensors} its configuration ({source.config.family})",
                *(line for kind, lines in kinds.items() for line in _listed(kind, lines)),
                "nothing was loaded; correct the configuration, or fetch the weights that belong to it",
            ]
        )
    )


def _is_redundant(name: str, config: ModelConfig) -> bool:
    """Whether the tensor is redundant: older exporters wrote it although the config determines it."""
    return (config.tied_head and name == "lm_head.weight") or name.endswith(".rotary_emb.inv_freq")


def _listed(kind: str, lines: Sequence[str]) -> list[str]:
    shown = [f"{kind}: {line}" for line in lines[:_NUM_SHOWN]]
    if len(lines) > _NUM_SHOWN:
        shown.append(f"{kind}: … and {len(lines) - _NUM_SHOWN} more")
    return shown
