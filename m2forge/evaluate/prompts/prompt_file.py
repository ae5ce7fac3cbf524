"""Prompts from a JSONL file, and their token ids.

An unusable line is reported with its number and skipped; a file without a usable line is refused.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from m2forge.errors import DataError, FormatError
from m2forge.records import JsonValue
from m2forge.text.message import MAX_DOCUMENT_DEPTH, parse_json

PromptT = TypeVar("PromptT")


@dataclass(frozen=True, slots=True)
class PromptFile(Generic[PromptT]):
    path: Path
    prompts: tuple[tuple[int, PromptT], ...]
    """(line number from 1, prompt)."""
    problems: tuple[str, ...]
    """One message for each skipped line."""


@dataclass(frozen=True, slots=True)
class RenderedPrompts(Generic[PromptT]):
    lines: tuple[int, ...]
    prompts: tuple[PromptT, ...]
    ids: tuple[list[int], ...]
    problems: tuple[str, ...]
    """Problems of the file, and of lines that the chat format cannot express."""


def read_prompts(
    path: Path, parse: Callable[[Mapping[str, JsonValue]], PromptT], max_prompts: int | None = None
) -> PromptFile[PromptT]:
    """`parse` rejects a line by raising a DataError or FormatError."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); give a file of JSON lines") from error
    prompts: list[tuple[int, PromptT]] = []
    problems: list[str] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if max_prompts is not None and len(prompts) == max_prompts:
            break
        try:
            record = parse_json(line.decode("utf-8-sig"), MAX_DOCUMENT_DEPTH)
            if not isinstance(record, Mapping):
                raise DataError(f"expected an object, received {type(record).__name__}")
            prompts.append((number, parse(record)))
        except ValueError as error:
            # JSON and UTF-8 errors, DataError and FormatError are all ValueErrors.
            problems.append(f"{path}, line {number}: {error}")
    if not prompts:
        first = f" ({problems[0]})" if problems else ""
        raise DataError(f"{path}: no usable line{first}; give JSON lines of prompts")
    return PromptFile(path, tuple(prompts), tuple(problems))


def render_prompts(file: PromptFile[PromptT], render: Callable[[PromptT], list[int]]) -> RenderedPrompts[PromptT]:
    """`render` rejects a prompt like `parse` does."""
    rendered: list[tuple[int, PromptT, list[int]]] = []
    problems = list(file.problems)
    for line, prompt in file.prompts:
        try:
            rendered.append((line, prompt, render(prompt)))
        except (DataError, FormatError) as error:
            problems.append(f"{file.path}, line {line}: {error}")
    if not rendered:
        raise DataError(f"{file.path}: the chat format can express no line ({problems[0]})")
    lines, prompts, ids = zip(*rendered, strict=True)
    return RenderedPrompts(lines, prompts, ids, tuple(problems))


def require_list(record: Mapping[str, JsonValue], name: str) -> list[Mapping[str, JsonValue]]:
    """The list of objects under `name`."""
    value = record.get(name)
    if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
        raise FormatError(f"{name}: expected a list of objects, received {str(value)[:60]!r}")
    return value
