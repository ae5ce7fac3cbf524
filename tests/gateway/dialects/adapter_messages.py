"""Anthropic's Messages for the contract: requests written, responses read by the real Anthropic client."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, get_type_hints

import anthropic
import pytest
from anthropic import types
from anthropic.types import message_create_params
from anthropic.types.shared import ErrorResponse
from hypothesis import strategies as st
from pydantic import TypeAdapter

from m2forge.gateway.dialects.anthropic.messages import ALLOWED, READ, REFUSED, AnthropicMessages
from m2forge.gateway.dialects.opaque_thinking import decode_thinking
from m2forge.gateway.dialects.types import CompletionRequest, Ending, Notice, Usage
from m2forge.records import JsonValue
from m2forge.text.message import Message, ToolCall
from tests.gateway.anthropic_client import named_events_of
from tests.gateway.dialects.dialect_contract import GONE, Adapter, Body, ErrorCase, FieldTable, Heard, Received
from tests.gateway.openai_client import Wire, extras_of

DISPLAYS = ("summarized", "omitted")
EVENT: TypeAdapter[types.RawMessageStreamEvent] = TypeAdapter(types.RawMessageStreamEvent)

USER: Body = {"role": "user", "content": "Hi"}
BODY: Body = {"model": "m2", "max_tokens": 64, "messages": [USER]}
CACHE: Body = {"type": "ephemeral", "ttl": "1h"}
TOOL: Body = {"name": "look", "description": "Looks.", "input_schema": {"type": "object"}}
USE: Body = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": 3}}
CALLED: Body = {"role": "assistant", "content": [USE]}
RESULT: Body = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "A cat."}
IMAGE: Body = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
FORMAT: Body = {"type": "json_schema", "schema": {"type": "object"}}
GOOD: dict[str, list[JsonValue]] = {
    "cache_control": [CACHE, {"type": "ephemeral"}],
    "context_management": [{}, {"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}],
    "max_tokens": [1, 2**31 - 1],
    "messages": [[USER]],
    "metadata": [{}, {"user_id": "me"}, {"user_id": None}],
    "model": ["m2"],
    "output_config": [{}, {"effort": "high", "format": None}, {"effort": "low", "format": FORMAT}],
    "service_tier": ["auto", "standard_only"],
    "speed": ["standard"],
    "stop_sequences": [[], ["END", "\n"]],
    "stream": [True, False],
    "system": ["", "Be brief.", [], [{"type": "text", "text": "Be brief.", "cache_control": CACHE}]],
    "temperature": [0, 1, 0.5],
    "thinking": [
        {"type": "enabled", "budget_tokens": 1024},
        {"type": "adaptive", "display": "omitted"},
        {"type": "disabled"},
        {"type": "between_tools"},
    ],
    "tool_choice": [
        {"type": "auto", "disable_parallel_tool_use": False},
        {"type": "none"},
        {"type": "any"},
        {"type": "tool", "name": "look"},
        {"type": "auto", "disable_parallel_tool_use": True},
    ],
    "tools": [
        [],
        [TOOL],
        [TOOL | {"type": "custom", "cache_control": CACHE, "strict": False, "defer_loading": False}],
        [TOOL | {"strict": True}],
        [TOOL | {"defer_loading": True}],
        [{"type": "web_search_20250305", "name": "web_search"}],
    ],
    "top_k": [0, 40],
    "top_p": [1, 0.1],
}
BAD: dict[str, list[JsonValue]] = {
    "cache_control": ["ephemeral", {"type": "forever"}, {"type": "ephemeral", "ttl": "2h"}, {"kind": "ephemeral"}],
    "container": ["box", {"id": "box"}],
    "context_management": [{"edits": [{"type": "clear_tool_uses_20250919"}]}, {"edits": [None]}, {"edit": []}, []],
    "diagnostics": [{"previous_message_id": None}],
    "inference_geo": ["us"],
    "max_tokens": [None, 0, 1.5, "5", True, 2**31],
    "mcp_servers": [[]],
    "messages": [None, [], "Hi", {}, [None], ["Hi"], [USER, {"role": "assistant", "content": "I"}], [{"role": "user"}]],
    "metadata": [[], {"user_id": 5}, {"user": "me"}],
    "model": [None, "", 5],
    "output_config": [{"effort": "most"}, {"format": {}}, {"format": FORMAT | {"name": "x"}}, {"format": "json"}, ""],
    "service_tier": ["priority"],
    "speed": ["fast", 1],
    "stop_sequences": ["END", [""], [5]],
    "stream": ["yes", 1],
    "system": [5, {}, [5], [{"type": "image", "source": {}}], [{"type": "text"}]],
    "temperature": [-0.1, 1.1, "0", True],
    "thinking": [
        {"type": "enabled"},
        {"type": "enabled", "budget_tokens": 5},
        {"type": "adaptive", "budget_tokens": 2048},
        {"type": "adaptive", "display": "all"},
        {"type": "deep"},
        {},
        True,
    ],
    "tool_choice": [
        {"type": "tool", "name": "leap"},
        {"type": "tool"},
        {"type": "auto", "name": "look"},
        {"type": "maybe"},
        {},
        "auto",
    ],
    "tools": [
        {},
        [None],
        [TOOL, TOOL],
        [{"type": "bash_20250124", "name": "bash"}],
        [{"name": "look"}],
        [TOOL | {"name": ""}],
        [TOOL | {"strict": "yes"}],
        [TOOL | {"defer_loading": 1}],
        [TOOL | {"input_examples": [{}]}],
        [TOOL | {"allowed_callers": ["code_execution_20260120"]}],
        [TOOL | {"input_schema": [1]}],
        [TOOL | {"parameters": {}}],
    ],
    "top_k": [-1, 0.5],
    "top_p": [0, 1.1],
    "user_profile_id": ["me"],
    "workspace_id": ["wrkspc_1"],
}
WHOLE: Body = BODY | {
    "system": [{"type": "text", "text": "Be brief.", "cache_control": CACHE}],
    "messages": [
        USER,
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": "s"}, USE]},
        {"role": "user", "content": [RESULT | {"is_error": True}, {"type": "text", "text": "So?"}]},
    ],
    "tools": [TOOL],
    "tool_choice": {"type": "auto"},
    "thinking": {"type": "enabled", "budget_tokens": 2048},
    "stop_sequences": ["END"],
    "metadata": {"user_id": "me"},
    "output_config": {"effort": "high"},
    "temperature": 0.5,
    "top_k": 3,
}
FIELDS = FieldTable(
    sdk={
        *get_type_hints(message_create_params.MessageCreateParamsStreaming),
        *get_type_hints(message_create_params.MessageCreateParamsNonStreaming),
    },
    # Fields that the vendor accepts though the SDK's type does not have them.
    extensions={"context_management", "mcp_servers", "temperature", "top_k", "top_p"},
    read=READ,
    allowed=ALLOWED,
    refused=REFUSED.keys(),
    required={"model", "messages", "max_tokens"},
    good=GOOD,
    bad=BAD,
    unbounded={"model", "system", "stop_sequences"},
    needs={"tool_choice": {"tools": [TOOL]}},
)


class MessagesAdapter(Adapter):
    dialect = AnthropicMessages()
    fields = FIELDS
    body = BODY
    full = WHOLE
    misspelt = (
        ({"max_token": 5}, "max_token", "max_tokens"),
        ({"messages": [USER | {"contents": "x"}]}, "messages[0].contents", "content"),
    )
    noted = (
        ({"tool_choice": {"type": "any"}}, [Notice.TOOL_CHOICE]),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "look"}}, [Notice.TOOL_CHOICE]),
        ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, [Notice.DISABLE_PARALLEL_TOOL_USE]),
        ({"output_config": {"format": FORMAT, "effort": "low"}}, [Notice.OUTPUT_FORMAT, Notice.OUTPUT_EFFORT]),
        ({"thinking": {"type": "disabled"}}, [Notice.THINKING]),
        ({"tools": [TOOL | {"strict": True}]}, [Notice.STRICT_TOOL]),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, [Notice.VENDOR_TOOL]),
        ({"messages": [{"role": "user", "content": [IMAGE, IMAGE]}]}, [Notice.IMAGE]),
        ({"messages": [USER, CALLED, {"role": "user", "content": [RESULT | {"content": [IMAGE]}]}]}, [Notice.IMAGE]),
    )
    prompt_field = "messages"
    settings = frozenset({"messages", "tools", "tool_choice", "stop_texts"})
    sampling = frozenset({"temperature", "top_p", "top_k"})
    max_temperature = 1.0
    options = st.sampled_from([{}, *({"thinking": {"type": "adaptive", "display": d}} for d in DISPLAYS)])
    has_created = False
    finish_reasons = MappingProxyType(
        {
            Ending.STOP: "end_turn",
            Ending.STOP_TEXT: "stop_sequence: END",
            Ending.LENGTH: "max_tokens",
            Ending.TOOL_CALLS: "tool_use",
            Ending.ABORT: "max_tokens",
        }
    )
    errors = (
        ErrorCase(400, "invalid_request_error", anthropic.BadRequestError),
        ErrorCase(401, "authentication_error", anthropic.AuthenticationError),
        ErrorCase(403, "permission_error", anthropic.PermissionDeniedError),
        ErrorCase(404, "not_found_error", anthropic.NotFoundError),
        ErrorCase(405, "invalid_request_error", anthropic.APIStatusError),
        ErrorCase(413, "request_too_large", anthropic.APIStatusError),
        ErrorCase(429, "rate_limit_error", anthropic.RateLimitError),
        ErrorCase(500, "api_error", anthropic.InternalServerError),
        ErrorCase(503, "overloaded_error", anthropic.InternalServerError),
        ErrorCase(529, "overloaded_error", anthropic.InternalServerError),
    )
    bad_arguments = ("{}", 5, [], None, True)
    arguments_path = "messages[1].content[0].input"

    def __init__(self, client: anthropic.Anthropic, wire: Wire) -> None:
        self.messages: Any = client.messages
        self.wire = wire

    @property
    def reads(self) -> Sequence[Callable[[Body], CompletionRequest]]:
        dialect = AnthropicMessages()
        return [dialect.read, dialect.read_count]

    def write(self, request: CompletionRequest) -> Body:
        messages, body = request.messages, Body(model=request.model)
        if messages and messages[0].role == "system":
            body["system"], messages = messages[0].content, messages[1:]
        tools: list[JsonValue] = [
            {"name": tool.name, "description": tool.description, "input_schema": tool.parameters}
            for tool in request.tools
        ]
        body |= {"messages": [_write_message(message) for message in messages], "tools": tools}
        body |= {
            "max_tokens": request.max_tokens,
            "stop_sequences": list(request.stop_texts),
            "stream": request.is_streamed,
        }
        body |= {name: getattr(request.sampling, name) for name in self.sampling}
        return body | {"tool_choice": {"type": request.tool_choice}}

    def write_call(self, arguments: JsonValue) -> Body:
        return BODY | {"messages": [USER, {"role": "assistant", "content": [USE | {"input": arguments}]}, USER]}

    def whole(self, options: Mapping[str, Any]) -> Received:
        message = self.messages.create(model="m2", max_tokens=9, messages=[USER], **options)
        order = [block.type for block in message.content]
        assert order == sorted(order, key=["thinking", "text", "tool_use"].index)
        return _received(message)

    def streamed(self, options: Mapping[str, Any]) -> Received:
        with self.messages.stream(model="m2", max_tokens=9, messages=[USER], **options) as stream:
            kinds = [event.type for event in stream]
            received = _received(stream.get_final_message())
        assert kinds[0] == "message_start"
        assert kinds[-2:] == ["message_delta", "message_stop"]
        return received

    def resend(self, turn: Any, results: Sequence[tuple[str, str]]) -> None:
        sent = [{"type": "tool_result", "tool_use_id": id, "content": text} for id, text in results]
        answered = [{"role": "user", "content": sent}] if sent else []
        turns = [USER, {"role": "assistant", "content": turn}, *answered, USER]
        self.messages.create(model="m2", max_tokens=9, messages=turns)

    def stream_until_error(self) -> tuple[str, str]:
        with (
            pytest.raises(anthropic.APIStatusError) as caught,
            self.messages.stream(model="m2", max_tokens=9, messages=[USER]) as stream,
        ):
            texts: list[str] = []
            texts.extend(stream.text_stream)
        assert caught.value.body == {"type": "error", "error": {"type": "overloaded_error", "message": GONE}}
        return "".join(texts), str(caught.value)

    def validate(self, text: str) -> None:
        assert not extras_of(types.Message.model_validate_json(text))

    def validate_events(self, stream: bytes) -> None:
        for event in named_events_of(stream):
            read = EVENT.validate_python(event, strict=True)
            assert read.type == event["type"]
            assert not extras_of(read), event

    def details(self, error: Any) -> tuple[str, str | None, str | None]:
        body = error.body
        assert body == {"type": "error", "error": {"type": body["error"]["type"], "message": "this cannot be"}}
        if body["error"]["type"] != "request_too_large":  # The SDK has no type for it.
            ErrorResponse.model_validate(body)
        return body["error"]["type"], None, None


def _received(message: Any) -> Received:
    blocks = message.content
    thoughts = [
        block.thinking or decode_thinking(block.signature) or "" for block in blocks if block.type == "thinking"
    ]
    text = "".join(block.text for block in blocks if block.type == "text")
    calls = tuple(ToolCall(block.name, block.input, block.id) for block in blocks if block.type == "tool_use")
    reason = message.stop_reason if message.stop_sequence is None else f"{message.stop_reason}: {message.stop_sequence}"
    usage = message.usage
    cached = usage.cache_read_input_tokens
    # The vendor counts cached tokens apart from the other input.
    thinking = usage.output_tokens_details.thinking_tokens
    counts = Usage(usage.input_tokens + cached, cached, usage.output_tokens, thinking)
    heard = Heard("".join(thoughts), text, calls, reason, turn=blocks)
    return Received(message.id, message.model, None, (heard,), counts)


def _write_message(message: Message) -> Body:
    if message.role == "tool":
        block: Body = RESULT | {"tool_use_id": message.tool_call_id, "content": message.content}
        return {"role": "user", "content": [block]}
    if message.role != "assistant":
        return {"role": message.role, "content": message.content}
    blocks: list[JsonValue] = []
    if message.thinking:
        blocks.append({"type": "thinking", "thinking": message.thinking, "signature": "someone's"})
    if message.content:
        blocks.append({"type": "text", "text": message.content})
    blocks += [USE | {"id": call.id, "name": call.name, "input": call.arguments} for call in message.tool_calls]
    return {"role": "assistant", "content": blocks}
