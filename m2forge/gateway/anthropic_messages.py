"""Anthropic's Messages: `POST /v1/messages`, and `POST /v1/messages/count_tokens`.

`anthropic_messages_read.py` decides what a request may contain. A response's content is a thinking block, a text block
and one tool_use block per call; empty blocks are left out. Cached prompt tokens are counted separately from
`input_tokens`, as the vendor does.
"""

from collections.abc import Mapping, Sequence

from m2forge.gateway.anthropic_messages_read import DISPLAY, read_ask, read_count
from m2forge.gateway.anthropic_messages_stream import (
    MessagesStream,
    error_body,
    signature,
    stop_body,
    tool_use_body,
    usage_body,
)
from m2forge.gateway.exchange import Answer, Ask, AskError, Usage
from m2forge.records import JsonValue
from m2forge.text.completion import Completion


class AnthropicMessages:
    path = "/v1/messages"
    count_path = "/v1/messages/count_tokens"

    def read(self, body: Mapping[str, JsonValue]) -> Ask:
        return read_ask(body)

    def read_count(self, body: Mapping[str, JsonValue]) -> Ask:
        """Read a request to count tokens. Raises `AskError`."""
        return read_count(body)

    def count(self, num_prompt: int) -> dict[str, JsonValue]:
        """Return the response body; `num_prompt` includes the generation prompt."""
        return {"input_tokens": num_prompt}

    def answer(
        self, ask: Ask, id: str, created_s: int, answers: Sequence[Answer], usage: Usage
    ) -> dict[str, JsonValue]:
        (answer,) = answers
        body: dict[str, JsonValue] = {"id": id, "type": "message", "role": "assistant", "model": ask.model}
        is_omitted = ask.echo.get(DISPLAY) == "omitted"
        return (
            body
            | {"content": _blocks(answer.completion, id, is_omitted)}
            | stop_body(answer)
            | {"usage": usage_body(usage)}
        )

    def stream(self, ask: Ask, id: str, created_s: int) -> MessagesStream:
        return MessagesStream(ask.model, id, is_omitted=ask.echo.get(DISPLAY) == "omitted")

    def error(
        self, status: int, message: str, field: str | None = None, code: str | None = None
    ) -> dict[str, JsonValue]:
        """The vendor's error body has no field and code; messages start with the field instead."""
        return error_body(status, message)

    def too_long(self, num_prompt: int, context: int) -> AskError:
        return AskError(f"prompt is too long: {num_prompt} tokens > {context} maximum", "messages")


def _blocks(completion: Completion, id: str, is_omitted: bool) -> list[JsonValue]:
    blocks: list[JsonValue] = []
    if completion.thinking:
        shown = "" if is_omitted else completion.thinking
        sign = signature(completion.thinking, id, is_omitted)
        blocks.append({"type": "thinking", "thinking": shown, "signature": sign})
    if completion.content:
        blocks.append({"type": "text", "text": completion.content, "citations": None})
    blocks.extend(tool_use_body(call, call.arguments) for call in completion.tool_calls)
    return blocks
