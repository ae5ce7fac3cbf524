"""Anthropic Messages, the response as server-sent events, and the parts that both response forms share.

    message_start
    content_block_start, content_block_delta…, content_block_stop        for each block, one after the other
        thinking    thinking_delta…, signature_delta                     omitted thinking: the signature alone
        text        text_delta…
        tool_use    input_json_delta: the arguments in one piece, once complete
    message_delta (stop_reason, usage), message_stop                     or error, at any time

A tool call is sent when it is complete, so a call that the model did not finish is never sent. Text after a call gets
its own text block; a client that sends all blocks back sends the same message.
"""

import json
from collections.abc import Mapping, Sequence

from m2forge.gateway.exchange import Answer, Ending, TokenLogprob, Usage
from m2forge.gateway.seal import seal, sign
from m2forge.records import JsonValue
from m2forge.text.completion import CallFinished, ContentDelta, Event, ThinkingDelta
from m2forge.text.message import ToolCall

_STOP_REASONS: Mapping[Ending, str] = {
    Ending.STOP: "end_turn",
    Ending.STOP_TEXT: "stop_sequence",
    Ending.LENGTH: "max_tokens",
    Ending.TOOL_CALLS: "tool_use",
    # The vendor has no such stop reason; this one tells the client that the text was cut off.
    Ending.ABORT: "max_tokens",
}
_ERROR_TYPES: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
_MESSAGE_STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'

_quote = json.JSONEncoder(separators=(",", ":")).encode
"""Escapes to ASCII: Unicode line separators would break event lines for some clients."""


class MessagesStream:
    """See `exchange.Stream`."""

    def __init__(self, model: str, id: str, *, is_omitted: bool) -> None:
        self._model, self._id, self._is_omitted = model, id, is_omitted
        self._index = -1
        """Index of the most recently started block."""
        self._open: type[ThinkingDelta | ContentDelta] | None = None
        """Event type that the open block accepts; None while no block is open."""
        self._prefix = b""
        """Bytes of the open block's delta events before the text."""
        self._thinking: list[str] = []
        """Omitted thinking of the open block."""
        self._stop: dict[str, JsonValue] = {"stop_reason": None, "stop_sequence": None}

    def begin(self, num_prompt: int, num_cached: int) -> bytes:
        message: dict[str, JsonValue] = {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage_body(Usage(num_prompt, num_cached, 0, 0)),
        }
        return _event("message_start", {"message": message})

    def piece(self, sample: int, events: Sequence[Event], logprobs: Sequence[TokenLogprob]) -> bytes:
        return b"".join(map(self._one, events))

    def end_sample(self, sample: int, answer: Answer) -> bytes:
        self._stop = stop_body(answer)
        return self._close()

    def finish(self, usage: Usage) -> bytes:
        return _event("message_delta", {"delta": self._stop, "usage": usage_body(usage)}) + _MESSAGE_STOP

    def fail(self, status: int, message: str) -> bytes:
        return _event("error", error_body(status, message))

    def _one(self, event: Event) -> bytes:
        if isinstance(event, ContentDelta):
            start = b"" if self._open is ContentDelta else self._start({"type": "text", "text": ""}, "text", event)
            return b"%b%b%b}}\n\n" % (start, self._prefix, _quote(event.text).encode())
        if isinstance(event, ThinkingDelta):
            block: dict[str, JsonValue] = {"type": "thinking", "thinking": "", "signature": ""}
            start = b"" if self._open is ThinkingDelta else self._start(block, "thinking", event)
            if self._is_omitted:
                self._thinking.append(event.text)
                return start
            return b"%b%b%b}}\n\n" % (start, self._prefix, _quote(event.text).encode())
        return self._call(event.call) if isinstance(event, CallFinished) else b""

    def _start(self, block: JsonValue, name: str, event: ThinkingDelta | ContentDelta) -> bytes:
        closed = self._close()
        self._index += 1
        self._open = type(event)
        self._prefix = (
            f'event: content_block_delta\ndata: {{"type":"content_block_delta","index":{self._index},'
            f'"delta":{{"type":"{name}_delta","{name}":'
        ).encode()
        return closed + _event("content_block_start", {"index": self._index, "content_block": block})

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        signed = b""
        if self._open is ThinkingDelta:
            sign = signature("".join(self._thinking), self._id, self._is_omitted)
            delta: dict[str, JsonValue] = {"type": "signature_delta", "signature": sign}
            signed = _event("content_block_delta", {"index": self._index, "delta": delta})
            self._thinking.clear()
        self._open = None
        return signed + _event("content_block_stop", {"index": self._index})

    def _call(self, call: ToolCall) -> bytes:
        closed = self._close()
        self._index += 1
        delta: dict[str, JsonValue] = {"type": "input_json_delta", "partial_json": _quote(call.arguments)}
        return (
            closed
            + _event("content_block_start", {"index": self._index, "content_block": tool_use_body(call, {})})
            + _event("content_block_delta", {"index": self._index, "delta": delta})
            + _event("content_block_stop", {"index": self._index})
        )


def signature(thinking: str, id: str, is_omitted: bool) -> str:
    """Return a thinking block's signature: it contains the thinking if that is omitted; otherwise it is unused."""
    return seal(thinking) if is_omitted else sign(id)


def tool_use_body(call: ToolCall, input: JsonValue) -> dict[str, JsonValue]:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": input}


def stop_body(answer: Answer) -> dict[str, JsonValue]:
    return {"stop_reason": _STOP_REASONS[answer.ending], "stop_sequence": answer.stop_text}


def usage_body(usage: Usage) -> dict[str, JsonValue]:
    return {
        "input_tokens": usage.num_prompt - usage.num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.num_cached,
        "output_tokens": usage.num_sampled,
        "output_tokens_details": {"thinking_tokens": usage.num_thinking},
    }


def error_body(status: int, message: str) -> dict[str, JsonValue]:
    kind = _ERROR_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def _event(name: str, fields: Mapping[str, JsonValue]) -> bytes:
    return f"event: {name}\ndata: {_quote({'type': name, **fields})}\n\n".encode()
