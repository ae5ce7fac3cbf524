"""The contents of a corpus folder: `manifest.json`, next to the shards it lists and the tokenizer that made them.

A corpus is a list of token sets, one for each domain, split and kind that has documents. A token set is a list of
shards. Shard NAME is `NAME.bin`, the concatenated tokens of its documents (little-endian, 2 or 4 bytes each), and
`NAME.idx`, the start of each document and the end of the last (little-endian, 8 bytes each, counted in tokens).
"""

import json
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Literal, TypeAlias

from pydantic import ValidationError

from m2forge.config import Config
from m2forge.errors import DataError, NotFoundError
from m2forge.files import write_atomic

Split: TypeAlias = Literal["train", "held_out"]

MANIFEST_NAME = "manifest.json"
TOKENIZER_NAME = "tokenizer"
"""The tokenizer's folder inside a corpus folder."""
FORMAT_VERSION: Literal[1] = 1


class Kind(StrEnum):
    """What a token set is used for."""

    PLAIN = "plain"
    LONG = "long"
    """Long samples: documents chosen or joined to teach long contexts. Their tokens are in the plain sets too."""


class Shard(Config):
    name: str
    """Path inside the corpus folder, without suffix."""
    num_documents: int
    num_tokens: int
    sha256: str
    """Hash of the token bytes' and the offset bytes' SHA-256 digests."""


class TokenSet(Config):
    domain: str
    split: Split
    kind: Kind
    shards: tuple[Shard, ...]

    @property
    def num_documents(self) -> int:
        return sum(shard.num_documents for shard in self.shards)

    @property
    def num_tokens(self) -> int:
        return sum(shard.num_tokens for shard in self.shards)


class Manifest(Config):
    version: Literal[1] = FORMAT_VERSION
    fingerprint: str
    """Hash over all token sets; corpora with equal fingerprints hold the same tokens."""
    tokenizer: str
    """Fingerprint of the tokenizer; empty if the tokens came from elsewhere."""
    vocab_size: int
    token_bytes: Literal[2, 4]
    end_of_text_id: int | None
    """The token that ends each document, if the tokenizer has one."""
    mixture: Mapping[str, float]
    """Default share of each domain in what a reader draws. The shares sum to 1."""
    sets: tuple[TokenSet, ...]


def write_manifest(folder: Path, manifest: Manifest) -> None:
    text = json.dumps(manifest.model_dump(mode="json"), indent=1, sort_keys=True)
    write_atomic(folder / MANIFEST_NAME, text + "\n")


def read_manifest(folder: Path) -> Manifest:
    """Load the manifest of a corpus folder; checks that its shards exist and have the right size."""
    path = folder / MANIFEST_NAME
    try:
        manifest = Manifest.model_validate_json(path.read_bytes())
    except FileNotFoundError as error:
        raise NotFoundError(f"{folder}: no {MANIFEST_NAME}; build the corpus first or give its folder") from error
    except ValidationError as error:
        raise DataError(f"{path}: not a corpus manifest of version {FORMAT_VERSION}: {error}") from error
    for token_set in manifest.sets:
        for shard in token_set.shards:
            _require_size(folder / f"{shard.name}.bin", shard.num_tokens * manifest.token_bytes)
            _require_size(folder / f"{shard.name}.idx", (shard.num_documents + 1) * 8)
    return manifest


def _require_size(path: Path, num_bytes: int) -> None:
    found = path.stat().st_size if path.is_file() else None
    if found != num_bytes:
        state = "is missing" if found is None else f"has {found} bytes"
        raise DataError(f"{path}: {state}, the manifest says {num_bytes}; build the corpus again")
