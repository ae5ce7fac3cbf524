"""Networks stored as the elements in which they differ from another folder's.

    config.json            as in every model folder
    delta.json             {"base": the folder beside this one}
    delta*.safetensors     for each tensor that changed: NAME/gaps and NAME/values, or NAME whole where that is smaller
    manifest.json          the digests of these files, one for each rank that wrote; folders from before there were
                           manifests have one file, and its digest is in delta.json

Values are the stored bits of the changed elements, in order. A gap is the number of unchanged elements before a changed
one, as a byte; 255 means 255 elements and that the gap continues in the next byte. With one element in 100 changed a
bfloat16 takes 3.1 bytes.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from m2forge.errors import CheckpointError
from m2forge.model.config_file import read_json
from m2forge.model.folder import read_identity
from m2forge.model.manifest import NO_IMAGES, read_manifest, received_tensors, refuse_changed
from m2forge.model.tensor_source import Source, TensorHeader

DELTA_CONFIG_FILE = "delta.json"
DELTA_FILE = "delta.safetensors"
GAPS, VALUES = "/gaps", "/values"
LONG = 255
"""The byte of a gap that continues in the next byte."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def find_changes(old: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """The gaps and values of the elements whose bits differ; both tensors are contiguous, of one shape and dtype."""
    bits = _BITS[new.itemsize]
    indices = torch.nonzero(old.view(-1).view(bits) != new.view(-1).view(bits)).view(-1)
    gaps = torch.diff(indices, prepend=indices.new_full((1,), -1)) - 1
    num_long = gaps // LONG
    encoded = torch.full((int(num_long.sum()) + len(gaps),), LONG, dtype=torch.uint8)
    encoded[torch.cumsum(num_long + 1, 0) - 1] = (gaps % LONG).to(torch.uint8)
    return encoded, new.view(-1)[indices]


def find_indices(gaps: Tensor) -> Tensor:
    """Flat indices of the changed elements."""
    is_last = gaps != LONG
    return (torch.cumsum(gaps.to(torch.int64) + is_last, 0) - 1)[is_last]


def write_delta(path: Path, published: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Write into the file `path` how `tensors` differ from `published`, which hold them afterwards."""
    changed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        old, new = published[name], tensor.detach().to("cpu", published[name].dtype).contiguous()
        gaps, values = find_changes(old, new)
        if gaps.nbytes + values.nbytes >= new.nbytes:
            changed[name] = new.clone()
        elif len(values):
            changed[name + GAPS], changed[name + VALUES] = gaps, values
        old.copy_(new)
    save_file(changed, path, metadata={"format": "pt"})
    path.chmod(path.parent.stat().st_mode & 0o666)


def is_delta_folder(path: Path) -> bool:
    return (path / DELTA_CONFIG_FILE).is_file()


def delta_base(folder: Path) -> Path:
    """The folder that the one in `folder` changes."""
    path = folder / DELTA_CONFIG_FILE
    named = read_json(path).get("base")
    if not isinstance(named, str) or Path(named).name != named or not (folder.parent / named).is_dir():
        raise CheckpointError(f"{path}: its base {named!r} is not beside it; copy that folder too")
    return folder.parent / named


class DeltaSource:
    """See `Source`: the base with this folder's changes. The changes are in memory; the base's files stay open."""

    def __init__(self, folder: Path, base: Source, images: Mapping[str, Tensor] = NO_IMAGES) -> None:
        """`images`: files of the folder that came by broadcast, by name."""
        self.origin, self._base = str(folder), base
        self._base_folder = delta_base(folder)
        self.config, self.token_ids = read_identity(folder)
        self.headers: Mapping[str, TensorHeader] = base.headers
        self._whole, self._changes, problems = _read_changes(folder, base.headers, images)
        self.problems = (*base.problems, *problems)

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        if (whole := self._whole.get(name)) is not None:
            return whole
        weight = self._base.read(name, dtype)
        if (change := self._changes.get(name)) is None:
            return weight
        indices, values = change
        weight = weight.clone(memory_format=torch.contiguous_format)
        weight.view(-1)[indices] = values
        return weight

    def since(self, folder: Path) -> "tuple[DeltaSource, ...] | None":
        """The deltas that lead from `folder` to this one, in order; None if this one does not build on it."""
        if self._base_folder == folder:
            return (self,)
        before = self._base.since(folder) if isinstance(self._base, DeltaSource) else None
        return None if before is None else (*before, self)

    @torch.no_grad()
    def change(self, name: str, weight: Tensor) -> None:
        """Turn `weight`, the base's tensor on any device, in any dtype and with any strides, into this folder's."""
        if (whole := self._whole.get(name)) is not None:
            weight.copy_(whole)
        elif (change := self._changes.get(name)) is not None:
            indices, values = (tensor.to(weight.device) for tensor in change)
            places = (indices,) if weight.is_contiguous() else torch.unravel_index(indices, weight.shape)
            (weight.view(-1) if weight.is_contiguous() else weight)[places] = values.to(weight.dtype)


def _read_changes(
    folder: Path, headers: Mapping[str, TensorHeader], images: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, tuple[Tensor, Tensor]], list[str]]:
    """The tensors stored whole, the indices and values of the others, and one line per tensor that does not fit."""
    digests = {name: entry["digest"] for name, entry in read_manifest(folder).items()}
    if not digests:
        digests = {DELTA_FILE: read_json(folder / DELTA_CONFIG_FILE).get("digest")}
    stored: dict[str, Tensor] = {}
    for name, expected in digests.items():
        stored |= _read_file(folder / Path(name).name, expected, images)
    whole: dict[str, Tensor] = {}
    changes: dict[str, tuple[Tensor, Tensor]] = {}
    problems: list[str] = []
    for key, tensor in stored.items():
        name = key.removesuffix(GAPS).removesuffix(VALUES)
        if (header := headers.get(name)) is None:
            problems.append(f"{key} changes no tensor of the base")
        elif key == name:
            whole[name] = tensor
            if (tuple(tensor.shape), tensor.dtype) != header:
                problems.append(f"{name} is of shape {list(tensor.shape)}, {tensor.dtype}; the base's is {header}")
        elif key.endswith(GAPS):
            indices, values = find_indices(tensor), stored.get(name + VALUES)
            if values is None or values.dtype != header.dtype or values.shape != indices.shape:
                problems.append(f"{name} has {len(indices)} gaps and other values than these")
            elif len(indices) and int(indices[-1]) >= torch.Size(header.shape).numel():
                problems.append(f"{name} has a changed element {int(indices[-1])} beyond its end")
            else:
                changes[name] = (indices, values)
    return whole, changes, problems


def _read_file(path: Path, expected: object, images: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    if (received := received_tensors(path, expected, images)) is not None:
        return received
    try:
        refuse_changed(path, expected)
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; copy the folder again") from error
