"""Reads the JSON files of a model folder, without the weights and without torch.

A file that cannot be used raises a CheckpointError that names it.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from m2forge.errors import CheckpointError, NotFoundError
from m2forge.model.architecture import from_public
from m2forge.model.config import ModelConfig

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MERGED_FOLDER = "merged"
"""Folder in that of an adapter with the merged model, for programs that do not merge it."""
METADATA_FILE = ".metadata"
"""Index of the weights that several ranks wrote (sharded_folder.py)."""
MAX_JSON_BYTES = 256 << 20
"""Size limit of a JSON file; the index of a model with 100,000 tensors has about ten million bytes."""
FP8_BLOCK = 128
"""Rows and columns of a block of FP8 weights that share one scale."""


def read_config(folder: Path) -> ModelConfig:
    """The config of the network in `folder`; does not read the weights."""
    return translate(folder / CONFIG_FILE, read_public(folder))


def read_public(folder: Path) -> dict[str, Any]:
    """The contents of a folder's config.json."""
    if not folder.is_dir():
        raise NotFoundError(f"{folder} is not a folder; give the folder that holds {CONFIG_FILE}")
    public = read_json(folder / CONFIG_FILE)
    _refuse_other_quantization(folder / CONFIG_FILE, public.get("quantization_config"))
    return public


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of a model folder."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ValueError(f"it has {path.stat().st_size} bytes, at most {MAX_JSON_BYTES} are allowed")
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist; a model folder needs it") from error
    except (ValueError, OSError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}; fetch it again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a JSON {type(content).__name__}, expected an object; fetch it again")
    return content


def is_sharded_folder(folder: Path) -> bool:
    return (folder / METADATA_FILE).is_file()


def whole_folder(folder: Path) -> Path:
    """The folder from which a program that merges no adapter reads the model in `folder`."""
    return folder / MERGED_FOLDER if (folder / MERGED_FOLDER).is_dir() else folder


def weight_map(folder: Path) -> dict[str, str]:
    """The file of each tensor, as the index of a folder with several files says."""
    names = read_json(folder / INDEX_FILE).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise CheckpointError(f"{folder / INDEX_FILE} has no weight_map from tensors to files; fetch it again")
    return names


def translate(path: Path, public: Mapping[str, Any]) -> ModelConfig:
    """The network that the contents of `path` describe."""
    try:
        return from_public(public)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except KeyError as error:
        raise CheckpointError(f"{path}: the key {error} is missing; add it or fetch the file again") from error
    except ValidationError as error:
        raise CheckpointError(f"{path}: invalid value: {list_problems(error)}") from error
    except (ValueError, TypeError, AttributeError, ArithmeticError) as error:
        # The file is the user's: any error that its values cause is an error of the file.
        raise CheckpointError(f"{path}: invalid value: {error}") from error


def _refuse_other_quantization(path: Path, quantization: object) -> None:
    if not quantization:
        return
    settings = quantization if isinstance(quantization, dict) else {}
    method, block = settings.get("quant_method"), settings.get("weight_block_size")
    if method != "fp8" or block != [FP8_BLOCK, FP8_BLOCK]:
        raise CheckpointError(
            f"{path}: weights quantised by {method!r} with weight_block_size {block} are not supported; "
            f"use a checkpoint without quantisation, or fp8 with [{FP8_BLOCK}, {FP8_BLOCK}]"
        )


def list_problems(error: ValidationError) -> str:
    """The invalid fields, in one line."""
    return "; ".join(f"{'.'.join(map(str, e['loc'])) or 'the network'}: {e['msg']}" for e in error.errors())
