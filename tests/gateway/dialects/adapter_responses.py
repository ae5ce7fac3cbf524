"""Responses for the contract: requests written, responses read by the real OpenAI client."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, get_type_hints

import openai
from hypothesis import strategies as st
from openai.types import responses
from openai.types.responses import ResponseStreamEvent, response_create_params
from pydantic import TypeAdapter

from m2forge.gateway.dialects.opaque_thinking import encode_thinking
from m2forge.gateway.dialects.openai.responses import OpenAIResponses
from m2forge.gateway.dialects.openai.responses_input import ALLOWED, READ, REFUSED
from m2forge.gateway.dialects.types import CompletionRequest, Ending, Notice, Usage
from m2forge.records import JsonValue
from m2forge.text.message import Message, ToolCall
from tests.gateway.anthropic_client import named_events_of
from tests.gateway.dialects.adapter_chat import OPENAI_ERRORS, openai_details
from tests.gateway.dialects.dialect_contract import Adapter, Body, FieldTable, Heard, Received
from tests.gateway.openai_client import Wire, extras_of

EVENT: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)
BODY: Body = {"model": "m2", "input": "Hi"}
USER: Body = {"role": "user", "content": "Hi"}
TOOL: Body = {"type": "function", "name": "look", "description": "Looks.", "parameters": {"type": "object"}}
CALL: Body = {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": '{"at": 3}'}
RESULT: Body = {"type": "function_call_output", "call_id": "call_1", "output": "A cat."}
THOUGHT: Body = {"type": "reasoning", "id": "rs_1", "summary": []}
CUSTOM: Body = {
    "type": "custom",
    "name": "patch",
    "description": "Patches.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'},
}
NAMESPACE: Body = {"type": "namespace", "name": "team", "description": "Helpers.", "tools": [TOOL, CUSTOM]}
FORMAT: Body = {"type": "json_schema", "name": "count", "schema": {"type": "object"}, "strict": True}
IMAGE: Body = {"type": "input_image", "image_url": "data:,x", "detail": "auto"}
SEALED, LOGPROBS = "reasoning.encrypted_content", "message.output_text.logprobs"
GOOD: dict[str, list[JsonValue]] = {
    "background": [False],
    "client_metadata": [{}, {"session": "1"}],
    "context_management": [[]],
    "frequency_penalty": [-2, 0.5],
    "include": [[], [SEALED], [SEALED, LOGPROBS]],
    "input": ["Hi", [USER]],
    "instructions": ["", "Be brief."],
    "max_output_tokens": [1, 2**31 - 1],
    "max_tool_calls": [1],
    "metadata": [{}, {"task": "7"}],
    "min_p": [0, 0.1],
    "model": ["m2"],
    "parallel_tool_calls": [True, False],
    "presence_penalty": [2],
    "prompt_cache_key": ["key"],
    "prompt_cache_options": [{}, {"mode": "explicit", "ttl": "30m", "prewarm": False}],
    "prompt_cache_retention": ["24h"],
    "reasoning": [
        {},
        {"summary": "auto", "mode": "standard", "context": "all_turns"},
        {"generate_summary": "detailed"},
        {"effort": "low"},
        {"effort": "none"},
    ],
    "repetition_penalty": [1.1],
    "safety_identifier": ["me"],
    "service_tier": ["auto", "default"],
    "store": [False],
    "stream": [True, False],
    "stream_options": [{}, {"include_obfuscation": False}],
    "temperature": [0, 2, 0.7],
    "text": [
        {},
        {"format": {"type": "text"}, "verbosity": "medium"},
        {"format": FORMAT, "verbosity": "low"},
        {"format": {"type": "json_object"}},
    ],
    "tool_choice": [
        "auto",
        "none",
        "required",
        {"type": "function", "name": "look"},
        {"type": "allowed_tools", "mode": "auto", "tools": []},
    ],
    "tools": [
        [],
        [TOOL],
        [TOOL | {"strict": True, "defer_loading": False, "allowed_callers": ["direct"]}],
        [{"type": "web_search", "external_web_access": True}, CUSTOM, NAMESPACE],
    ],
    "top_k": [-1, 40],
    "top_logprobs": [0],
    "top_p": [1, 0.1],
    "truncation": ["disabled"],
    "user": ["me"],
}
BAD: dict[str, list[JsonValue]] = {
    "access_programs": [{"cyber": "standard"}],
    "background": [True, "no"],
    "client_metadata": ["x", []],
    "context_management": [[{"type": "compaction"}], "auto"],
    "conversation": ["conv_1", {"id": "conv_1"}],
    "frequency_penalty": [2.1, "1"],
    "image": [{"context_compression": "auto"}],
    "include": [["file_search_call.results"], [5], SEALED],
    "input": [None, [], {}, 5, [None], ["Hi"], [{"role": "user"}]],
    "instructions": [5, [USER]],
    "max_output_tokens": [0, 1.5, "5", True, 2**31],
    "max_tool_calls": ["5", -1],
    "metadata": [[], {"a": 1}],
    "min_p": [-0.1],
    "model": [None, "", 5],
    "moderation": [{"model": "omni-moderation-latest"}],
    "parallel_tool_calls": ["no"],
    "presence_penalty": [-3],
    "previous_response_id": ["resp_1"],
    "prompt": [{"id": "pmpt_1"}],
    "prompt_cache_key": [5],
    "prompt_cache_options": ["implicit", {"prewarm": True}, {"comparison_response_id": "resp_1"}, {"mode": "none"}],
    "prompt_cache_retention": ["48h"],
    "reasoning": [
        {"effort": "most"},
        {"summary": "concise"},
        {"generate_summary": "concise"},
        {"summary": "long"},
        {"mode": "pro"},
        {"context": "current_turn"},
        {"depth": 1},
        "auto",
    ],
    "repetition_penalty": [0],
    "safety_identifier": [5],
    "service_tier": ["priority", "flex"],
    "store": [True],
    "stream": ["yes"],
    "stream_options": [{"include_obfuscation": True}, {"include_usage": True}],
    "temperature": [-0.1, 2.1, "0"],
    "text": [
        {"format": FORMAT | {"scheme": {}}},
        {"verbosity": "long"},
        {"format": {}},
        {"format": {"type": "x"}},
        "x",
    ],
    "tool_choice": [
        "maybe",
        {"type": "function", "name": "leap"},
        {},
        5,
    ],
    "tools": [
        {},
        [None],
        [TOOL, TOOL],
        [{"type": "local_shell"}],
        [TOOL, {"type": "custom", "name": "look"}],
        [NAMESPACE, NAMESPACE],
        [NAMESPACE | {"tools": [{"type": "web_search"}]}],
        [CUSTOM | {"parameters": {}}],
        [{"name": "look"}],
        [TOOL | {"name": ""}],
        [TOOL | {"strict": "yes"}],
        [TOOL | {"async": True}],
        [TOOL | {"defer_loading": True}],
        [TOOL | {"output_schema": {}}],
        [TOOL | {"allowed_callers": ["programmatic"]}],
        [TOOL | {"parameters": "{}"}],
        [TOOL | {"function": {}}],
    ],
    "top_k": [-2],
    "top_logprobs": [1, -1, True],
    "top_p": [0, 1.1],
    "truncation": ["auto"],
    "user": [5],
}
WHOLE: Body = {
    "model": "m2",
    "instructions": "Be brief.",
    "input": [
        USER,
        THOUGHT | {"content": [{"type": "reasoning_text", "text": "Hm."}], "encrypted_content": encode_thinking("Hm.")},
        {"role": "assistant", "id": "msg_1_0", "content": [{"type": "output_text", "text": "So.", "annotations": []}]},
        CALL | {"id": "fc_1_1"},
        RESULT,
    ],
    "tools": [TOOL],
    "include": [SEALED, LOGPROBS],
    "reasoning": {"summary": "auto"},
    "text": {"format": {"type": "text"}},
    "metadata": {"task": "7"},
    "max_output_tokens": 9,
    "temperature": 0.5,
}
FIELDS = FieldTable(
    sdk={
        *get_type_hints(response_create_params.ResponseCreateParamsStreaming),
        *get_type_hints(response_create_params.ResponseCreateParamsNonStreaming),
    },
    # Codex sends client_metadata.
    extensions={"top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "client_metadata"},
    read=READ,
    allowed=ALLOWED,
    refused=REFUSED.keys(),
    required={"model", "input"},
    good=GOOD,
    bad=BAD,
    unbounded={"model", "input", "instructions", "user", "safety_identifier", "prompt_cache_key", "client_metadata"},
    needs={"tool_choice": {"tools": [TOOL]}},
)
SETTINGS: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {},
    optional={
        "include": st.sampled_from([[], [SEALED], [SEALED, LOGPROBS]]),
        "reasoning": st.sampled_from([{}, {"summary": "auto"}]),
        "instructions": st.text(max_size=5),
        "metadata": st.just({"task": "7"}),
        "tools": st.just([{"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": True}]),
    },
)


class ResponsesAdapter(Adapter):
    dialect = OpenAIResponses()
    fields = FIELDS
    body = BODY
    full = WHOLE
    misspelt = (
        ({"max_output_token": 5}, "max_output_token", "max_output_tokens"),
        ({"input": [USER | {"contents": "x"}]}, "input[0].contents", "content"),
    )
    noted = (
        ({"tool_choice": "required"}, [Notice.TOOL_CHOICE]),
        ({"tool_choice": {"type": "web_search"}}, [Notice.TOOL_CHOICE]),
        ({"tools": [TOOL], "parallel_tool_calls": False}, [Notice.PARALLEL_TOOL_CALLS]),
        ({"reasoning": {"effort": "high"}}, [Notice.RESPONSES_EFFORT]),
        ({"text": {"format": FORMAT, "verbosity": "low"}}, [Notice.TEXT_VERBOSITY, Notice.TEXT_FORMAT]),
        ({"tools": [TOOL, {"type": "web_search", "external_web_access": True}]}, [Notice.VENDOR_TOOL]),
        ({"input": [{"role": "user", "content": [IMAGE]}]}, [Notice.IMAGE]),
        ({"input": [CALL, RESULT | {"output": [IMAGE]}]}, [Notice.IMAGE]),
    )
    prompt_field = "input"
    settings = frozenset({"messages", "tools", "tool_choice", "num_top_logprobs"})
    options = SETTINGS
    # Random tokens have nothing to do with the text, so those found in it depend on the pieces.
    shows_every_token = False
    finish_reasons = MappingProxyType(
        {
            Ending.STOP: "completed",
            Ending.STOP_TEXT: "completed",
            Ending.LENGTH: "incomplete: max_output_tokens",
            Ending.TOOL_CALLS: "completed",
            Ending.ABORT: "incomplete: max_output_tokens",
        }
    )
    errors = OPENAI_ERRORS
    bad_arguments = ("{", "5", "[]", "{} x", '{"a": NaN}', '{"a": 1e999}', None, {}, "[" * 5000)
    arguments_path = "input[1].arguments"

    def __init__(self, client: openai.OpenAI, wire: Wire) -> None:
        self.responses: Any = client.responses
        self.wire = wire

    def write(self, request: CompletionRequest) -> Body:
        messages, instructions = request.messages, None
        if messages and messages[0].role == "system":
            instructions, messages = messages[0].content, messages[1:]
        items: list[JsonValue] = [item for message in messages for item in _write_items(message)]
        tools: list[JsonValue] = [
            {"type": "function", "name": tool.name, "description": tool.description, "parameters": tool.parameters}
            for tool in request.tools
        ]
        body: Body = {"model": request.model, "instructions": instructions, "input": items, "tools": tools}
        body |= {
            "max_output_tokens": request.max_tokens,
            "stream": request.is_streamed,
            "tool_choice": request.tool_choice,
        }
        body["include"] = [] if request.num_top_logprobs is None else [LOGPROBS]
        return body | dataclasses.asdict(request.sampling)

    def write_call(self, arguments: JsonValue) -> Body:
        return BODY | {"input": [USER, CALL | {"arguments": arguments}]}

    def whole(self, options: Mapping[str, Any]) -> Received:
        return _received(self.responses.create(model="m2", input="Hi", **options))

    def streamed(self, options: Mapping[str, Any]) -> Received:
        with self.responses.stream(model="m2", input="Hi", **options) as stream:
            *events, last = list(stream)
        received = _received(last.response)
        texts = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert "".join(texts) == received.completions[0].content
        return received

    def resend(self, turn: Any, results: Sequence[tuple[str, str]]) -> None:
        sent = [{"type": "function_call_output", "call_id": id, "output": text} for id, text in results]
        self.responses.create(model="m2", input=[USER, *turn, *sent, USER])

    def stream_until_error(self) -> tuple[str, str]:
        events = list(self.responses.create(model="m2", input="Hi", stream=True))
        (error,) = [event for event in events if event.type == "error"]
        texts = [event.delta for event in events if event.type == "response.output_text.delta"]
        return "".join(texts), error.message

    def validate(self, text: str) -> None:
        assert not extras_of(responses.Response.model_validate_json(text))

    def validate_events(self, stream: bytes) -> None:
        for number, event in enumerate(named_events_of(stream)):
            read = EVENT.validate_python(event)
            assert read.type == event["type"]
            # The type of a delta's log-probability leaves out what the type of the whole text's has; other releases of
            # the SDK require the name of a call whose arguments are done.
            assert extras_of(read) <= {"bytes", "name"}, event
            assert event["sequence_number"] == number

    def details(self, error: Any) -> tuple[str, str | None, str | None]:
        return openai_details(error)


def _received(response: Any) -> Received:
    items = response.output
    thoughts = [part.text for item in items if item.type == "reasoning" for part in item.content or item.summary]
    calls = tuple(
        ToolCall(item.name, json.loads(item.arguments), item.call_id) for item in items if item.type == "function_call"
    )
    reason = response.status
    if response.incomplete_details is not None:
        reason = f"{reason}: {response.incomplete_details.reason}"
    usage = response.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    details = usage.input_tokens_details, usage.output_tokens_details
    counts = Usage(usage.input_tokens, details[0].cached_tokens, usage.output_tokens, details[1].reasoning_tokens)
    heard = Heard("".join(thoughts), response.output_text, calls, reason, turn=items)
    return Received(response.id, response.model, int(response.created_at), (heard,), counts)


def _write_items(message: Message) -> list[Body]:
    if message.role == "tool":
        return [{"type": "function_call_output", "call_id": message.tool_call_id, "output": message.content}]
    items: list[Body] = []
    if message.thinking:
        items.append(THOUGHT | {"content": [{"type": "reasoning_text", "text": message.thinking}]})
    if message.content or not (message.thinking or message.tool_calls):
        items.append({"role": message.role, "content": message.content})
    return items + [
        CALL | {"call_id": call.id, "name": call.name, "arguments": json.dumps(call.arguments)}
        for call in message.tool_calls
    ]
