"""Prompt distillation: drops parts of the system prompt at their rates, so that the model learns to do without.

Whether a part is dropped is a pure function of seed, trajectory, draw and part: the same in every process, and
independent between parts. The blank lines that only a dropped part needed are removed with it.
"""

import dataclasses
import hashlib
import re
from collections.abc import Sequence

from m2forge.sft.config import PromptPart
from m2forge.text.message import Message

_FENCE = re.compile(r" {0,3}(```+|~~~+)")
_HEADING = re.compile(r" {0,3}(#{1,6})\s")


def draw_dropped(parts: Sequence[PromptPart], seed: int, trajectory: str, draw: int) -> tuple[bool, ...]:
    """Which parts this draw drops. `trajectory`: a unique name of the trajectory."""
    return tuple(_uniform(f"{seed}/{trajectory}/{draw}/{index}") < part.rate for index, part in enumerate(parts))


def drop_parts(
    messages: Sequence[Message], parts: Sequence[PromptPart]
) -> tuple[tuple[Message, ...], tuple[bool, ...]]:
    """The messages without `parts`, and which messages stay: a system prompt left empty is dropped entirely."""
    kept: list[Message] = []
    stays: list[bool] = []
    for message in messages:
        if message.role == "system" and parts:
            spans = [span for part in parts for span in find_part(message.content, part)]
            message = dataclasses.replace(message, content=_remove(message.content, spans))
            stays.append(bool(message.content.strip()))
        else:
            stays.append(True)
        if stays[-1]:
            kept.append(message)
    return tuple(kept), tuple(stays)


def find_part(prompt: str, part: PromptPart) -> list[tuple[int, int]]:
    """Every occurrence of the part in the prompt, as start and end."""
    match part.kind:
        case "text":
            return [found.span() for found in re.finditer(re.escape(part.match), prompt)]
        case "regex":
            spans = [found.span() for found in re.finditer(part.match, prompt, re.MULTILINE)]
            return [(start, end) for start, end in spans if end > start]
        case "heading":
            return _find_sections(prompt, part.match)


def _find_sections(prompt: str, heading: str) -> list[tuple[int, int]]:
    """Sections under `heading`, each up to the next heading of the same or a higher level. Code blocks are skipped."""
    level = len(heading) - len(heading.lstrip("#"))
    sections: list[tuple[int, int]] = []
    start: int | None = None
    fence = ""
    offset = 0
    for line in prompt.splitlines(keepends=True):
        opened = _FENCE.match(line)
        mark = _HEADING.match(line)
        if opened and not fence:
            fence = opened[1]
        elif opened and opened[1].startswith(fence):
            fence = ""
        elif mark and not fence:
            if start is not None and len(mark[1]) <= level:
                sections.append((start, offset))
                start = None
            if start is None and line.strip() == heading.strip():
                start = offset
        offset += len(line)
    return [*sections, (start, offset)] if start is not None else sections


def _remove(text: str, spans: Sequence[tuple[int, int]]) -> str:
    pieces: list[str] = []
    end = 0
    for start, stop in sorted(spans):
        if start >= end:
            pieces.append(text[end:start])
        end = max(end, stop)
    if not pieces:
        return text
    joined = pieces[0].lstrip("\n")
    for piece in [*pieces[1:], text[end:]]:
        left, right = joined.rstrip("\n"), piece.lstrip("\n")
        num_lines = max(len(joined) - len(left), len(piece) - len(right))
        joined = left + "\n" * num_lines + right if left else right
    return joined.rstrip("\n")


def _uniform(key: str) -> float:
    """A pseudo-random number in [0, 1) that depends on `key` alone."""
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) * 2.0**-53
