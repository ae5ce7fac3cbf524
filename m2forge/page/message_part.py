"""Splits the tokens of a call into parts for display: token ids in, parts with their texts out.

    prompt      system, user, observation (tool results), assistant (history that was not sampled here), marker
    completion  thinking, content, call, marker

A prompt is split at the chat format's special tokens. A completion is parsed by the format's parser; the text of the
parser's events locates thinking and content among the tokens, and everything between is markup: of a tool call, or a
marker. Every token is in exactly one part. Without a tokenizer there are only ids.
"""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from m2forge.errors import M2ForgeError
from m2forge.text import chatml, minimax_m2
from m2forge.text.format import ChatFormat
from m2forge.text.message import Tool
from m2forge.text.parser import THINK_CLOSE, CallFinished, CallStarted, Completion, ContentDelta, ThinkingDelta

Kind = Literal["system", "user", "observation", "assistant", "thinking", "content", "call", "marker", "context"]

LOOK_BACK = 2048
"""Tokens before a leg that are searched for the role in which it begins."""
_ROLES: dict[str, Kind] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "tool": "observation",
    "observation": "observation",
    "ai": "assistant",
    "assistant": "assistant",
}
_TOOL_RESPONSE = "<tool_response>"
"""Formats without a tool role wrap tool results in this tag inside a user message."""


@dataclass(frozen=True, slots=True)
class Part:
    kind: Kind
    start: int
    """Index of the part's first token; `end` is exclusive."""
    end: int


class TokenText:
    """The text of each token: a character belongs to the token that completes it."""

    def __init__(self, format: ChatFormat | None) -> None:
        self.format = format

    def texts(self, ids: Sequence[int]) -> list[str]:
        if self.format is None:
            return [f"{id} " for id in ids]
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        texts = [decoder.decode(self.data(id)) for id in ids]
        if texts:
            texts[-1] += decoder.decode(b"", final=True)
        return texts

    def data(self, id: int) -> bytes:
        """The token's bytes. Models have a few more ids than their tokenizers; those are shown as numbers."""
        assert self.format is not None
        try:
            return self.format.tokenizer.decode_bytes((id,))
        except M2ForgeError:
            return f"⟨{id}⟩".encode()

    def text(self, ids: Sequence[int]) -> str:
        if self.format is None:
            return " ".join(map(str, ids))
        try:
            return self.format.tokenizer.decode(ids)
        except M2ForgeError:
            return "".join(self.texts(ids))


def cut_prompt(
    ids: Sequence[int], texts: Sequence[str], before: Sequence[int], format: ChatFormat | None
) -> list[Part]:
    """Split a leg's prompt tokens. `before`: tokens that precede the leg."""
    marks = _marks(format)
    if format is None or marks is None:
        return [Part("context", 0, len(ids))] if ids else []
    open_id, end_id = marks
    parts: list[Part] = []
    kind = _kind_before(before, format, open_id, end_id)
    begun = at = 0
    while at < len(ids):
        if ids[at] not in marks:
            at += 1
            continue
        _close(parts, kind, begun, at, texts)
        begun = at
        kind = "marker"
        at += 1
        if ids[begun] == open_id:
            name, at = _read_role(texts, at)
            kind = _ROLES.get(name, "context")
        parts.append(Part("marker", begun, at))
        begun = at
    # If the prompt ends in an assistant turn, its last tokens are the generation prompt.
    _close(parts, "marker" if kind == "assistant" else kind, begun, len(ids), texts)
    return _concat(parts)


def _marks(format: ChatFormat | None) -> tuple[int, int] | None:
    """Ids that open and end a turn."""
    if format is None:
        return None
    ids = format.tokenizer.special_ids
    names = next((pair for pair in _TURN_MARKS if all(name in ids for name in pair)), None)
    return None if names is None else (ids[names[0]], ids[names[1]])


