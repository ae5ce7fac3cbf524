"""Text to tokens: the tokenizer, loaded or trained on the surviving documents, and their tokens.

The tokenizer library does the work on all cores; this file keeps batches large, splits long texts where the
pre-tokenizer would split them anyway, and converts ids to arrays without a Python loop over them.
"""

import hashlib
import re
from array import array
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from m2forge.corpus.config import TokenizerConfig
from m2forge.corpus.permutation import mix
from m2forge.corpus.write.document_table import Stretches, Table, Tables, TableWriter
from m2forge.files import staged_folder
from m2forge.text.tokenizer import Tokenizer, load_tokenizer, train_tokenizer

BATCH_BYTES = 1 << 21
MAX_TEXT_BYTES = 1 << 17
"""Longer documents are encoded in chunks, so that one document does not block the other cores or fill the memory."""
SAMPLE_BYTES = 1 << 16
"""Chunk size in which long documents are sampled for tokenizer training, each chunk independently."""
_LINE = re.compile(rb"\n(?=\S)")
_WORD = re.compile(rb"[A-Za-z](?= [A-Za-z])")


def get_tokenizer(
    config: TokenizerConfig, tables: Tables, is_surviving: npt.NDArray[np.bool_], seed: int, folder: Path
) -> Tokenizer:
    """The tokenizer in `folder`; loaded or trained and saved there first if it is missing."""
    if not folder.exists():
        if config.path is not None:
            tokenizer = load_tokenizer(Path(config.path))
        else:
            texts = _sample(tables, is_surviving, config.train_bytes, seed)
            tokenizer = train_tokenizer(texts, config.vocab_size, config.specials)
        with staged_folder(folder) as staged:
            tokenizer.save(staged)
    return load_tokenizer(folder)


def fingerprint(tokenizer_folder: Path) -> str:
    """Hash of the tokenizer.json, which determines the tokens."""
    return hashlib.sha256((tokenizer_folder / "tokenizer.json").read_bytes()).hexdigest()


def tokenise_part(table: Table, is_surviving: npt.NDArray[np.bool_], tokenizer: Tokenizer, folder: Path) -> None:
    """Write the tokens of a part's surviving documents, each ending with the end-of-text token if there is one."""
    texts = table.texts("text")
    rows = np.flatnonzero(is_surviving)
    num_tokens = 0
    with staged_folder(folder) as staged, TableWriter(staged) as tokens:
        for batch in _batches(texts, rows):
            values, lengths = encode([texts[row].tobytes() for row in batch.tolist()], tokenizer)
            tokens.append_stretches("tokens", values.tobytes(), lengths)
            num_tokens += len(values)
        tokens.append("row", rows)
        tokens.finish({"num_rows": len(rows), "num_tokens": num_tokens})


def token_dtype(tokenizer: Tokenizer) -> np.dtype[np.unsignedinteger]:
    return np.dtype("<u2") if tokenizer.vocab_size <= 1 << 16 else np.dtype("<u4")


def encode(
    texts: Sequence[bytes], tokenizer: Tokenizer
) -> tuple[npt.NDArray[np.unsignedinteger], npt.NDArray[np.int64]]:
    """Tokens of all texts concatenated, and the number of each."""
    stretches: list[str] = []
    num_stretches = np.empty(len(texts), np.int64)
    for index, text in enumerate(texts):
        parts = [text] if len(text) <= MAX_TEXT_BYTES else _divide(text)
        stretches += [part.decode() for part in parts]
        num_stretches[index] = len(parts)
    # From a list of int, an array("I") is built several times faster than a numpy array.
    arrays = [np.frombuffer(array("I", ids), np.uint32) for ids in tokenizer.encode_batch(stretches)]
    counts = np.fromiter(map(len, arrays), np.int64, len(arrays))
    lengths = np.add.reduceat(counts, np.cumsum(num_stretches) - num_stretches)
    tokens = np.concatenate(arrays).astype(token_dtype(tokenizer))
    if tokenizer.end_of_text_id is None:
        return tokens, lengths
    closed = np.insert(tokens, np.cumsum(lengths), tokenizer.end_of_text_id)
    return closed, lengths + 1


def _divide(text: bytes) -> list[bytes]:
    """Chunks of at most MAX_TEXT_BYTES, split before a line or word, where pre-tokenizers start a word too.

    So the tokens equal those of the whole text, unless it has no such position for half that length.
    """
    parts, start = [], 0
    while len(text) - start > MAX_TEXT_BYTES:
        end = start + MAX_TEXT_BYTES
        window = text[start + MAX_TEXT_BYTES // 2 : end + 1]
        found = _LINE.search(window) or _WORD.search(window)
        stop = start + MAX_TEXT_BYTES // 2 + found.end() if found else end
        while text[stop] & 0xC0 == 0x80:  # not inside a UTF-8 character
            stop -= 1
        parts.append(text[start:stop])
        start = stop
    return [*parts, text[start:]]


def _batches(texts: Stretches[np.uint8], rows: npt.NDArray[np.int64]) -> Iterator[npt.NDArray[np.int64]]:
    """Groups of rows whose texts total about BATCH_BYTES."""
    sizes = texts.offsets[rows + 1] - texts.offsets[rows]
    group = np.cumsum(sizes) // BATCH_BYTES
    bounds = np.flatnonzero(np.diff(group, prepend=-1, append=-1))
    for begin, end in pairwise(bounds.tolist()):
        yield rows[begin:end]


def _sample(tables: Tables, is_surviving: npt.NDArray[np.bool_], num_bytes: int, seed: int) -> Iterator[str]:
    """Surviving documents, or chunks of long ones, sampled by their hashes: about `num_bytes` in total."""
    total = 0
    for part, begin, end in zip(tables.parts, tables.first[:-1], tables.first[1:], strict=True):
        total += int(np.diff(part.texts("text").offsets)[is_surviving[begin:end]].sum())
    share = num_bytes / max(total, 1)
    for part, begin, end in zip(tables.parts, tables.first[:-1], tables.first[1:], strict=True):
        texts = part.texts("text")
        rows = np.flatnonzero(is_surviving[begin:end])
        # Sampling a few long documents whole would often select none.
        count = np.maximum(1, np.diff(texts.offsets)[rows] // SAMPLE_BYTES) if share < 1 else np.ones_like(rows)
        row = np.repeat(rows, count)
        number = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
        is_last = number == np.repeat(count, count) - 1
        drawn = draw(part.column("hash", np.uint64)[row] + number.astype(np.uint64), seed, "tokenizer") < share
        for index in np.flatnonzero(drawn).tolist():
            start = int(number[index]) * SAMPLE_BYTES
            stretch = texts[int(row[index])][start : None if is_last[index] else start + SAMPLE_BYTES]
            yield stretch.tobytes().decode(errors="ignore")  # a chunk may end inside a UTF-8 character


def draw(hashes: npt.NDArray[np.generic], seed: int, purpose: str) -> npt.NDArray[np.float64]:
    """A number in 0 … 1 for each document, determined by its content, the seed and the purpose."""
    salt = int.from_bytes(hashlib.sha256(f"{seed}/{purpose}".encode()).digest()[:8], "little")
    mixed = mix(hashes.astype(np.uint64) ^ np.uint64(salt))
    return (mixed >> np.uint64(11)).astype(np.float64) / float(1 << 53)
