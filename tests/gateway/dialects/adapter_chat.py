"""Chat Completions for the contract: requests written, responses read by the real OpenAI client."""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, get_type_hints

import openai
import pytest
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk, completion_create_params
from openai.types.shared import ErrorObject

from m2forge.gateway.dialects.openai.chat import ALLOWED, NOTED, READ, REFUSED, OpenAIChat
from m2forge.gateway.dialects.types import CompletionRequest, Ending, Notice, TokenLogprob, Usage
from m2forge.records import JsonValue
from m2forge.text.message import Message, ToolCall
from tests.gateway.dialects.dialect_contract import Adapter, Body, ErrorCase, FieldTable, Heard, Received
from tests.gateway.openai_client import Wire, events_of, extras_of

USER: Body = {"role": "user", "content": "Hi"}
BODY: Body = {"model": "m2", "messages": [USER]}
TOOL: Body = {
    "type": "function",
    "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}, "strict": True},
}
CALL: Body = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at": 3}'}}
SCHEMA: Body = {"type": "object", "properties": {"n": {"type": "integer"}}}
FORMAT: Body = {"type": "json_schema", "json_schema": {"name": "count", "schema": SCHEMA, "strict": True}}
GOOD: dict[str, list[JsonValue]] = {
    "frequency_penalty": [-2, 0.5],
    "logit_bias": [{}],
    "logprobs": [True, False],
    "max_completion_tokens": [1, 100],
    "max_tokens": [1, 100],
    "messages": [[USER]],
    "metadata": [{}, {"task": "7"}],
    "modalities": [["text"]],
    "model": ["m2"],
    "n": [1, 500],
    "parallel_tool_calls": [True, False],
    "presence_penalty": [2, -0.5],
    "prompt_cache_key": ["key"],
    "prompt_cache_options": [{}, {"mode": "implicit", "ttl": "30m"}],
    "prompt_cache_retention": ["in_memory", "24h"],
    "reasoning_effort": ["none", "low", "xhigh"],
    "response_format": [{"type": "text"}, {"type": "json_object"}, FORMAT],
    "safety_identifier": ["me"],
    "seed": [0, -5, 2**63 - 1],
    "service_tier": ["auto", "default"],
    "stop": ["END", ["a", "b", "c", "d"], []],
    "store": [False],
    "stream": [True, False],
    "temperature": [0, 2, 0.7],
    "tool_choice": [
        "auto",
        "none",
        "required",
        {"type": "function", "function": {"name": "look"}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
    ],
    "tools": [[], [TOOL]],
    "top_p": [1, 0.1],
    "user": ["me"],
    "verbosity": ["low", "medium"],
    "web_search_options": [{}],
    "top_k": [-1, 0, 40],
    "min_p": [0, 0.1],
    "repetition_penalty": [1, 1.1],
    "stream_options": [{}, {"include_usage": True, "include_obfuscation": False}],
    "top_logprobs": [0],
}
BAD: dict[str, list[JsonValue]] = {
    "audio": [{"voice": "alloy", "format": "wav"}],
    "frequency_penalty": [2.1, "1", True],
    "function_call": ["auto"],
    "functions": [[{"name": "look"}]],
    "logit_bias": [{"5": 10}, []],
    "logprobs": ["yes", 1],
    "max_completion_tokens": [0, 1.5, -1, True, 2**31],
    "max_tokens": [0, "5"],
    "messages": [None, [], "Hi", {}, [None], ["Hi"]],
    "metadata": [[], {"a": 1}, {"k" * 65: ""}, {"k": "v" * 513}, {str(key): "" for key in range(17)}],
    "modalities": [["audio"], ["text", "audio"], "text"],
    "model": [None, "", 5],
    "moderation": [{"model": "omni-moderation-latest"}],
    "n": [0, 2**31, "2"],
    "parallel_tool_calls": ["no"],
    "prediction": [{"type": "content", "content": "x"}],
    "presence_penalty": [-3],
    "prompt_cache_key": [5],
    "prompt_cache_options": ["implicit", {"mode": "none"}, {"size": 1}],
    "prompt_cache_retention": ["48h"],
    "reasoning_effort": ["most", 3],
    "response_format": [
        {"type": "grammar"},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"name": "a", "scheme": {}}},
        {"type": "json_schema", "json_schema": {"schema": {}}},
        FORMAT | {"type": "json_object"},
        "text",
        {},
    ],
    "safety_identifier": [5],
    "seed": [0.5, 2**63],
    "service_tier": ["priority", "flex"],
    "stop": [[""], "", ["a"] * 5, 5, [5]],
    "store": [True],
    "stream": ["yes"],
    "stream_options": [{"include_usage": True}],
    "temperature": [-0.1, 2.1, "0"],
    "tool_choice": [
        "maybe",
        {"type": "function", "function": {"name": "leap"}},
        {"type": "function", "function": {}},
        {"kind": "function"},
        5,
    ],
    "tools": [
        [{"type": "custom", "custom": {"name": "x"}}],
        [{"type": "function"}],
        [{"type": "function", "function": {"name": ""}}],
        [{"function": {"name": "x"}}],
        [TOOL, TOOL],
        {},
    ],
    "top_logprobs": [0],
    "top_p": [0, 1.1],
    "user": [5],
    "verbosity": ["long"],
    "web_search_options": ["on"],
    "top_k": [-2, 0.5],
    "min_p": [-0.1],
    "repetition_penalty": [0],
}
FIELDS = FieldTable(
    sdk={
        *get_type_hints(completion_create_params.CompletionCreateParamsStreaming),
        *get_type_hints(completion_create_params.CompletionCreateParamsNonStreaming),
    },
    extensions={"top_k", "min_p", "repetition_penalty"},
    read=READ,
    allowed=ALLOWED | NOTED.keys(),
    refused=REFUSED.keys(),
    required={"model", "messages"},
    good=GOOD,
    bad=BAD,
    unbounded={"stop", "model", "user", "safety_identifier", "prompt_cache_key", "web_search_options"},
    needs={"stream_options": {"stream": True}, "top_logprobs": {"logprobs": True}, "tool_choice": {"tools": [TOOL]}},
)
ASSISTANT: Body = {"role": "assistant", "content": None, "reasoning_content": "Hm", "tool_calls": [CALL]}
IMAGE: Body = {"type": "image_url", "image_url": {"url": "data:,x", "detail": "low"}}
RESULT: Body = {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "x"}]}
OPENAI_ERRORS = (
    ErrorCase(400, "invalid_request_error", openai.BadRequestError),
    ErrorCase(401, "invalid_request_error", openai.AuthenticationError, "invalid_api_key"),
    ErrorCase(403, "invalid_request_error", openai.PermissionDeniedError),
    ErrorCase(404, "invalid_request_error", openai.NotFoundError),
    ErrorCase(413, "invalid_request_error", openai.APIStatusError, "request_too_large"),
    ErrorCase(429, "insufficient_quota", openai.RateLimitError, "insufficient_quota"),
    ErrorCase(500, "server_error", openai.InternalServerError),
    ErrorCase(503, "server_error", openai.InternalServerError, "service_unavailable"),
)


