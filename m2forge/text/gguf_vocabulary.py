"""Builds a `Vocabulary` from the tokenizer metadata of a GGUF file.

llama.cpp stores the tokens, their types and the merges, but only the name of the pre-tokenizer; the table here maps
each name to its pattern. An unknown name is refused: a wrong split gives ids that look right but are not.
"""

from collections.abc import Mapping
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from m2forge.errors import DataError, suggest
from m2forge.gguf_header import Value, read_header
from m2forge.text.vocabulary import WORD_SPLIT, SpecialNames, Vocabulary, byte_level_split, check_byte_level

_CONTROL, _USER_DEFINED = 3, 4

_ONE_DIGIT_SPLIT = WORD_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_CASED_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS: dict[str, str] = (
    dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "dbrx", "smaug-bpe"), WORD_SPLIT)
    | {"qwen2": _ONE_DIGIT_SPLIT}
    | dict.fromkeys(("gpt-4o", "llama4", "minimax-m2"), _CASED_SPLIT)
)
_PLAIN = ("gpt-2",)
"""Pre-tokenizers with GPT-2's pattern, which the library implements itself."""
_DIGITS_APART = ("smollm", "starcoder", "refact", "command-r")
"""Pre-tokenizers that split off every digit, then use GPT-2's pattern."""
_COMPOSED = ("qwen2",)
"""Pre-tokenizers that normalize to NFC first."""
_WHOLE_WORDS = ("llama3", "llama-v3", "llama-bpe", "falcon3")
"""A piece that is itself a token is used before any merge."""


def read_gguf(path: Path) -> Vocabulary:
    fields = read_header(path).fields
    kind = fields.get("tokenizer.ggml.model")
    if kind != "gpt2":
        problem = "it has none" if kind is None else f"its tokenizer is {kind!r}"
        raise DataError(f"{path}: {problem}; from GGUF only 'gpt2', a BPE over bytes, is supported")
    tokens, merges = _strings(fields, "tokenizer.ggml.tokens", path), _strings(fields, "tokenizer.ggml.merges", path)
    core = _build(tokens, merges, _split_name(fields, path), path)
    kinds = fields.get("tokenizer.ggml.token_type")
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise DataError(f"{path}: tokenizer.ggml.token_type does not say the kind of each of {len(tokens)} tokens")
    for special, number in ((True, _CONTROL), (False, _USER_DEFINED)):
        named = [token for token, token_kind in zip(tokens, kinds, strict=True) if token_kind == number]
        added = [AddedToken(token, special=special, normalized=False) for token in named]
        core.add_special_tokens(added) if special else core.add_tokens(added)
    check_byte_level(core, str(path))
    ids = (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))
    names = {part: _token_name(fields, f"tokenizer.ggml.{key}_token_id", tokens, path) for part, key in ids}
    template = fields.get("tokenizer.chat_template")
    return Vocabulary(core, SpecialNames(**names), template if isinstance(template, str) else None)


def _build(tokens: list[str], merges: list[str], split: str, path: Path) -> tokenizers.Tokenizer:
    vocab = {token: id for id, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise DataError(f"{path}: {len(tokens) - len(vocab)} tokens of its vocabulary stand there twice")
    # A token never contains a bare space (byte-level BPE encodes it), so the first space separates the pair.
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    try:
        core = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=split in _WHOLE_WORDS))
    except Exception as error:  # The library raises bare exceptions for merges of unknown tokens.
        raise DataError(f"{path}: tokens and merges do not fit together: {error}") from error
    if split in _SPLITS:
        core.pre_tokenizer = byte_level_split(_SPLITS[split])
    else:
        level = pre_tokenizers.ByteLevel(add_prefix_space=False)
        digits = [pre_tokenizers.Digits(individual_digits=True)] if split in _DIGITS_APART else []
        core.pre_tokenizer = pre_tokenizers.Sequence([*digits, level])
    if split in _COMPOSED:
        core.normalizer = normalizers.NFC()
    core.decoder = decoders.ByteLevel()
    return core


def _strings(fields: Mapping[str, Value], key: str, path: Path) -> list[str]:
    value = fields.get(key)
    items = value if isinstance(value, list) else []
    texts = [item for item in items if isinstance(item, str)]
    if not isinstance(value, list) or len(texts) < len(items):
        raise DataError(f"{path}: {key} is {'missing' if value is None else 'no list of texts'}")
    return texts


def _split_name(fields: Mapping[str, Value], path: Path) -> str:
    name = fields.get("tokenizer.ggml.pre")
    known = [*_SPLITS, *_PLAIN, *_DIGITS_APART]
    if name not in known:
        raise DataError(f"{path}: pre-tokenizer {name!r} is not supported; {suggest(str(name), known)}")
    return str(name)


def _token_name(fields: Mapping[str, Value], key: str, tokens: list[str], path: Path) -> str | None:
    id = fields.get(key)
    if id is None:
        return None
    if not isinstance(id, int) or not 0 <= id < len(tokens):
        raise DataError(f"{path}: {key} is {id!r}, expected an id below {len(tokens)}")
    return tokens[id]
