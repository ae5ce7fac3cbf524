"""Text in, token ids out, and back to the exact bytes: byte-level BPE by the `tokenizers` library.

A `Tokenizer` guarantees two things that the library leaves to its callers:

- `encode` takes plain text. A special token's name in it becomes ordinary tokens, so a message cannot inject a turn
  marker; special ids are only inserted by name, with `special`.
- `decode_bytes` returns the exact bytes of the ids, even if they end inside a character.

A tokenizer trained here has a token for every byte. A loaded one may not: SmolLM2's lacks 21, and the library drops the
bytes that have none.

It also holds what a model folder stores with the vocabulary: the names of the BOS, EOS, padding and unknown tokens and
the chat template. `save` writes a folder that transformers loads to the same ids.

A chat format writes a conversation as segments: special tokens by name, and plain text. Each segment is encoded
separately, so a conversation can be split between any two segments without changing its ids, and nothing inside a text
can become a special token.

From a Hugging Face folder it reads `tokenizer.json` (required), `tokenizer_config.json` (names of special tokens,
sometimes the chat templates), `chat_template.jinja` and `additional_chat_templates/tool_use.jinja`, which override the
templates of the configuration, and the EOS ids of `generation_config.json`. Errors name the file. Of a GGUF file it
reads the tokens, their types and the merges; llama.cpp stores only the name of the pre-tokenizer, and a table here maps
each name to its pattern. An unknown name is refused: a wrong split gives ids that look right but are not.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import NamedTuple

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from m2forge.errors import DataError, NotFoundError, suggest
from m2forge.files import write_atomic
from m2forge.gguf_header import Value, read_header
from m2forge.records import JsonValue
from m2forge.text.vocabulary import (
    MAX_IDS,
    WORD_SPLIT,
    SpecialNames,
    Vocabulary,
    byte_level_split,
    byte_of_sign,
    check_byte_level,
)

END_OF_TEXT = "<|endoftext|>"
TEMPLATES_FOLDER = "additional_chat_templates"
"""Folder in a model folder with the chat templates other than the default one."""
_TEMPLATE_FILE, _TOOL_USE_FILE = "chat_template.jinja", f"{TEMPLATES_FOLDER}/tool_use.jinja"
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

_PRE_ENCODED: ContextVar[tuple[Mapping[str, list[int]], int] | None] = ContextVar("_PRE_ENCODED", default=None)


class UnencodedError(Exception):
    """Long texts that must be encoded in advance; see `pre_encoded`."""

    def __init__(self, texts: Sequence[str]) -> None:
        super().__init__(f"{len(texts)} texts")
        self.texts = texts


@contextmanager
def pre_encoded(known: Mapping[str, list[int]], max_chars: int) -> Iterator[None]:
    """For code that must not block: texts in `known` use these ids, and if the other texts total more than `max_chars`
    characters, encoding them raises `UnencodedError`. The caller can encode them elsewhere and add them to `known`.
    Applies to this thread or task."""
    token = _PRE_ENCODED.set((known, max_chars))
    try:
        yield
    finally:
        _PRE_ENCODED.reset(token)


class Tokenizer:
    """Immutable after construction."""

    chat_template: str | None
    """The model's Jinja chat template."""
    tool_use_template: str | None
    """The Jinja chat template for conversations with tools; None: the same."""
    eos_ids: tuple[int, ...]
    """Ids at which the model's generation config ends a completion; empty if there is none."""
    takes_left_space: frozenset[str]
    """Special tokens that take in the whitespace before them; `takes_right_space`: after them."""
    takes_right_space: frozenset[str]
    vocab_size: int
    """One more than the largest id."""
    special_ids: Mapping[str, int]
    """Ids of all tokens that text never produces: control tokens and other added ones, such as `<think>`."""
    end_of_text_id: int | None
    """Separates documents: `<|endoftext|>` if present, else the model's EOS token, else None."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        core, self.names, self.chat_template = vocabulary.core, vocabulary.names, vocabulary.chat_template
        self.tool_use_template, self.eos_ids = vocabulary.tool_use_template, vocabulary.eos_ids
        self._document = core.to_str()
        self._core = _text_only(self._document)
        added = core.get_added_tokens_decoder()
        self.special_ids = {token.content: id for id, token in added.items() if not _is_text(token)}
        self.takes_left_space = frozenset(token.content for token in added.values() if token.lstrip)
        self.takes_right_space = frozenset(token.content for token in added.values() if token.rstrip)
        self.vocab_size = 1 + max(core.get_vocab(with_added_tokens=True).values(), default=-1)
        end = END_OF_TEXT if END_OF_TEXT in self.special_ids else self.names.eos
        self.end_of_text_id = None if end is None else core.token_to_id(end)
        self._bytes_of_id = _TokenBytes(self._core, {id: token.content.encode() for id, token in added.items()})

    def __reduce__(self) -> tuple[type["Tokenizer"], tuple[Vocabulary]]:
        # Through the constructor, because the library's copies match special tokens in text again.
        return Tokenizer, (self._vocabulary,)

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode many texts at once, in parallel unless TOKENIZERS_PARALLELISM disables it."""
        advance = _PRE_ENCODED.get()
        if advance is None:
            return self._encode(texts)
        known, max_chars = advance
        missing = [text for text in dict.fromkeys(texts) if text not in known]
        if sum(map(len, missing)) > max_chars:
            raise UnencodedError(missing)
        found = dict(zip(missing, self._encode(missing), strict=True))
        return [known[text] if text in known else found[text] for text in texts]

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        try:
            encodings = self._core.encode_batch_fast(texts, add_special_tokens=False)
        except TypeError:
            _refuse_surrogates(texts)
            raise
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens as their names; invalid UTF-8 becomes U+FFFD."""
        return self.decode_bytes(ids).decode(errors="replace")

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """The exact bytes of `ids`, special tokens as their names. They may begin or end inside a character."""
        pieces = self._bytes_of_id
        return b"".join([pieces[id] for id in ids])

    def special(self, text: str) -> int:
        """The id of a special token."""
        if text not in self.special_ids:
            raise NotFoundError(f"the tokenizer has no special token {text!r}; {suggest(text, self.special_ids)}")
        return self.special_ids[text]

    @property
    def fingerprint(self) -> str:
        """Equal for tokenizers with equal encoding, names and chat template."""
        identity = [self._document, dataclasses.astuple(self.names), self.chat_template]
        identity += [] if self.tool_use_template is None else [self.tool_use_template]
        return hashlib.blake2b(json.dumps(identity).encode(), digest_size=16).hexdigest()

    def save(self, folder: Path) -> None:
        """Write the files of a Hugging Face tokenizer into `folder`, which may already hold a model."""
        names = {f"{part}_token": getattr(self.names, part) for part in ("bos", "eos", "pad", "unk")}
        settings: dict[str, JsonValue] = {"tokenizer_class": "PreTrainedTokenizerFast"}
        settings |= {part: name for part, name in names.items() if name is not None}
        settings["clean_up_tokenization_spaces"] = False
        write_atomic(folder / "tokenizer.json", json.dumps(json.loads(self._document), ensure_ascii=False, indent=1))
        write_atomic(folder / "tokenizer_config.json", json.dumps(settings, ensure_ascii=False, indent=2) + "\n")
        _write_template(folder / _TEMPLATE_FILE, self.chat_template)
        _write_template(folder / _TOOL_USE_FILE, self.tool_use_template)


def _write_template(path: Path, template: str | None) -> None:
    if template is None:
        path.unlink(missing_ok=True)
    else:
        path.parent.mkdir(exist_ok=True)
        write_atomic(path, template)


def load_tokenizer(path: Path) -> Tokenizer:
    """Load a Hugging Face folder, a `tokenizer.json`, or the tokenizer inside a GGUF file."""
    if path.is_dir():
        return Tokenizer(read_folder(path))
    if not path.is_file():
        raise NotFoundError(f"{path} does not exist; give a model folder, a tokenizer.json or a GGUF file")
    if path.suffix == ".gguf":
        return Tokenizer(read_gguf(path))
    return Tokenizer(Vocabulary(read_core(path)))


def train_tokenizer(texts: Iterable[str], vocab_size: int, specials: Sequence[str]) -> Tokenizer:
    """Train a byte-level BPE of at most `vocab_size` tokens; `specials` get the first ids, in order.

    Equal texts give an equal tokenizer, and every text is decoded from its ids byte for byte.
    """
    if len(set(specials)) != len(specials) or "" in specials:
        raise DataError(f"special tokens must be different and not empty, received {list(specials)}")
    least = 256 + len(specials)
    if vocab_size < least:
        raise DataError(f"vocab_size: expected at least {least}, 256 bytes and the specials, received {vocab_size}")
    core = tokenizers.Tokenizer(models.BPE())
    core.pre_tokenizer = byte_level_split(WORD_SPLIT)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in specials],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(_checked(texts), trainer)
    end = END_OF_TEXT if END_OF_TEXT in specials else None
    return Tokenizer(Vocabulary(core, SpecialNames(eos=end, pad=end)))


# -- segments ----------------------------------------------------------------------------------------------------------


class Segment(NamedTuple):
    text: str
    special: bool
    """Whether `text` is the name of a special token."""
    trained: bool
    """Whether the assistant sampled this, or would have."""


@dataclasses.dataclass(slots=True)
class Rendered:
    """A conversation, or a piece of one, as token ids."""

    ids: list[int] = dataclasses.field(default_factory=list)
    trained: list[bool] = dataclasses.field(default_factory=list)
    """Loss mask: for each id whether the assistant sampled it, or would have: thinking, content, calls and the end
    marker, but never the generation prompt."""


@cache
def mark(text: str, *, trained: bool = False) -> Segment:
    """A special token."""
    return Segment(text, special=True, trained=trained)


def plain(text: str, *, trained: bool = False) -> Segment:
    return Segment(text, special=False, trained=trained)


def encode_segments(segments: Sequence[Segment], tokenizer: Tokenizer) -> Rendered:
    texts = list({segment.text: None for segment in segments if not segment.special})
    ids_of_text = dict(zip(texts, tokenizer.encode_batch(texts), strict=True))
    rendered = Rendered()
    for segment in segments:
        ids = [tokenizer.special(segment.text)] if segment.special else ids_of_text[segment.text]
        rendered.ids += ids
        rendered.trained += [segment.trained] * len(ids)
    return rendered


# -- inside a tokenizer ------------------------------------------------------------------------------------------------


class _TokenBytes(dict[int, bytes]):
    """Bytes of each id, computed on first use: few runs need the whole vocabulary."""

    def __init__(self, core: tokenizers.Tokenizer, added: Mapping[int, bytes]) -> None:
        super().__init__(added)
        self._core = core
        self._byte_of_sign = byte_of_sign()

    def __missing__(self, id: int) -> bytes:
        token = self._core.id_to_token(int(id)) if 0 <= id < 2**32 else None
        if token is None:
            raise NotFoundError(f"token id {id} is not in the vocabulary; were they encoded with another tokenizer?")
        self[int(id)] = bytes(self._byte_of_sign[sign] for sign in token)
        return self[id]


def _is_text(token: AddedToken) -> bool:
    """Whether an added token is a run of whitespace, as in some vocabularies; such tokens are matched in text."""
    return not token.special and token.content.isspace()


def _text_only(document: str) -> tokenizers.Tokenizer:
    """A copy that matches no marker in text, whether it is declared special or, as in Qwen's, only added."""
    content = json.loads(document)
    for token in content["added_tokens"]:
        token["special"] = token["special"] or not token["content"].isspace()
    content["post_processor"] = content["truncation"] = content["padding"] = None
    core = tokenizers.Tokenizer.from_str(json.dumps(content))
    core.encode_special_tokens = True
    return core


