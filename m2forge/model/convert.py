"""Imports published models, and exports ours as public folders.

`import_model` converts a Hugging Face folder (FP8 weights included) or a GGUF file to one of our model folders;
`export_model` writes a model folder as any reader of the family expects it, without our own keys and modules. Both
check every tensor first, then stream, holding at most one shard. They copy tokenizer and generation files, and write
out the tokenizer inside a GGUF file.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from m2forge.errors import ConfigError, M2ForgeError, NotFoundError, suggest
from m2forge.model.checkpoint import MAX_SHARD_BYTES, open_source, write_model
from m2forge.model.config import FamilyName
from m2forge.model.count import short
from m2forge.model.gguf_file import GGUFSource
from m2forge.model.safetensors_file import Written
from m2forge.model.tensor_source import Source, refuse_misfits, usual_dtype
from m2forge.text.tokenizer import TEMPLATES_FOLDER, load_tokenizer

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}
COMPANIONS = (
    "tokenizer*.json",
    "tokenizer.model",
    "*.jinja",
    f"{TEMPLATES_FOLDER}/*.jinja",
    "chat_template.json",
    "generation_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
)
"""Files beside the weights that are part of the model."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Exchanged:
    """What an import or export wrote."""

    dest: Path
    family: FamilyName
    num_layers: int
    dtype: str
    weights: Written
    companions: tuple[str, ...]

    def describe(self) -> str:
        """One sentence for the user."""
        w = self.weights
        files = f"{w.num_files} file{'s' if w.num_files > 1 else ''}"
        beside = f", with {', '.join(self.companions)}" if self.companions else ", no tokenizer"
        return (
            f"wrote {self.dest}: {self.family}, {self.num_layers} layers, {w.num_tensors} tensors, "
            f"{short(w.num_bytes, 'KMGT')}B of {self.dtype} in {files}{beside}"
        )


def import_model(source: Path, dest: Path, *, dtype: str | None = None) -> Exchanged:
    """Write the published model at `source` to the folder `dest`, in `dtype` or as stored."""
    if source.is_dir():
        return _stream(open_source(source), dest, dtype, companions=find_companions(source))
    if not source.exists():
        raise NotFoundError(f"{source} does not exist; give a Hugging Face folder or a GGUF file")
    gguf = GGUFSource(source)
    with TemporaryDirectory() as folder:
        return _stream(gguf, dest, dtype, companions=_tokenizer_files(source, Path(folder)))


def export_model(
    folder: Path, dest: Path, *, dtype: str | None = None, max_shard_bytes: int = MAX_SHARD_BYTES
) -> Exchanged:
    """Write the model in `folder` to `dest` for other programs: without MTP modules and without our own config key."""
    source = open_source(folder)
    companions = find_companions(folder)
    return _stream(source, dest, dtype, max_shard_bytes, public_only=True, companions=companions)


def find_companions(folder: Path) -> tuple[Path, ...]:
    """The tokenizer and generation files in `folder`."""
    found = {path for pattern in COMPANIONS for path in folder.glob(pattern) if path.is_file()}
    return tuple(sorted(found))


def _tokenizer_files(source: Path, folder: Path) -> tuple[Path, ...]:
    """Writes the tokenizer inside a GGUF file to `folder`; returns no files if we cannot read its type."""
    try:
        load_tokenizer(source).save(folder)
    except M2ForgeError as error:
        _log.warning("the model is imported without its tokenizer: %s", error)
    return find_companions(folder)


def _stream(
    source: Source,
    dest: Path,
    dtype: str | None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    public_only: bool = False,
    companions: tuple[Path, ...] = (),
) -> Exchanged:
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype!r} is not supported; {suggest(dtype, DTYPES)}")
    wanted = None if dtype is None else DTYPES[dtype]
    refuse_misfits(source)
    written = write_model(
        source,
        dest,
        dtype=wanted,
        max_shard_bytes=max_shard_bytes,
        public_only=public_only,
        companions=companions,
    )
    name = str(wanted or usual_dtype(source)).removeprefix("torch.")
    names = tuple(path.name for path in companions)
    return Exchanged(dest, source.config.family, source.config.num_layers, name, written, names)
