"""Prompts that cannot fit are refused before they are made tokens: counts are bounded by the context.

A message costs at least the markers and the text around its content, whatever that is: `measure_overhead` finds how
many tokens these are in each role. So more messages than the context can hold are refused by their number alone. The
text of the others, names of tools and calls included, is tokenised piece by piece where its bytes could exceed the
context, until it is known to be too long; what passes is then encoded as any prompt is.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from m2forge.errors import FormatError
from m2forge.gateway.exchange import Ask, AskError, offered
from m2forge.gateway.rendering import keeps_thinking
from m2forge.text.format import ChatFormat
from m2forge.text.message import Message, Role, ToolCall
from m2forge.text.tokenizer import Tokenizer

LEAST_MAX_ITEMS = 1024
"""Messages, tools and calls that a request may have whatever the context is."""
_PLAIN_BYTES = 8
"""A token of most texts has fewer."""
_PIECE = 1 << 16
"""Characters that are counted at a time."""
_calls_of = attrgetter("tool_calls")
_SEAM = 16
"""Tokens by which the count of a piece may exceed its share of the whole text's, since it is cut anywhere."""


class PromptTooLongError(AskError):
    """A prompt longer than the context; each dialect words it as its vendor does (`dialects.too_long`)."""

    def __init__(self, num_tokens: int, context: int, field: str) -> None:
        super().__init__(f"the text is more than {num_tokens} tokens long and the context {context}; send less", field)
        self.num_tokens = num_tokens


@dataclass(frozen=True, slots=True)
class PromptSizes:
    """What is needed to bound a prompt's size from below; may be sent to another process."""

    tokenizer: Tokenizer
    context: int
    max_items: int
    """Messages, tools and calls of one request together."""
    has_thinking: bool
    overhead: Mapping[Role, int]
    """Tokens that a message of the role has at least."""

    @classmethod
    def of(cls, format: ChatFormat, context: int, max_items: int | None) -> "PromptSizes":
        """`max_items`: None derives it from the context and what the cheapest message costs."""
        overhead = measure_overhead(format)
        if max_items is None:
            max_items = max(LEAST_MAX_ITEMS, context // min((cost for cost in overhead.values() if cost), default=1))
        return cls(format.tokenizer, context, max_items, keeps_thinking(format), overhead)

    def check_counts(self, ask: Ask) -> None:
        """Raises AskError for more messages than the context holds, and for more items than one request may have."""
        num_tokens = 0
        # Most conversations would fit if each of their messages cost as much as any: those need no look at the roles.
        if len(ask.messages) * max(self.overhead.values()) > self.context:
            num_tokens = sum(self.overhead[message.role] for message in ask.messages)
        if isinstance(ask.prompt, tuple):
            num_tokens = len(ask.prompt)
        if num_tokens > self.context:
            raise self._too_long(ask, num_tokens)
        tools = offered(ask)
        num_items = len(ask.messages) + len(tools) + sum(map(len, map(_calls_of, ask.messages)))
        if num_items > self.max_items:
            raise AskError(
                f"the request has {num_items} messages, tools and calls, expected at most {self.max_items}; send "
                "fewer, or raise gateway.max_items",
                "messages" if len(tools) < self.max_items else "tools",
            )

    def needs_count(self, ask: Ask, num_body_bytes: int) -> bool:
        """Whether the text has so many bytes that it may be longer than the context."""
        most_bytes = _PLAIN_BYTES * self.context
        return num_body_bytes > most_bytes and sum(len(text.encode()) for text in self._texts(ask)) > most_bytes

    def check_text(self, ask: Ask) -> None:
        """Raises AskError for text that is longer than the context."""
        num_tokens = 0
        for text in self._texts(ask):
            for start in range(0, len(text), _PIECE):
                piece = text[start : start + _PIECE]
                # Each token has a byte or more, so a short text has no more tokens than the seam.
                if len(piece) * 4 > _SEAM:
                    num_tokens += max(0, len(self.tokenizer.encode(piece)) - _SEAM)
                if num_tokens > self.context:
                    raise self._too_long(ask, num_tokens)

    def _too_long(self, ask: Ask, num_tokens: int) -> "PromptTooLongError":
        return PromptTooLongError(num_tokens, self.context, "messages" if ask.prompt is None else "prompt")

    def _texts(self, ask: Ask) -> Iterator[str]:
        if isinstance(ask.prompt, str):
            yield ask.prompt
        for message in ask.messages:
            yield message.content
            if self.has_thinking:
                yield message.thinking
            if message.tool_calls:
                yield "".join(call.name + _json(call.arguments) for call in message.tool_calls)
        if tools := offered(ask):
            yield "".join(tool.name + tool.description + _json(tool.parameters) for tool in tools)


def measure_overhead(format: ChatFormat) -> dict[Role, int]:
    """Tokens that one more message of each role adds at least; 0 where the format cannot be asked."""
    user, answer = Message("user"), Message("assistant")
    calling, result = Message("assistant", tool_calls=(ToolCall("f", {}),)), Message("tool")
    both = _marginal(format, [user, answer], [user, answer])
    alone = min(_marginal(format, [user], [user]) or both, both)
    called = _marginal(format, [user, calling, result], [calling, result])
    answered = _marginal(format, [user, Message("assistant", tool_calls=2 * calling.tool_calls), result], [result])
    assistant = min(both, called) - max(alone, answered)
    return {"system": 0, "user": alone, "assistant": max(assistant, 0), "tool": min(answered, called)}


def _marginal(format: ChatFormat, before: Sequence[Message], new: Sequence[Message]) -> int:
    """Tokens that `new` adds at least, whatever its content: texts between markers are one each."""
    try:
        counts = [_num_runs(format, messages) for messages in (before, [*before, *new])]
    except FormatError:
        return 0
    return max(counts[1] - counts[0], 0)


def _num_runs(format: ChatFormat, messages: Sequence[Message]) -> int:
    """Special tokens, and the stretches of text between them: each of those has a token or more."""
    special = set(format.tokenizer.special_ids.values())
    count, was_text = 0, False
    for id in format.extend((), messages).ids:
        is_text = id not in special
        count += not (is_text and was_text)
        was_text = is_text
    return count


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