def _checked(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        _refuse_surrogates([text])
        yield text


def _refuse_surrogates(texts: Sequence[str]) -> None:
    for number, text in enumerate(texts):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            bad = f"U+{ord(text[error.start]):04X} at character {error.start}"
            raise DataError(
                f"text {number} of {len(texts)} is not valid Unicode: it contains the lone surrogate {bad}"
            ) from error


# -- the vocabulary of a folder ----------------------------------------------------------------------------------------


def read_folder(folder: Path) -> Vocabulary:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise NotFoundError(f"{folder} holds no tokenizer.json; give the folder of a model with its tokenizer")
    core = read_core(path)
    settings = _read_settings(folder / "tokenizer_config.json")
    names = SpecialNames(*(_folder_token_name(settings, part, core, folder) for part in ("bos", "eos", "pad", "unk")))
    templates = _read_templates(folder, settings)
    return Vocabulary(core, names, templates.get("default"), templates.get("tool_use"), _read_eos_ids(folder, core))


def read_core(path: Path) -> tokenizers.Tokenizer:
    """Load one `tokenizer.json`."""
    text = _read_text(path)
    try:
        core = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # The library raises bare exceptions for what it cannot parse.
        raise DataError(f"{path}: not a tokenizer that the tokenizers library reads: {error}") from error
    check_byte_level(core, str(path))
    return core


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text: {error}") from error
    except FileNotFoundError as error:
        raise NotFoundError(f"{path} does not exist") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error


def _read_settings(path: Path) -> Mapping[str, JsonValue]:
    if not path.is_file():
        return {}
    try:
        settings = json.loads(_read_text(path))
    except ValueError as error:
        raise DataError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(settings, dict):
        raise DataError(f"{path}: expected a JSON object, received {type(settings).__name__}")
    return settings


def _folder_token_name(
    settings: Mapping[str, JsonValue], part: str, core: tokenizers.Tokenizer, folder: Path
) -> str | None:
    value = settings.get(f"{part}_token")
    if isinstance(value, Mapping):
        value = value.get("content")
    if value is None:
        return None
    if not isinstance(value, str) or core.token_to_id(value) is None:
        raise DataError(f"{folder}/tokenizer_config.json: {part}_token {value!r} is not a token of tokenizer.json")
    return value


def _read_templates(folder: Path, settings: Mapping[str, JsonValue]) -> dict[str, str]:
    """The chat templates by name, from files or else from the settings; a single one is named default."""
    stored = settings.get("chat_template")
    templates: dict[str, str] = {}
    if isinstance(stored, str):
        templates["default"] = stored
    elif isinstance(stored, Sequence):
        for entry in stored:
            name, template = (entry.get("name"), entry.get("template")) if isinstance(entry, Mapping) else (None, None)
            if isinstance(name, str) and isinstance(template, str):
                templates[name] = template
    elif stored is not None:
        raise DataError(
            f"{folder}/tokenizer_config.json: chat_template: expected text or a list of named templates, received "
            f"{type(stored).__name__}"
        )
    files = {"default": folder / _TEMPLATE_FILE, "tool_use": folder / _TOOL_USE_FILE}
    read = {name: _read_text(path) for name, path in files.items() if path.is_file()}
    return read or templates


def _read_eos_ids(folder: Path, core: tokenizers.Tokenizer) -> tuple[int, ...]:
    """The EOS ids of generation_config.json, those that are tokens."""
    stored = _read_settings(folder / "generation_config.json").get("eos_token_id")
    ids = stored if isinstance(stored, list) else [stored]
    return tuple(id for id in ids if isinstance(id, int) and 0 <= id < MAX_IDS and core.id_to_token(id) is not None)


# -- the vocabulary of a GGUF file -------------------------------------------------------------------------------------


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
    names = {part: _gguf_token_name(fields, f"tokenizer.ggml.{key}_token_id", tokens, path) for part, key in ids}
    keys = ("tokenizer.chat_template", "tokenizer.chat_template.tool_use")
    template, tool_use = (value if isinstance(value := fields.get(key), str) else None for key in keys)
    ends = [fields.get(f"tokenizer.ggml.{part}_token_id") for part in ("eot", "eom")]
    eos_ids = tuple(id for id in ends if isinstance(id, int) and 0 <= id < len(tokens))
    return Vocabulary(core, SpecialNames(**names), template, tool_use, eos_ids)


def _build(tokens: list[str], merges: list[str], split: str, path: Path) -> tokenizers.Tokenizer:
    vocab = {token: id for id, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise DataError(f"{path}: {len(tokens) - len(vocab)} tokens occur twice in its vocabulary")
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
        raise DataError(f"{path}: {key} is {'missing' if value is None else 'not a list of strings'}")
    return texts


def _split_name(fields: Mapping[str, Value], path: Path) -> str:
    name = fields.get("tokenizer.ggml.pre")
    known = [*_SPLITS, *_PLAIN, *_DIGITS_APART]
    if name not in known:
        raise DataError(f"{path}: pre-tokenizer {name!r} is not supported; {suggest(str(name), known)}")
    return str(name)


def _gguf_token_name(fields: Mapping[str, Value], key: str, tokens: list[str], path: Path) -> str | None:
    id = fields.get(key)
    if id is None:
        return None
    if not isinstance(id, int) or not 0 <= id < len(tokens):
        raise DataError(f"{path}: {key} is {id!r}, expected an id below {len(tokens)}")
    return tokens[id]
