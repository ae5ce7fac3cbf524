"""Reads a Hugging Face model folder: config.json and safetensors, one file or shards with an index.

`FolderSource` reads headers only. Tensors are then memory-mapped one at a time, and FP8 weights dequantised. Unreadable
files raise a CheckpointError that names the file.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from m2forge.errors import CheckpointError, NotFoundError
from m2forge.model import fp8
from m2forge.model.config import ModelConfig
from m2forge.model.family import from_public
from m2forge.model.source import TOKEN_ID_KEYS, TensorHeader, TokenIds, list_problems

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_JSON_BYTES = 256 << 20
"""Size limit of a JSON file; the index of a model with 100,000 tensors has about ten million bytes."""

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
}


class FolderSource:
    """See `Source`. Its files stay open and memory-mapped while it lives."""

    def __init__(self, folder: Path) -> None:
        public = _read_public(folder)
        self.origin = str(folder)
        self.config = _translate(folder / CONFIG_FILE, public)
        self.token_ids: TokenIds = {key: public[key] for key in TOKEN_ID_KEYS if public.get(key) is not None}
        self._files = {name: _open(path) for name, path in _weight_files(folder).items()}
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
        tensor: Tensor = self._files[self._file_of[name]].get_tensor(name)
        return tensor

    def _add_header(self, name: str) -> None:
        view = self._files[self._file_of[name]].get_slice(name)
        dtype = _DTYPES.get(view.get_dtype())
        if dtype is None:
            self._problems.append(f"{name} is stored as {view.get_dtype()}; expected one of {', '.join(_DTYPES)}")
        self._stored[name] = TensorHeader(tuple(view.get_shape()), dtype or torch.float32)

    def _without_scales(self) -> dict[str, TensorHeader]:
        """Merges each FP8 weight and its scales into one tensor, for which bfloat16 is precise enough."""
        given = dict(self._stored)
        for name, header in self._stored.items():
            if header.dtype != torch.float8_e4m3fn:
                continue
            given[name] = TensorHeader(header.shape, torch.bfloat16)
            scale = given.pop(name + fp8.SCALE_SUFFIX, None)
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
        return given


def read_config(folder: Path) -> ModelConfig:
    """The config of the network in `folder`; does not read the weights."""
    return _translate(folder / CONFIG_FILE, _read_public(folder))


# -- config.json ------------------------------------------------------------------------------------------------------


def _read_public(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise NotFoundError(f"{folder} is not a folder; give the folder that holds {CONFIG_FILE}")
    public = _read_json(folder / CONFIG_FILE)
    _refuse_other_quantization(folder / CONFIG_FILE, public.get("quantization_config"))
    return public


def _read_json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ValueError(f"it has {path.stat().st_size} bytes, and {MAX_JSON_BYTES} are the most")
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist; a model folder needs it") from error
    except (ValueError, OSError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}; fetch it again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a JSON {type(content).__name__}, expected an object; fetch it again")
    return content


def _translate(path: Path, public: Mapping[str, Any]) -> ModelConfig:
    try:
        return from_public(public)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except KeyError as error:
        raise CheckpointError(f"{path}: the key {error} is missing; add it or fetch the file again") from error
    except ValidationError as error:
        raise CheckpointError(f"{path}: a value cannot be used: {list_problems(error)}") from error
    except (ValueError, TypeError, AttributeError, ArithmeticError) as error:
        # The file is the user's: any error that its values cause is an error of the file.
        raise CheckpointError(f"{path}: a value cannot be used: {error}") from error


def _refuse_other_quantization(path: Path, quantization: object) -> None:
    if not quantization:
        return
    settings = quantization if isinstance(quantization, dict) else {}
    method, block = settings.get("quant_method"), settings.get("weight_block_size")
    if method != "fp8" or block != [fp8.BLOCK, fp8.BLOCK]:
        raise CheckpointError(
            f"{path}: weights quantised by {method!r} with weight_block_size {block} are not supported; "
            f"use a checkpoint without quantisation, or fp8 with [{fp8.BLOCK}, {fp8.BLOCK}]"
        )


# -- safetensors ------------------------------------------------------------------------------------------------------


def _weight_files(folder: Path) -> dict[str, Path]:
    """The safetensors files of the model by name; all exist."""
    if not (folder / INDEX_FILE).exists():
        if not (folder / WEIGHTS_FILE).exists():
            raise CheckpointError(
                f"{folder} holds neither {WEIGHTS_FILE} nor {INDEX_FILE}; other formats must be converted first"
            )
        return {WEIGHTS_FILE: folder / WEIGHTS_FILE}
    names = sorted(set(_weight_map(folder).values()))
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise CheckpointError(f"{folder / INDEX_FILE} names files outside the folder: {', '.join(outside)}")
    absent = [name for name in names if not (folder / name).exists()]
    if absent:
        raise CheckpointError(f"{folder} lacks {', '.join(absent)}, which {INDEX_FILE} names; fetch what is missing")
    return {name: folder / name for name in names}


def _weight_map(folder: Path) -> dict[str, str]:
    weight_map = _read_json(folder / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{folder / INDEX_FILE} has no weight_map from tensors to files; fetch it again")
    return weight_map


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a whole safetensors file: {error}; fetch it again") from error


def _locate(folder: Path, files: Mapping[str, Any]) -> dict[str, str]:
    """The file of each tensor. The files decide; the index only where two of them hold the same name."""
    indexed = _weight_map(folder) if (folder / INDEX_FILE).exists() else {}
    file_of: dict[str, str] = {}
    for file_name, file in files.items():
        for name in file.keys():  # noqa: SIM118  (not a mapping: it has no iterator)
            if name not in file_of or indexed.get(name) == file_name:
                file_of[name] = file_name
    return file_of