_TURN_MARKS = ((minimax_m2.OPEN, minimax_m2.END), (chatml.OPEN, chatml.END))


def _kind_before(before: Sequence[int], format: ChatFormat, open_id: int, end_id: int) -> Kind:
    """The kind of the turn that the tokens after `before` belong to; marker before the first turn."""
    if not before:
        return "marker"
    for at in range(len(before) - 1, max(-1, len(before) - 1 - LOOK_BACK), -1):
        if before[at] == end_id:
            return "marker"
        if before[at] == open_id:
            name, _ = _read_role(TokenText(format).texts(before[at + 1 : at + 9]), 0)
            return _ROLES.get(name, "context")
    return "context"


def _read_role(texts: Sequence[str], at: int) -> tuple[str, int]:
    """The name of a role, which ends at a newline, and the index of the token after it."""
    name = ""
    for end in range(at, min(len(texts), at + 8)):
        name += texts[end]
        if "\n" in name:
            return name.partition("\n")[0].strip(), end + 1
    return name.strip(), min(len(texts), at + 8)


def _close(parts: list[Part], kind: Kind, start: int, end: int, texts: Sequence[str]) -> None:
    if start == end:
        return
    if kind == "user" and "".join(texts[start : start + 8]).lstrip().startswith(_TOOL_RESPONSE):
        kind = "observation"
    parts.append(Part(kind, start, end))


def _concat(parts: Sequence[Part]) -> list[Part]:
    """Merge adjacent parts of one kind."""
    joined: list[Part] = []
    for part in parts:
        if joined and joined[-1].kind == part.kind:
            joined[-1] = Part(part.kind, joined[-1].start, part.end)
        else:
            joined.append(part)
    return joined


def cut_completion(
    texts: Sequence[str], format: ChatFormat | None, tools: Sequence[Tool]
) -> tuple[list[Part], Completion | None]:
    """The parts of a completion, and the parser's result."""
    if format is None:
        return ([Part("content", 0, len(texts))] if texts else []), None
    text = "".join(texts)
    parser = format.parser(tools)
    events = parser.feed(text)
    completion = parser.finish()
    kinds: list[Kind] = ["marker"] * len(text)
    at, in_call = 0, False
    for event in [*events, *completion.final_events]:
        if isinstance(event, CallStarted | CallFinished):
            in_call = True
            continue
        assert isinstance(event, ThinkingDelta | ContentDelta)
        found = text.find(event.text, at)
        if found < 0:
            continue
        if in_call:
            _mark_call(text, kinds, at, found, format)
        kind: Kind = "thinking" if isinstance(event, ThinkingDelta) else "content"
        kinds[found : found + len(event.text)] = [kind] * len(event.text)
        at, in_call = found + len(event.text), False
    if in_call:
        _mark_call(text, kinds, at, len(text), format)
    return _by_token(texts, kinds), completion


def _mark_call(text: str, kinds: list[Kind], start: int, end: int, format: ChatFormat) -> None:
    """Mark the span as a call, except a leading tag that ends thinking and a trailing stop token."""
    markup = text[start:end]
    thought = markup.find(THINK_CLOSE)
    begun = start + (thought + len(THINK_CLOSE) if thought >= 0 else 0)
    begun += len(text[begun:end]) - len(text[begun:end].lstrip())
    stops = [format.tokenizer.decode([id]) for id in format.stop_ids]
    ended = end - max((len(stop) for stop in stops if markup.endswith(stop)), default=0)
    kinds[begun:ended] = ["call"] * max(0, ended - begun)


def _by_token(texts: Sequence[str], kinds: Sequence[Kind]) -> list[Part]:
    """Each token has the kind of its first character; one that completes no character joins the token before."""
    parts: list[Part] = []
    at = 0
    for index, text in enumerate(texts):
        before: Kind = parts[-1].kind if parts else "marker"
        parts.append(Part(kinds[at] if text else before, index, index + 1))
        at += len(text)
    return _concat(parts)
