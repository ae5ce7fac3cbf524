"""Reads a Hugging Face model folder: config.json and safetensors, one file or shards with an index.

`FolderSource` reads headers only. Tensors are then memory-mapped one at a time, and FP8 weights dequantised. Unreadable
files, and those of a policy version that are not what was published (manifest.py), raise a CheckpointError that names
the file.

FP8 weights have one scale per block of 128 × 128, as in the released M2 checkpoints:

    weight[r, c] = stored[r, c] · scale[r // 128, c // 128]

`stored` is float8_e4m3fn of shape (R, C); `scale` is stored beside it as `<name>_scale_inv`, of shape (⌈R/128⌉,
⌈C/128⌉): blocks at the lower and right edge may be partial. Products are computed in float32 and rounded once to the
requested dtype.
"""

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from m2forge.errors import CheckpointError
from m2forge.model import folder as fp8
from m2forge.model.config import ModelConfig
from m2forge.model.config_file import CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE, read_public, translate, weight_map
from m2forge.model.config_file import FP8_BLOCK as BLOCK
from m2forge.model.manifest import read_checked, read_manifest, refuse_changed, tensors_in
from m2forge.model.tensor_source import TOKEN_ID_KEYS, TensorHeader, TokenIds

SCALE_SUFFIX = "_scale_inv"


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the scales of a weight of this shape."""
    return tuple(-(-size // BLOCK) for size in shape)


def dequantize(stored_RC: Tensor, scale: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The weight in `dtype`. Uses temporary memory for at most one band of 128 rows."""
    if stored_RC.dim() != 2 or tuple(scale.shape) != scale_shape(tuple(stored_RC.shape)):
        raise ValueError(
            f"a weight of shape {list(stored_RC.shape)} with scales of shape {list(scale.shape)}; "
            f"expected a matrix and one scale per block of {BLOCK} × {BLOCK}"
        )
    weight_RC = torch.empty(stored_RC.shape, dtype=dtype, device=stored_RC.device)
    scale = scale.to(torch.float32)
    for band, scale_B in zip(range(0, stored_RC.shape[0], BLOCK), scale, strict=True):
        scale_C = scale_B.repeat_interleave(BLOCK)[: stored_RC.shape[1]]
        weight_RC[band : band + BLOCK] = stored_RC[band : band + BLOCK].to(torch.float32) * scale_C
    return weight_RC


_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
}


def read_identity(folder: Path) -> tuple[ModelConfig, TokenIds]:
    """The network's config and the ids of its special tokens, from config.json."""
    public = read_public(folder)
    ids = {key: public[key] for key in TOKEN_ID_KEYS if public.get(key) is not None}
    return translate(folder / CONFIG_FILE, public), ids


