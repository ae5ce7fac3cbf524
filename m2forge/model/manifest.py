"""The manifest of a policy version: which tensors its weight files hold, and each file's digest.

    manifest.json   {"files": {FILE: {"num_bytes", "digest", "slices": {TENSOR: {"dtype", "shape", "data_offsets"}}}}}

A slice is one tensor's bytes in a file, as the header of safetensors places them. A reader compares the digest of a
file when it first reads a tensor of it, so a torn or changed file is an error and never becomes weights. Folders
without a manifest are read unchecked.

A digest is `xxh3-` and the 128 bits of XXH3, which finds damage as fast as memory is read; one without this prefix is
BLAKE2b, which is twenty times slower, as versions before had it.
"""

import hashlib
import json
import logging
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
import xxhash
from torch import Tensor

from m2forge.errors import CheckpointError
from m2forge.files import write_atomic
from m2forge.model.config_file import read_json

MANIFEST_FILE = "manifest.json"
Entry: TypeAlias = Mapping[str, Any]
"""What the manifest states of a file."""
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "U8": torch.uint8,
}
NO_IMAGES: Mapping[str, Tensor] = {}
_log = logging.getLogger(__name__)
XXH3 = "xxh3-"
NUM_THREADS = min(8, os.cpu_count() or 1)
"""For several files at a time: more would wait for memory."""
_LENGTH_BYTES = 8
"""A safetensors file begins with the length of its header."""


def describe(path: Path) -> Entry:
    """The manifest's entry of a safetensors file."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        slices = json.loads(file.read(length))
    slices.pop("__metadata__", None)
    return {"num_bytes": path.stat().st_size, "digest": digest(path), "slices": slices}


def digest(path: Path) -> str:
    return XXH3 + _digest_of(path, xxhash.xxh3_128())


def digest_of(content: Tensor) -> str:
    """The digest of a file with these bytes."""
    return XXH3 + xxhash.xxh3_128(content.numpy().data).hexdigest()


def _digest_of(path: Path, found: "hashlib.blake2b | xxhash.xxh3_128") -> str:
    if not path.stat().st_size:
        return found.hexdigest()  # nothing to map
    # At once: between two parts, a thread would wait for the interpreter, which the steps of a sampler hold.
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        found.update(content)
    return found.hexdigest()


def _is_file(path: Path, expected: object) -> bool:
    """Whether a file has the expected digest, by whichever function that is."""
    if isinstance(expected, str) and expected.startswith(XXH3):
        return digest(path) == expected
    return _digest_of(path, hashlib.blake2b(digest_size=16)) == expected


def write_manifest(folder: Path, files: Mapping[str, Entry]) -> None:
    write_atomic(folder / MANIFEST_FILE, json.dumps({"files": files}) + "\n")


def read_manifest(folder: Path) -> Mapping[str, Entry]:
    """Entries by file; empty for a folder without a manifest."""
    if not (folder / MANIFEST_FILE).is_file():
        return {}
    files = read_json(folder / MANIFEST_FILE).get("files")
    if not isinstance(files, dict) or not all(isinstance(e, dict) and "digest" in e for e in files.values()):
        raise CheckpointError(f"{folder / MANIFEST_FILE} states no digests of files; copy the folder again")
    return files


def refuse_changed(path: Path, expected: object) -> None:
    """Raise a CheckpointError unless the file has this digest."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing, which {MANIFEST_FILE} names; copy the folder again")
    if not _is_file(path, expected):
        raise _changed(path)


def read_checked(path: Path, expected: object, memory: Tensor) -> Tensor:
    """The bytes of a file, read into the beginning of `memory`; a CheckpointError unless they have this digest."""
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        content, end = memory[:size], 0
        while end < size and (num_read := file.readinto(content[end:].numpy().data)):
            end += num_read
    if end < size or size > len(memory) or not _has_digest(content, expected):
        raise _changed(path)
    return content


def _has_digest(content: Tensor, expected: object) -> bool:
    if isinstance(expected, str) and expected.startswith(XXH3):
        return digest_of(content) == expected
    return hashlib.blake2b(content.numpy().data, digest_size=16).hexdigest() == expected


def _changed(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} is torn or was changed: its digest is not the one that was published with it. Copy the folder "
        f"again, or remove {path.parent.parent}: a trainer that resumes publishes its version again"
    )


def refuse_changed_files(folder: Path) -> None:
    """Compare all files of a version with their digests, for a reader that compares nothing itself."""
    for name, entry in read_manifest(folder).items():
        refuse_changed(folder / Path(name).name, entry["digest"])


def tensors_in(content: Tensor) -> dict[str, Tensor]:
    """The tensors of a safetensors file with these bytes; views of them."""
    start = _LENGTH_BYTES + int.from_bytes(content[:_LENGTH_BYTES].numpy().tobytes(), "little")
    slices = json.loads(content[_LENGTH_BYTES:start].numpy().tobytes())
    slices.pop("__metadata__", None)
    found = dict[str, Tensor]()
    for name, stated in slices.items():
        first, last = stated["data_offsets"]
        data, dtype = content[start + first : start + last], DTYPES[stated["dtype"]]
        # safetensors aligns tensors by putting those of large elements first, but does not promise it.
        data = data.clone() if data.storage_offset() % dtype.itemsize else data
        found[name] = data.view(dtype).view(stated["shape"])
    return found


def received_tensors(path: Path, expected: object, images: Mapping[str, Tensor]) -> Mapping[str, Tensor] | None:
    """The tensors of a file as it came by broadcast, if it did and has the digest that the manifest states."""
    if (content := images.get(path.name)) is None:
        return None
    if digest_of(content) != expected:
        _log.warning("%s: the broadcast brought other bytes than the manifest states; reading the file", path)
        return None
    return tensors_in(content)
