"""OpenAI Responses, the parts of a response: its items, the response object, and the logprobs of its text.

    reasoning       the thinking, as text or as summary; with `encrypted_content` if the client asked for it
    message         the text
    function_call   one per tool call

An empty completion becomes a message with empty text, so that a client that sends items back sends an assistant turn.
"""

from collections.abc import Iterable, Sequence

from m2forge.gateway.exchange import Answer, Ask, Ending, TokenLogprob, Usage
from m2forge.gateway.openai_body import arguments_text, token_bodies
from m2forge.gateway.openai_responses_item import item_id
from m2forge.gateway.openai_responses_read import HIDDEN
from m2forge.gateway.seal import seal
from m2forge.records import JsonValue
from m2forge.text.message import ToolCall

CUT_OFF = frozenset({Ending.LENGTH, Ending.ABORT})
"""Endings of an incomplete response; the vendor has no status for one that the engine aborted."""


def response_body(ask: Ask, id: str, created_s: int) -> dict[str, JsonValue]:
    """Encode the fields that are known from the start."""
    body: dict[str, JsonValue] = {"id": id, "object": "response", "created_at": created_s}
    return body | {name: value for name, value in ask.echo.items() if name not in HIDDEN}


def state_body(
    status: str,
    output: Sequence[JsonValue] = (),
    usage: Usage | None = None,
    *,
    incomplete: JsonValue = None,
    error: JsonValue = None,
) -> dict[str, JsonValue]:
    """Encode the fields that change while the response is generated."""
    told = None if usage is None else usage_body(usage)
    return {"status": status, "error": error, "incomplete_details": incomplete, "output": output, "usage": told}


def ending_body(ending: Ending, output: Sequence[JsonValue], usage: Usage) -> dict[str, JsonValue]:
    if ending in CUT_OFF:
        return state_body("incomplete", output, usage, incomplete={"reason": "max_output_tokens"})
    return state_body("completed", output, usage)


def usage_body(usage: Usage) -> dict[str, JsonValue]:
    return {
        "input_tokens": usage.num_prompt,
        "input_tokens_details": {"cached_tokens": usage.num_cached, "cache_write_tokens": 0},
        "output_tokens": usage.num_sampled,
        "output_tokens_details": {"reasoning_tokens": usage.num_thinking},
        "total_tokens": usage.num_prompt + usage.num_sampled,
    }


def items_body(ask: Ask, id: str, answer: Answer) -> list[dict[str, JsonValue]]:
    """Encode all items. If the completion was cut off, the last item is incomplete unless it is a tool call."""
    completion = answer.completion
    tokens = SpokenTokens()
    tokens.add(answer.logprobs)
    tokens.take(completion.thinking)
    items: list[dict[str, JsonValue]] = []
    if completion.thinking:
        items.append(reasoning_body(ask, item_id("rs", id, 0), completion.thinking, "completed"))
    if completion.content or not (items or completion.tool_calls):
        logprobs = token_bodies(tokens.take(completion.content))
        items.append(message_body(item_id("msg", id, len(items)), completion.content, logprobs, "completed"))
    if answer.ending in CUT_OFF and not completion.tool_calls:
        items[-1]["status"] = "incomplete"
    items.extend(
        call_body(item_id("fc", id, index), call, arguments_text(call), "completed")
        for index, call in enumerate(completion.tool_calls, start=len(items))
    )
    return items


def reasoning_body(ask: Ask, id: str, thinking: str | None, status: str) -> dict[str, JsonValue]:
    """`thinking` is None before any was sampled."""
    body: dict[str, JsonValue] = {"id": id, "type": "reasoning", "summary": [], "status": status}
    if thinking is None:
        return body
    if ask.echo.get("is_summarised"):
        body["summary"] = [{"type": "summary_text", "text": thinking}]
    else:
        body["content"] = [{"type": "reasoning_text", "text": thinking}]
    if ask.echo.get("is_sealed"):
        body["encrypted_content"] = seal(thinking)
    return body


def message_body(id: str, text: str | None, logprobs: Sequence[JsonValue], status: str) -> dict[str, JsonValue]:
    """`text` is None before any was sampled."""
    content: list[JsonValue] = [] if text is None else [text_body(text, logprobs)]
    return {"id": id, "type": "message", "role": "assistant", "status": status, "content": content}


def text_body(text: str, logprobs: Sequence[JsonValue]) -> dict[str, JsonValue]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def call_body(id: str, call: ToolCall, arguments: str, status: str) -> dict[str, JsonValue]:
    return {
        "id": id,
        "type": "function_call",
        "call_id": call.id,
        "name": call.name,
        "arguments": arguments,
        "status": status,
    }


class SpokenTokens:
    """Finds the sampled tokens of a piece of text, since a response contains logprobs of its text only.

    Skips tokens of tags, thinking and tool calls in between. Returns no tokens for text that is not found, which
    happens when invalid UTF-8 was replaced.
    """

    def __init__(self) -> None:
        self._tokens: list[TokenLogprob] = []
        self._num_passed = 0
        """Number of bytes of the first token that were already matched; that token is not returned again."""

    def add(self, tokens: Iterable[TokenLogprob]) -> None:
        self._tokens.extend(tokens)

    def take(self, text: str) -> list[TokenLogprob]:
        """Return the tokens of the next text; each token once."""
        data = text.encode(errors="replace")
        start = b"".join(token.text for token in self._tokens).find(data, self._num_passed)
        if start < 0 or not data:
            return []
        taken, end, position = [], start + len(data), 0
        for index, token in enumerate(self._tokens):
            begin, position = position, position + len(token.text)
            if position > start and begin < end and (index or not self._num_passed):
                taken.append(token)
            if position > end:
                self._tokens, self._num_passed = self._tokens[index:], max(end - begin, 0)
                return taken
        self._tokens, self._num_passed = [], 0
        return taken