class FolderSource:
    """See `Source`. Its files stay open and memory-mapped while it lives. A file with a digest in the manifest is
    compared with it before the first tensor is read from it. Several threads may read."""

    def __init__(self, folder: Path) -> None:
        self.origin = str(folder)
        self.config, self.token_ids = read_identity(folder)
        paths = _weight_files(folder)
        self._files = {name: _open(path) for name, path in paths.items()}
        stated = read_manifest(folder).items()
        self._unchecked = {name: (paths[name], entry["digest"]) for name, entry in stated if name in paths}
        self._locks = {name: threading.Lock() for name in self._unchecked}
        self._file_of = _locate(folder, self._files)
        self._stored: dict[str, TensorHeader] = {}
        self._problems: list[str] = []
        for name in self._file_of:
            self._add_header(name)
        self.headers = self._without_scales()
        self.problems = tuple(self._problems)

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        tensor = self._get(name)
        if tensor.dtype != torch.float8_e4m3fn:
            return tensor
        return fp8.dequantize(tensor, self._get(name + fp8.SCALE_SUFFIX), dtype)

    def _get(self, name: str) -> Tensor:
        file_name = self._file_of[name]
        self._check(file_name)
        tensor: Tensor = self._files[file_name].get_tensor(name)
        return tensor

    @property
    def unchecked(self) -> dict[str, int]:
        """The files whose digests have not been compared yet, with their sizes in bytes."""
        return {name: path.stat().st_size for name, (path, _) in self._unchecked.items()}

    def read_file(self, file_name: str, memory: Tensor) -> dict[str, Tensor]:
        """Reads an unchecked file at once into `memory`, which has its size or more, and compares its digest; returns
        its tensors as views of this memory, without those in FP8."""
        tensors = tensors_in(read_checked(*self._unchecked[file_name], memory))
        return {
            name: tensor
            for name, tensor in tensors.items()
            if self._file_of[name] == file_name and tensor.dtype != torch.float8_e4m3fn
        }

    def _check(self, file_name: str) -> None:
        """Compare a file's digest, if it has one, for the first time."""
        if file_name in self._unchecked:
            with self._locks[file_name]:
                if (unchecked := self._unchecked.get(file_name)) is not None:
                    refuse_changed(*unchecked)
                    del self._unchecked[file_name]

    def _add_header(self, name: str) -> None:
        view = self._files[self._file_of[name]].get_slice(name)
        dtype = _DTYPES.get(view.get_dtype())
        if dtype is None:
            self._problems.append(f"{name} is stored as {view.get_dtype()}; expected one of {', '.join(_DTYPES)}")
        self._stored[name] = TensorHeader(tuple(view.get_shape()), dtype or torch.float32)

    def _without_scales(self) -> dict[str, TensorHeader]:
        """Merges each FP8 weight and its scales into one tensor, for which bfloat16 is precise enough."""
        headers = dict(self._stored)
        for name, header in self._stored.items():
            if header.dtype != torch.float8_e4m3fn:
                continue
            headers[name] = TensorHeader(header.shape, torch.bfloat16)
            scale = headers.pop(name + fp8.SCALE_SUFFIX, None)
            expected = fp8.scale_shape(header.shape)
            if scale is None:
                self._problems.append(
                    f"{name} is 8-bit but {name}{fp8.SCALE_SUFFIX}, shape {list(expected)}, is missing"
                )
            elif len(header.shape) != 2:
                self._problems.append(f"{name} is 8-bit with shape {list(header.shape)}; expected a matrix")
            elif scale.shape != expected:
                self._problems.append(
                    f"{name}{fp8.SCALE_SUFFIX} has shape {list(scale.shape)}, expected {list(expected)}"
                )
        return headers


# -- safetensors ------------------------------------------------------------------------------------------------------


def _weight_files(folder: Path) -> dict[str, Path]:
    """The safetensors files of the model by name; all exist."""
    if not (folder / INDEX_FILE).exists():
        if not (folder / WEIGHTS_FILE).exists():
            raise CheckpointError(
                f"{folder} holds neither {WEIGHTS_FILE} nor {INDEX_FILE}; other formats must be converted first"
            )
        return {WEIGHTS_FILE: folder / WEIGHTS_FILE}
    names = sorted(set(weight_map(folder).values()))
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise CheckpointError(f"{folder / INDEX_FILE} names files outside the folder: {', '.join(outside)}")
    absent = [name for name in names if not (folder / name).exists()]
    if absent:
        raise CheckpointError(f"{folder} lacks {', '.join(absent)}, which {INDEX_FILE} names; fetch the missing files")
    return {name: folder / name for name in names}


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a complete safetensors file: {error}; fetch it again") from error


def _locate(folder: Path, files: Mapping[str, Any]) -> dict[str, str]:
    """The file of each tensor. The files decide; the index only where two of them hold the same name."""
    indexed = weight_map(folder) if (folder / INDEX_FILE).exists() else {}
    file_of: dict[str, str] = {}
    for file_name, file in files.items():
        for name in file.keys():  # noqa: SIM118  (not a mapping: it has no iterator)
            if name not in file_of or indexed.get(name) == file_name:
                file_of[name] = file_name
    return file_of
