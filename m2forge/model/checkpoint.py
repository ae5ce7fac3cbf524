"""Loads networks from model folders and saves them.

The only format on disk is the Hugging Face folder: config.json and safetensors under the family's public names. Loading
checks all names and shapes before it allocates memory, then copies tensor by tensor from the memory map, so that it
needs little more memory than the model. Saving writes a temporary folder and renames it: the result is complete or
absent.

Settings that only we use (multi-token prediction, how the router's bias is updated) are in config.json under the key
`m2forge`, which other programs ignore. A network that its family cannot express is saved with `model_type` "m2forge",
so that no other program misreads it.
"""

import json
import logging
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from m2forge.errors import CheckpointError
from m2forge.files import staged_folder, write_atomic
from m2forge.model.architecture import CONFIG_KEY, public_parts, to_public
from m2forge.model.build import empty
from m2forge.model.config import ModelConfig
from m2forge.model.config_file import CONFIG_FILE, MERGED_FOLDER, WEIGHTS_FILE, is_sharded_folder
from m2forge.model.delta import (
    DELTA_CONFIG_FILE,
    DELTA_FILE,
    DeltaSource,
    delta_base,
    is_delta_folder,
    write_delta,
)
from m2forge.model.folder import FolderSource
from m2forge.model.gguf_file import GGUF_SUFFIX, GGUFSource
from m2forge.model.lora import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_FILE,
    AdapterSource,
    adapter_json,
    adapter_tensors,
    base_of,
    is_adapter_folder,
    write_adapter,
    write_tensors,
)
from m2forge.model.manifest import (
    NO_IMAGES,
    NUM_THREADS,
    Entry,
    describe,
    write_manifest,
)
from m2forge.model.safetensors_file import Written, plan_files, write_files, write_index, write_shards
from m2forge.model.tensor_source import (
    TOKEN_ID_KEYS,
    ModelSource,
    Source,
    TensorHeader,
    TokenIds,
    refuse_misfits,
    usual_dtype,
)
from m2forge.model.transformer import Transformer
from m2forge.text.tokenizer import TEMPLATES_FOLDER

MAX_SHARD_BYTES = 5_000_000_000
VERSION_SHARD_BYTES, MOST_VERSION_SHARDS = 1 << 25, 64
"""Files of a policy version are written and read several at a time, and broadcast while those after them are written.
"""
WHOLE_PREFIX = "model"
"""How the names of files with whole tensors begin."""
_log = logging.getLogger(__name__)


def open_source(path: Path, images: Mapping[str, Tensor] = NO_IMAGES) -> Source:
    """The weights in a model folder, an adapter or delta folder, merged with its base, or a GGUF file. A model folder
    may be the one of a checkpoint, whichever ranks wrote it. `images`: files of an adapter or delta folder
    that came by broadcast, by name."""
    folders = [path]
    while (base := _base(folders[-1])) is not None:
        if base in folders:
            raise CheckpointError(f"{folders[-1]}: its base {base} builds on this one")
        folders.append(base)
    last = folders.pop()
    source = _open_last(last)
    for folder in reversed(folders):
        found = images if folder == path else NO_IMAGES
        if is_adapter_folder(folder):
            source = AdapterSource(folder, source, found)
        else:
            source = DeltaSource(folder, source, found)
    return source


def _open_last(path: Path) -> Source:
    if is_sharded_folder(path):
        from m2forge.model.sharded_folder import ShardedSource

        return ShardedSource(path)
    return GGUFSource(path) if path.suffix == GGUF_SUFFIX and path.is_file() else FolderSource(path)


def _base(folder: Path) -> Path | None:
    if is_adapter_folder(folder):
        return base_of(folder)
    return delta_base(folder) if is_delta_folder(folder) else None


