"""Prompts that cannot fit are refused before they are made tokens on the event loop, where everybody would wait.

A body that is short for the context is not looked at. The text of any other is counted by another thread, piece after
piece, until it is known to be too long; what passes is then encoded as any prompt is.
"""

import asyncio
import json
from collections.abc import Iterator

from m2forge.gateway.exchange import Ask, AskError
from m2forge.gateway.rendering import keeps_thinking
from m2forge.text.format import ChatFormat

_PLAIN_BYTES = 8
"""A token of most texts has fewer."""
_PIECE = 1 << 16
"""Characters that are counted at a time."""
_SEAM = 16
"""Tokens by which the count of a piece may exceed its share of the whole text's, since it is cut anywhere."""


class PromptSizes:
    def __init__(self, format: ChatFormat, context: int) -> None:
        self._format, self._context = format, context

    async def check(self, ask: Ask, num_body_bytes: int) -> None:
        """Raises AskError for a request whose text is longer than the context, if its body is so long as to ask."""
        most_bytes = _PLAIN_BYTES * self._context
        if num_body_bytes <= most_bytes:
            return
        texts = list(self._texts(ask))
        if sum(len(text.encode()) for text in texts) <= most_bytes:
            return
        num_tokens = await asyncio.to_thread(self._count, texts)
        if num_tokens > self._context:
            raise AskError(
                f"the text is more than {num_tokens} tokens long and the context {self._context}; send less",
                "messages" if ask.prompt is None else "prompt",
            )

    def _texts(self, ask: Ask) -> Iterator[str]:
        if isinstance(ask.prompt, str):
            yield ask.prompt
        has_thinking = keeps_thinking(self._format)
        for message in ask.messages:
            yield message.content
            if has_thinking:
                yield message.thinking
            for call in message.tool_calls:
                yield json.dumps(call.arguments, ensure_ascii=False)
        for tool in ask.tools:
            yield tool.description
            yield json.dumps(tool.parameters, ensure_ascii=False)

    def _count(self, texts: list[str]) -> int:
        """Tokens that the texts have at least, or more than the context."""
        num_tokens = 0
        for text in texts:
            for start in range(0, len(text), _PIECE):
                num_tokens += max(0, len(self._format.tokenizer.encode(text[start : start + _PIECE])) - _SEAM)
                if num_tokens > self._context:
                    return num_tokens
        return num_tokens