def write_settings(request: CompletionRequest) -> Body:
    """The fields that Chat Completions and Completions share."""
    logprobs: JsonValue = None if request.num_top_logprobs is None else request.num_top_logprobs
    body: Body = {
        "model": request.model,
        "stop": list(request.stop_texts),
        "seed": request.seed,
        "n": request.num_samples,
    }
    return body | {"stream": request.is_streamed, "logprobs": logprobs} | dataclasses.asdict(request.sampling)


def openai_details(error: Any) -> tuple[str, str | None, str | None]:
    ErrorObject.model_validate(error.body, strict=True)
    assert error.param is not None
    return error.type, error.param, error.code


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else -9999.0


class ChatAdapter(Adapter):
    dialect = OpenAIChat()
    fields = FIELDS
    body = BODY
    full = {name: values[-1] for name, values in GOOD.items()} | {
        "messages": [USER, ASSISTANT, RESULT],
        "stream": True,
        "logprobs": True,
        "parallel_tool_calls": True,
    }
    misspelt = (
        ({"temprature": 0}, "temprature", "temperature"),
        ({"messages": [USER | {"contents": "x"}]}, "messages[0].contents", "content"),
    )
    noted = (
        ({"tool_choice": "required"}, [Notice.TOOL_CHOICE]),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "look"}}}, [Notice.TOOL_CHOICE]),
        ({"tools": [TOOL], "parallel_tool_calls": False}, [Notice.PARALLEL_TOOL_CALLS]),
        ({"reasoning_effort": "low", "verbosity": "low"}, [Notice.REASONING_EFFORT, Notice.VERBOSITY]),
        ({"response_format": FORMAT}, [Notice.RESPONSE_FORMAT]),
        ({"response_format": {"type": "json_object"}}, [Notice.RESPONSE_FORMAT]),
        ({"web_search_options": {}}, [Notice.WEB_SEARCH]),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, [Notice.IMAGE]),
        ({"messages": [USER, ASSISTANT | {"name": "bob"}, RESULT]}, [Notice.ASSISTANT_NAME]),
    )
    prompt_field = "messages"
    settings = frozenset({"messages", "tools", "tool_choice", "stop_texts", "seed", "num_samples", "num_top_logprobs"})
    options = st.fixed_dictionaries(
        {"logprobs": st.booleans()}, optional={"stream_options": st.just({"include_usage": True})}
    )
    finish_reasons = MappingProxyType(
        {
            Ending.STOP: "stop",
            Ending.STOP_TEXT: "stop",
            Ending.LENGTH: "length",
            Ending.TOOL_CALLS: "tool_calls",
            Ending.ABORT: "length",
        }
    )
    errors = OPENAI_ERRORS
    bad_arguments = ("{", "5", "[]", "{} x", '{"a": NaN}', '{"a": 1e999}', None, {}, "[" * 5000)
    arguments_path = "messages[1].tool_calls[0].function.arguments"

    def __init__(self, client: openai.OpenAI, wire: Wire) -> None:
        self.completions: Any = client.chat.completions
        self.wire = wire

    def write(self, request: CompletionRequest) -> Body:
        tools: list[JsonValue] = [
            {
                "type": "function",
                "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
            }
            for tool in request.tools
        ]
        settings = write_settings(request) | {
            "max_completion_tokens": request.max_tokens,
            "tool_choice": request.tool_choice,
        }
        settings["logprobs"] = request.num_top_logprobs is not None
        return settings | {"messages": [_write_message(message) for message in request.messages], "tools": tools}

    def write_call(self, arguments: JsonValue) -> Body:
        call = CALL | {"function": {"name": "look", "arguments": arguments}}
        return BODY | {"messages": [USER, {"role": "assistant", "tool_calls": [call]}]}

    def whole(self, options: Mapping[str, Any]) -> Received:
        kept = {name: value for name, value in options.items() if name != "stream_options"}
        return self._received(self.completions.create(model="m2", messages=[USER], **kept))

    def streamed(self, options: Mapping[str, Any]) -> Received:
        with self.completions.stream(model="m2", messages=[USER], **options) as stream:
            stream.until_done()
            # The final completion would be the same, but the SDK raises for one that reached its limit.
            return self._received(stream.current_completion_snapshot)

    def resend(self, turn: Any, results: Sequence[tuple[str, str]]) -> None:
        sent = [{"role": "tool", "tool_call_id": id, "content": text} for id, text in results]
        self.completions.create(model="m2", messages=[USER, turn, *sent, USER])

    def stream_until_error(self) -> tuple[str, str]:
        texts: list[str] = []
        with (
            self.completions.create(model="m2", messages=[USER], stream=True) as stream,
            pytest.raises(openai.APIError) as caught,
        ):
            texts.extend(chunk.choices[0].delta.content or "" for chunk in stream)
        return "".join(texts), str(caught.value)

    def validate(self, text: str) -> None:
        assert extras_of(ChatCompletion.model_validate_json(text, strict=True)) <= {"reasoning_content"}

    def validate_events(self, stream: bytes) -> None:
        *events, last = events_of(stream)
        assert last == "[DONE]"
        for event in events:
            chunk = ChatCompletionChunk.model_validate_json(event, strict=True)
            assert extras_of(chunk) <= {"reasoning_content"}

    def details(self, error: Any) -> tuple[str, str | None, str | None]:
        return openai_details(error)

    def token(self, token: TokenLogprob) -> object:
        return token.text, token.text.decode(errors="replace"), finite(token.logprob)

    def has_streamed_usage(self, request: CompletionRequest) -> bool:
        return bool(request.echo.get("include_usage"))

    def _received(self, completion: Any) -> Received:
        assert [choice.index for choice in completion.choices] == list(range(len(completion.choices)))
        heard = tuple(_heard(choice) for choice in completion.choices)
        return Received(completion.id, completion.model, completion.created, heard, usage_of(completion.usage))