def load_model(path: Path, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> Transformer:
    """The network in a model folder or GGUF file, on `device`, in `dtype`, by default the dtype of most stored weights
    (FP8 counts as bfloat16). Selection biases stay in at least float32."""
    source = open_source(path)
    refuse_misfits(source)
    model = empty(source.config, device, dtype or usual_dtype(source))
    model.token_ids = source.token_ids
    fill(model, source)
    return model


def save_model(
    model: Transformer,
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    public_only: bool = False,
    companions: tuple[Path, ...] = (),
) -> Written:
    """Write `model` to `folder`, which must be absent or empty, with copies of `companions` beside the weights.
    `public_only` omits everything specific to us and rejects a network that the public family cannot express. A network
    with adapters is saved as these and the name of its base (lora.py)."""
    if model.lora is not None:
        return _save_adapter(model, folder, dtype, companions)
    return write_model(
        ModelSource(model),
        folder,
        dtype=dtype,
        max_shard_bytes=max_shard_bytes,
        public_only=public_only,
        companions=companions,
    )


def _save_adapter(model: Transformer, folder: Path, dtype: torch.dtype | None, companions: tuple[Path, ...]) -> Written:
    source = ModelSource(model)
    with staged_folder(folder) as partial:
        written = write_adapter(model, partial, dtype)
        write_atomic(
            partial / CONFIG_FILE, _config_json(source.token_ids, source.config, dtype or usual_dtype(source), False)
        )
        _copy_companions(companions, partial)
    return written


def write_identity(model: Transformer, folder: Path, companions: tuple[Path, ...] = ()) -> None:
    """Write all of a model folder but the weights, which the ranks that hold them write."""
    if model.lora is not None:
        write_atomic(folder / ADAPTER_CONFIG_FILE, adapter_json(model))
    content = _config_json(model.token_ids, model.config, model.embedding.weight.dtype, public_only=False)
    write_atomic(folder / CONFIG_FILE, content)
    _copy_companions(companions, folder)


def public_tensors(model: Transformer) -> dict[str, Tensor]:
    """Views of the tensors of a network that is held whole, by their public names; of one with adapters, these."""
    if model.lora is not None:
        return dict(adapter_tensors(model))
    source = ModelSource(model)
    return {name: source.read(name, header.dtype) for name, header in source.headers.items()}


def write_share(
    model: Transformer,
    tensors: Mapping[str, Tensor],
    folder: Path,
    rank: int | None = None,
    published: Mapping[str, Tensor] | None = None,
) -> Iterator[Path]:
    """Write one rank's share of a version's tensors into `folder`, by default all of them: whole, or as they differ
    from `published`, which hold them afterwards. Yields each file once it is complete."""
    if model.lora is not None:
        if tensors:
            write_tensors({name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}, folder)
            yield folder / ADAPTER_FILE
    elif published is not None:
        path = folder / (DELTA_FILE if rank is None else f"delta-rank{rank:05d}.safetensors")
        write_delta(path, published, tensors)
        yield path
    else:
        headers = {name: TensorHeader(tuple(t.shape), _written_dtype(name, t.dtype)) for name, t in tensors.items()}

        def read(name: str, dtype: torch.dtype) -> Tensor:
            return tensors[name].detach()

        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        shard_bytes = max(VERSION_SHARD_BYTES, num_bytes // MOST_VERSION_SHARDS)
        yield from write_files(folder, plan_files(headers, shard_bytes, rank), headers, read)


def complete_version(
    model: Transformer, folder: Path, files: Mapping[str, Entry], base: str | None, companions: tuple[Path, ...] = ()
) -> None:
    """Write all of a version but the weights, which are in `files`. `base`: the folder beside it that they change; None
    if they are whole."""
    if base is not None:
        write_atomic(folder / DELTA_CONFIG_FILE, json.dumps({"base": base}) + "\n")
    elif WEIGHTS_FILE not in files and model.lora is None:
        spans = [found["data_offsets"] for entry in files.values() for found in entry["slices"].values()]
        num_bytes = sum(stop - start for start, stop in spans)
        write_index(folder, {name: entry["slices"] for name, entry in files.items()}, num_bytes)
    write_manifest(folder, files)
    write_identity(model, folder, companions)


def write_merged(model: Transformer, folder: Path, companions: tuple[Path, ...] = ()) -> None:
    """Write the model that `folder`, a version of `model`, has with its adapter merged, tensor by tensor, beside the
    adapter."""
    merged, dtype = folder / MERGED_FOLDER, model.embedding.weight.dtype
    write_model(open_source(folder), merged, dtype=dtype, max_shard_bytes=VERSION_SHARD_BYTES, companions=companions)
    paths = sorted(merged.glob("*.safetensors"))
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        write_manifest(merged, {path.name: entry for path, entry in zip(paths, pool.map(describe, paths), strict=True)})


def copy_model(source: Path, folder: Path, companions: tuple[Path, ...] = ()) -> None:
    """Copy a model folder. What ranks wrote becomes an ordinary one, tensor by tensor; an adapter stays an adapter."""
    if not is_sharded_folder(source):
        with staged_folder(folder) as partial:
            ignored = shutil.ignore_patterns(MERGED_FOLDER) if is_adapter_folder(source) else None
            shutil.copytree(source, partial, dirs_exist_ok=True, ignore=ignored)
    elif is_adapter_folder(source):
        with staged_folder(folder) as partial:
            write_tensors(AdapterSource(source, open_source(base_of(source))).tensors, partial)
            for name in (CONFIG_FILE, ADAPTER_CONFIG_FILE):
                write_atomic(partial / name, (source / name).read_bytes())
            _copy_companions(companions, partial)
    else:
        write_model(open_source(source), folder, companions=companions)


def _copy_companions(companions: tuple[Path, ...], folder: Path) -> None:
    for path in companions:
        beside = folder / TEMPLATES_FOLDER if path.parent.name == TEMPLATES_FOLDER else folder
        beside.mkdir(exist_ok=True)
        write_atomic(beside / path.name, path.read_bytes())


@torch.no_grad()
def fill(model: Transformer, source: Source, loaded: Path | None = None) -> None:
    """Copy every tensor of `source`, which must match, into the weights of `model`. If `model` holds the weights of the
    folder `loaded`, and deltas lead from there to `source`, only the changed elements are copied."""
    state = model.state_dict()
    deltas = deltas_since(source, loaded)
    for name, part in public_parts(model.config):
        weight = part.of(state[part.name])
        if deltas is None:
            weight.copy_(source.read(name, weight.dtype))
        else:
            for delta in deltas:
                delta.change(name, weight)


def deltas_since(source: Source, loaded: Path | None) -> tuple[DeltaSource, ...] | None:
    """What leads from the weights of the folder `loaded` to those of `source`; None if only all of them do."""
    return source.since(loaded) if loaded is not None and isinstance(source, DeltaSource) else None


def write_model(
    source: Source,
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    public_only: bool = False,
    companions: tuple[Path, ...] = (),
) -> Written:
    """Stream a `source` that matches its config into `folder`, with copies of `companions` beside it."""
    config = source.config.model_copy(update={"num_mtp": 0}) if public_only else source.config
    headers = _written_headers(source, config, dtype)
    content = _config_json(source.token_ids, config, dtype or usual_dtype(source), public_only)
    with staged_folder(folder) as partial:
        written = write_shards(partial, headers, source.read, max_shard_bytes)
        write_atomic(partial / CONFIG_FILE, content)
        _copy_companions(companions, partial)
    return written


def _written_headers(source: Source, config: ModelConfig, dtype: torch.dtype | None) -> dict[str, TensorHeader]:
    return {
        name: TensorHeader(source.headers[name].shape, _written_dtype(name, dtype or source.headers[name].dtype))
        for name, _ in public_parts(config)
    }


def _written_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    if name.endswith("e_score_correction_bias"):
        return torch.promote_types(dtype, torch.float32)
    return dtype


def _config_json(token_ids: TokenIds, config: ModelConfig, dtype: torch.dtype, public_only: bool) -> str:
    try:
        public = to_public(config)
    except CheckpointError:
        if public_only:
            raise
        public = {"model_type": CONFIG_KEY}
    # Written even if unknown: otherwise a reader would use the ids of another model's vocabulary.
    ids: dict[str, Any] = {key: token_ids.get(key) for key in TOKEN_ID_KEYS}
    ours = {} if public_only else {CONFIG_KEY: config.model_dump_json()}
    return json.dumps(public | {"dtype": str(dtype).removeprefix("torch.")} | ids | ours, indent=2) + "\n"
