"""Builds a `Vocabulary` from the files of a Hugging Face tokenizer folder.

Reads `tokenizer.json` (required), `tokenizer_config.json` (names of special tokens, sometimes the chat template) and
`chat_template.jinja`, which overrides the template of the configuration. Errors name the file.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import tokenizers

from m2forge.errors import DataError, NotFoundError
from m2forge.records import JsonValue
from m2forge.text.vocabulary import SpecialNames, Vocabulary, check_byte_level


def read_folder(folder: Path) -> Vocabulary:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise NotFoundError(f"{folder} holds no tokenizer.json; give the folder of a model with its tokenizer")
    core = read_core(path)
    settings = _read_settings(folder / "tokenizer_config.json")
    names = SpecialNames(*(_token_name(settings, part, core, folder) for part in ("bos", "eos", "pad", "unk")))
    return Vocabulary(core, names, _read_template(folder, settings))


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


def _token_name(settings: Mapping[str, JsonValue], part: str, core: tokenizers.Tokenizer, folder: Path) -> str | None:
    value = settings.get(f"{part}_token")
    if isinstance(value, Mapping):
        value = value.get("content")
    if value is None:
        return None
    if not isinstance(value, str) or core.token_to_id(value) is None:
        raise DataError(f"{folder}/tokenizer_config.json: {part}_token {value!r} is no token of tokenizer.json")
    return value


def _read_template(folder: Path, settings: Mapping[str, JsonValue]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return _read_text(path)
    template = settings.get("chat_template")
    if isinstance(template, Sequence) and not isinstance(template, str):
        # Several templates by name: plain conversations use the one named default.
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, Mapping)}
        template = named.get("default")
    return template if isinstance(template, str) else None