def usage_of(usage: Any) -> Usage | None:
    if usage is None:
        return None
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    cached, thinking = usage.prompt_tokens_details.cached_tokens, usage.completion_tokens_details.reasoning_tokens
    return Usage(usage.prompt_tokens, cached, usage.completion_tokens, thinking)


def _heard(choice: Any) -> Heard:
    message = choice.message
    calls = tuple(
        ToolCall(call.function.name, json.loads(call.function.arguments), call.id) for call in message.tool_calls or ()
    )
    # Content is null beside calls alone, and text wherever there are none.
    assert message.content or (message.content is None) == bool(calls)
    tokens = None
    if choice.logprobs is not None:
        tokens = tuple((bytes(one.bytes), one.token, one.logprob) for one in choice.logprobs.content or ())
    return Heard(
        thinking=getattr(message, "reasoning_content", ""),
        content=message.content or "",
        calls=calls,
        finish_reason=choice.finish_reason,
        logprobs=tokens,
        turn=message,
    )


def _write_message(message: Message) -> Body:
    if message.role == "tool":
        return {"role": "tool", "tool_call_id": message.tool_call_id, "content": message.content}
    body: Body = {"role": message.role, "content": message.content}
    if message.role != "assistant":
        return body
    calls: list[JsonValue] = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": json.dumps(call.arguments)}}
        for call in message.tool_calls
    ]
    return body | {"reasoning_content": message.thinking, "tool_calls": calls}
