"""Anthropic's Messages: `POST /v1/messages`, `POST /v1/messages/count_tokens`, and Anthropic's model list.

The request: JSON in, `CompletionRequest` out, or `BadRequestError` naming the field. Fields in `READ` are honoured.
Fields in `ALLOWED` cannot change the response, or are accepted only with a no-op value. Fields in `REFUSED` cannot be
honoured. What is not applied is noted: forced tool calls, the limit to one call, effort, thinking that is switched off;
and the output format, which is written into the prompt. System and messages become a `Conversation`:

    user        text, image (a placeholder text), tool_result
    assistant   text, thinking, tool_use; consecutive messages are one turn, as at the vendor
    system      text; after the first turn it becomes a user turn

A result with `is_error` gets the prefix `Error: `, because chat templates show the model no flag. Signatures of
thinking blocks are not verified: comparing the thinking with the recorded one shows whether it was sampled here. If a
block's thinking is empty, it is read from the signature, provided it is one of ours (`opaque_thinking.py`).

`cache_control` is allowed anywhere, because it cannot change the response. Documents, citations, blocks of the vendor's
server-side tools, redacted thinking and response prefill by the client are refused. Tools that the vendor runs are not
shown to the model; tools of the vendor's own schemas that the client runs (`bash_20250124`) are refused.

A tool with `defer_loading` is not described in the prompt. A result that refers to it (`tool_reference`) shows its
description to the model at that position, as at the vendor, so that the turns before it keep their recorded tokens.

Thinking cannot be disabled or limited: the policy is sampled as it is. `enabled` and `adaptive` are accepted as no-ops
(the vendor treats `budget_tokens` as a target; `max_tokens` is the limit). `display` is honoured; the "summary" is the
full thinking.

The response's content is a thinking block, a text block and one tool_use block per call; empty blocks are left out.
Cached prompt tokens are counted separately from `input_tokens`, as the vendor does. As server-sent events:

    message_start
    content_block_start, content_block_delta…, content_block_stop        for each block, one after the other
        thinking    thinking_delta…, signature_delta                     omitted thinking: only the signature
        text        text_delta…
        tool_use    input_json_delta: the arguments in one piece, once complete
    message_delta (stop_reason, usage), message_stop                     or error, at any time

A tool call is sent when it is complete, so a call that the model did not finish is never sent. Text after a call gets
its own text block; a client that sends all blocks back sends the same message.

Anthropic clients get the model list on the same routes as OpenAI's, in Anthropic's format.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal, NoReturn

from m2forge.errors import RecordError
from m2forge.gateway.dialects.conversation import Conversation, format_instruction
from m2forge.gateway.dialects.opaque_thinking import decode_thinking, encode_thinking, sign
from m2forge.gateway.dialects.types import (
    READ_DEFAULTS,
    BadRequestError,
    CompletionOutput,
    CompletionRequest,
    Ending,
    Fields,
    Notice,
    Reading,
    ReadOptions,
    TokenLogprob,
    Usage,
    make_tool,
    read_list,
    read_object,
    read_text,
    read_tools,
    refuse_value,
    shown,
)
from m2forge.records import MAX_INT32, JsonValue, Sampling
from m2forge.text.message import Tool, ToolCall, tool_to_openai
from m2forge.text.parser import CallFinished, Completion, ContentDelta, Event, ThinkingDelta

TEXT_FIELDS = frozenset({"type", "text", "cache_control", "citations"})
THINKING_FIELDS = frozenset({"type", "thinking", "signature"})
USE_FIELDS = frozenset({"type", "id", "name", "input", "cache_control", "caller", "toolset_name"})
RESULT_FIELDS = frozenset({"type", "tool_use_id", "content", "is_error", "cache_control", "toolset_name"})


def read_conversation(fields: Fields, tools: "_Tools", reading: Reading) -> Conversation:
    conversation = Conversation(reading)
    by_name = {tool.name: tool for tool in (*tools.shown, *tools.deferred)}
    texts = _Texts(reading, frozenset(by_name), by_name)
    if fields.has("system"):
        conversation.say("system", texts.join(fields.value("system"), "system", _SYSTEM_BLOCKS))
    values = read_list(fields.value("messages"), "messages")
    if not values:
        raise BadRequestError("messages: expected at least one message, received none", "messages")
    for index, value in enumerate(values):
        message = Fields(value, {"role", "content"}, f"messages[{index}]")
        role, location = message.choice("role", ("user", "assistant", "system")), message.path("content")
        content = message.value("content")
        if role == "assistant":
            _read_assistant(conversation, content, location)
        elif role == "user":
            _read_user(conversation, texts, content, location)
        elif role == "system":
            conversation.say("system", texts.join(content, location, _SYSTEM_BLOCKS))
        else:
            refuse_value(message.path("role"), "'user', 'assistant' or 'system'", None)
    return conversation


def check_cache_control(fields: Fields) -> None:
    control = fields.object("cache_control", {"type", "ttl", "scope"})
    if control is not None:
        control.choice("type", ("ephemeral",))
        control.choice("ttl", ("5m", "1h"))


_SYSTEM_BLOCKS, _USER_BLOCKS, _RESULT_BLOCKS = ("text",), ("text", "image"), ("text", "image", "tool_reference")
"""Types of blocks that are shown as text, by the message that holds them."""


@dataclass(frozen=True, slots=True)
class _Texts:
    """Reads blocks that the model is shown as text."""

    reading: Reading
    offered: frozenset[str]
    """Names of all tools."""
    undescribed: dict[str, Tool]
    """Tools that a reference may show to the model, by name; each is described once."""

    def join(self, value: JsonValue, location: str, kinds: Sequence[str]) -> str:
        """Return a string as it is, or the joined texts of a list of blocks of these types."""
        if isinstance(value, str):
            return value
        if not isinstance(value, Sequence):
            refuse_value(location, "text or a list of text blocks", value)
        found = []
        for index, item in enumerate(value):
            block, at = read_object(item, f"{location}[{index}]"), f"{location}[{index}]"
            if block.get("type") not in kinds:
                _refuse_block(block.get("type"), at, " or ".join(kinds))
            found.append(self.block(block, at))
        return "".join(found)

    def block(self, block: Mapping[str, JsonValue], location: str) -> str:
        kind = block.get("type")
        if kind == "text":
            return _text_block(block, location)
        fields = Fields(block, {"type", "cache_control", "source" if kind == "image" else "tool_name"}, location)
        check_cache_control(fields)
        if kind == "tool_reference":
            return self._reference(fields)
        read_object(fields.value("source"), f"{location}.source")
        return self.reading.image()

    def _reference(self, fields: Fields) -> str:
        """Return the description of the tool that is referred to; the name alone the next time, so that a request may
        not multiply its tools."""
        name = fields.required_text("tool_name")
        if name not in self.offered:
            fields.refuse("tool_name", f"no tool {shown(name)} is offered")
        tool = self.undescribed.pop(name, None)
        return f"{name if tool is None else json.dumps(tool_to_openai(tool), ensure_ascii=False)}\n"


def _read_user(conversation: Conversation, shown_as: _Texts, content: JsonValue, location: str) -> None:
    """Consecutive blocks that are shown as text become one message."""
    if isinstance(content, str):
        conversation.say("user", content)
        return
    texts: list[str] = []
    blocks = read_list(content, location)
    for index, value in enumerate(blocks):
        block, at = read_object(value, f"{location}[{index}]"), f"{location}[{index}]"
        kind = block.get("type")
        if kind in _USER_BLOCKS:
            texts.append(shown_as.block(block, at))
            continue
        if kind != "tool_result":
            _refuse_block(kind, at, "text, image or tool_result")
        if texts:
            conversation.say("user", "".join(texts))
            texts.clear()
        _read_result(conversation, shown_as, block, at)
    if texts or not blocks:
        conversation.say("user", "".join(texts))


def _read_result(conversation: Conversation, shown_as: _Texts, block: Mapping[str, JsonValue], location: str) -> None:
    fields = Fields(block, RESULT_FIELDS, location)
    check_cache_control(fields)
    _check_toolset(fields)
    content = ""
    if fields.has("content"):
        content = shown_as.join(fields.value("content"), f"{location}.content", _RESULT_BLOCKS)
    if fields.boolean("is_error") and not content.lower().startswith("error"):
        content = f"Error: {content}" if content else "Error"
    conversation.answer_call(fields.required_text("tool_use_id"), content, location)


def _read_assistant(conversation: Conversation, content: JsonValue, location: str) -> None:
    conversation.begin_turn()
    if isinstance(content, str):
        conversation.write(content)
        return
    for index, value in enumerate(read_list(content, location)):
        block, at = read_object(value, f"{location}[{index}]"), f"{location}[{index}]"
        kind = block.get("type")
        if kind == "text":
            conversation.write(_text_block(block, at))
        elif kind == "thinking":
            conversation.think(_thinking(block, at))
        elif kind == "tool_use":
            conversation.call(_call(block, at))
        elif kind == "redacted_thinking":
            raise BadRequestError(f"{at}: redacted thinking cannot be read by this model; leave it out", at)
        else:
            _refuse_block(kind, at, "text, thinking or tool_use")


def _thinking(block: Mapping[str, JsonValue], location: str) -> str:
    fields = Fields(block, THINKING_FIELDS, location)
    thinking, signature = read_text(fields.value("thinking"), f"{location}.thinking"), fields.text("signature") or ""
    decoded = "" if thinking or not signature else decode_thinking(signature)
    if decoded is None:
        fields.refuse("thinking", "is empty, and the signature is none that this model can read; leave the block out")
    return thinking or decoded


def _call(block: Mapping[str, JsonValue], location: str) -> ToolCall:
    fields = Fields(block, USE_FIELDS, location)
    check_cache_control(fields)
    _check_toolset(fields)
    caller = fields.object("caller", {"type", "tool_id"})
    if caller is not None and caller.value("type") != "direct":
        caller.refuse("type", "only the model calls tools here; leave it out or say 'direct'")
    arguments = read_object(fields.value("input"), f"{location}.input")
    return ToolCall(fields.required_text("name"), arguments, fields.required_text("id"))


def _check_toolset(fields: Fields) -> None:
    if fields.has("toolset_name"):
        fields.refuse("toolset_name", "there are no toolsets here; leave it out")


def _text_block(block: Mapping[str, JsonValue], location: str) -> str:
    fields = Fields(block, TEXT_FIELDS, location)
    check_cache_control(fields)
    if fields.items("citations"):
        fields.refuse("citations", "the model is shown no citations; leave them out")
    return read_text(fields.value("text"), f"{location}.text")


def _refuse_block(kind: JsonValue, location: str, expected: str) -> NoReturn:
    path = f"{location}.type"
    raise BadRequestError(f"{path}: expected {expected}, received {shown(kind)}; the model reads only text", path)


READ = frozenset({"max_tokens", "messages", "model", "stop_sequences", "stream", "system", "temperature", "thinking"})
READ |= {"tool_choice", "tools", "top_k", "top_p"}
ALLOWED = frozenset({"cache_control", "context_management", "metadata", "output_config", "service_tier", "speed"})
REFUSED: Mapping[str, str] = {
    "container": "there are no containers here; offer a custom tool instead",
    "diagnostics": "no diagnostics of the prompt cache are stored; leave it out",
    "inference_geo": "where the model runs cannot be chosen; leave it out",
    "mcp_servers": "the gateway calls no servers; offer their tools as custom tools",
    "user_profile_id": "is a header, not a field of the body",
    "workspace_id": "is a header, not a field of the body",
}
FIELDS = READ | ALLOWED | REFUSED.keys()
NOT_COUNTED = frozenset({"max_tokens", "stop_sequences", "stream", "temperature", "top_k", "top_p"})
NOT_COUNTED |= {"container", "diagnostics", "inference_geo", "metadata", "service_tier"}
COUNT_FIELDS = FIELDS - NOT_COUNTED

DISPLAY = "display"
"""Key of `CompletionRequest.echo`: whether the response shows the thinking, `summarized` or `omitted`."""
MIN_BUDGET = 1024
MAX_STOPS = 256
"""Limits the cost of searching the sampled text for every stop sequence."""
TOOL_FIELDS = frozenset({"name", "description", "input_schema", "type", "cache_control", "allowed_callers", "strict"})
TOOL_FIELDS |= {"defer_loading", "eager_input_streaming", "input_examples"}
VENDOR_TOOL = re.compile(r"(web_search|web_fetch|code_execution|tool_search_tool_(regex|bm25)|advisor)(_[0-9]{8})?")
"""Types of tools that the vendor's servers run."""
EFFORTS = ("low", "medium", "high", "xhigh", "max")
DEFAULT_EFFORT = "high"


def read_request(body: Mapping[str, JsonValue], options: ReadOptions = READ_DEFAULTS) -> CompletionRequest:
    """Read a POST /v1/messages request."""
    fields, reading = Fields(body, FIELDS), Reading(options)
    max_tokens = fields.integer("max_tokens", 1, MAX_INT32)
    if max_tokens is None:
        refuse_value("max_tokens", f"an integer from 1 to {MAX_INT32}", None)
    tools = _read_tools(fields, reading)
    conversation = read_conversation(fields, tools, reading)
    if conversation.ends_with_turn():
        fields.refuse("messages", "the last is the assistant's; response prefill is not supported")
    _check_allowed(fields, reading)
    display, tool_choice = _display(fields, reading), _tool_choice(fields, tools, reading)
    return CompletionRequest(
        messages=conversation.messages(),
        tools=tools.shown,
        deferred_tools=tools.deferred,
        max_tokens=max_tokens,
        sampling=_sampling(fields),
        requested_sampling=frozenset(name for name in ("temperature", "top_p", "top_k") if fields.has(name)),
        stop_texts=_stop_texts(fields),
        is_streamed=bool(fields.boolean("stream")),
        tool_choice=tool_choice,
        model=fields.required_text("model"),
        echo={DISPLAY: display},
        notices=reading.notices,
    )


def read_count(body: Mapping[str, JsonValue], options: ReadOptions = READ_DEFAULTS) -> CompletionRequest:
    """Read a POST /v1/messages/count_tokens request: the prompt without sampling parameters."""
    fields, reading = Fields(body, COUNT_FIELDS), Reading(options)
    tools = _read_tools(fields, reading)
    conversation = read_conversation(fields, tools, reading)
    _check_allowed(fields, reading)
    _display(fields, reading)
    tool_choice = _tool_choice(fields, tools, reading)
    return CompletionRequest(
        messages=conversation.messages(),
        tools=tools.shown,
        deferred_tools=tools.deferred,
        tool_choice=tool_choice,
        model=fields.required_text("model"),
        notices=reading.notices,
    )


# -- settings ---------------------------------------------------------------------------------------------------------


def _check_allowed(fields: Fields, reading: Reading) -> None:
    for name, reason in REFUSED.items():
        if fields.has(name):
            fields.refuse(name, reason)
    check_cache_control(fields)
    metadata = fields.object("metadata", {"user_id"})
    if metadata is not None:
        metadata.text("user_id")
    fields.choice("service_tier", ("auto", "standard_only"))
    if fields.choice("speed", ("standard", "fast")) == "fast":
        fields.refuse("speed", "'fast' cannot be had: there is one speed; leave it out")
    output = fields.object("output_config", {"effort", "format"})
    if output is not None:
        format = output.object("format", {"type", "schema"})
        if format is not None:
            if format.choice("type", ("json_schema",)) is None:
                refuse_value("output_config.format.type", "'json_schema'", None)
            schema = read_object(format.value("schema"), "output_config.format.schema")
            reading.format_instruction = format_instruction(schema)
            reading.note(Notice.OUTPUT_FORMAT)
        if output.choice("effort", EFFORTS) not in (None, DEFAULT_EFFORT):
            reading.note(Notice.OUTPUT_EFFORT)
    _check_context_management(fields)


def _check_context_management(fields: Fields) -> None:
    """Accept only edits that keep everything: the gateway never edits the context."""
    management = fields.object("context_management", {"edits"})
    for index, value in enumerate(management.items("edits") if management is not None else ()):
        edit = read_object(value, f"context_management.edits[{index}]")
        if edit.get("type") != "clear_thinking_20251015" or edit.get("keep") != "all":
            fields.refuse("context_management", "context is never edited here; leave it out")


def _sampling(fields: Fields) -> Sampling:
    temperature, top_p = fields.number("temperature", 0, 1), fields.number("top_p", 0, 1)
    try:
        return Sampling(
            temperature=1.0 if temperature is None else temperature,
            top_p=1.0 if top_p is None else top_p,
            top_k=fields.integer("top_k", 0, MAX_INT32) or 0,
        )
    except RecordError:
        refuse_value("top_p", "a number above 0, at most 1", fields.value("top_p"))


def _stop_texts(fields: Fields) -> tuple[str, ...]:
    texts, values = [], fields.items("stop_sequences")
    if len(values) > MAX_STOPS:
        fields.refuse("stop_sequences", f"expected at most {MAX_STOPS} texts, received {len(values)}")
    for index, value in enumerate(values):
        if not isinstance(value, str) or not value:
            refuse_value(f"stop_sequences[{index}]", "text", value)
        texts.append(value)
    return tuple(texts)


def _display(fields: Fields, reading: Reading) -> str:
    thinking = fields.object("thinking", {"type", "budget_tokens", "display"})
    if thinking is None:
        return "summarized"
    kind = thinking.choice("type", ("enabled", "adaptive", "disabled", "between_tools"))
    if kind is None:
        refuse_value("thinking.type", "'enabled' or 'adaptive'", None)
    if kind in ("disabled", "between_tools"):
        reading.note(Notice.THINKING)
    budget = thinking.integer("budget_tokens", MIN_BUDGET, MAX_INT32)
    if (budget is None) == (kind == "enabled"):
        refuse_value("thinking.budget_tokens", "an integer with 'enabled' and none with 'adaptive'", budget)
    return thinking.choice("display", ("summarized", "omitted")) or "summarized"


def _tool_choice(fields: Fields, tools: "_Tools", reading: Reading) -> Literal["auto", "none"]:
    choice = fields.object("tool_choice", {"type", "name", "disable_parallel_tool_use"})
    if choice is None:
        return "auto"
    kind = choice.choice("type", ("auto", "none", "any", "tool"))
    if kind is None:
        refuse_value("tool_choice.type", "'auto' or 'none'", None)
    name = choice.required_text("name") if kind == "tool" else choice.text("name")
    if name is not None and kind != "tool":
        choice.refuse("name", "only the choice 'tool' has a name; leave it out")
    if name is not None and not any(name == tool.name for tool in (*tools.shown, *tools.deferred)):
        choice.refuse("name", f"no tool {shown(name)} is offered")
    if kind in ("any", "tool"):
        reading.note(Notice.TOOL_CHOICE)
    if choice.boolean("disable_parallel_tool_use"):
        reading.note(Notice.DISABLE_PARALLEL_TOOL_USE)
    return "none" if kind == "none" else "auto"


@dataclass(frozen=True, slots=True)
class _Tools:
    shown: tuple[Tool, ...]
    """Tools that the prompt describes."""
    deferred: tuple[Tool, ...]
    """Tools with `defer_loading`."""


def _read_tools(fields: Fields, reading: Reading) -> _Tools:
    deferred: set[str] = set()
    tools = read_tools(fields, lambda value, location: _tool(value, location, deferred, reading))
    return _Tools(
        tuple(tool for tool in tools if tool.name not in deferred),
        tuple(tool for tool in tools if tool.name in deferred),
    )


def _tool(value: JsonValue, location: str, deferred: set[str], reading: Reading) -> Sequence[Tool]:
    """Return one tool, or none if the vendor runs it; adds the name of a deferred one."""
    kind = read_object(value, location).get("type")
    if isinstance(kind, str) and VENDOR_TOOL.fullmatch(kind):
        reading.note(Notice.VENDOR_TOOL)
        return []
    if kind not in (None, "custom"):
        raise BadRequestError(
            f"{location}.type: expected 'custom', received {shown(kind)}; describe the tool by a schema", location
        )
    fields = Fields(value, TOOL_FIELDS, location)
    check_cache_control(fields)
    fields.boolean("eager_input_streaming")
    if fields.boolean("strict"):
        reading.note(Notice.STRICT_TOOL)
    if fields.boolean("defer_loading"):
        deferred.add(fields.required_text("name"))
    if fields.items("input_examples"):
        fields.refuse("input_examples", "the model is shown no examples of input; put them into the description")
    if fields.has("allowed_callers") and list(fields.items("allowed_callers")) != ["direct"]:
        fields.refuse("allowed_callers", "only the model calls tools here; leave it out or say ['direct']")
    schema = read_object(fields.value("input_schema"), f"{location}.input_schema")
    return [make_tool(fields, schema, location)]


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
    """See `types.Stream`."""

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

    def end_sample(self, sample: int, output: CompletionOutput) -> bytes:
        self._stop = stop_body(output)
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
    return encode_thinking(thinking) if is_omitted else sign(id)


def tool_use_body(call: ToolCall, input: JsonValue) -> dict[str, JsonValue]:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": input}


def stop_body(output: CompletionOutput) -> dict[str, JsonValue]:
    return {"stop_reason": _STOP_REASONS[output.ending], "stop_sequence": output.stop_text}


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


class AnthropicMessages:
    path = "/v1/messages"
    count_path = "/v1/messages/count_tokens"

    def read(self, body: Mapping[str, JsonValue], options: ReadOptions = READ_DEFAULTS) -> CompletionRequest:
        return read_request(body, options)

    def read_count(self, body: Mapping[str, JsonValue], options: ReadOptions = READ_DEFAULTS) -> CompletionRequest:
        """Read a request to count tokens. Raises `BadRequestError`."""
        return read_count(body, options)

    def count(self, num_prompt: int) -> dict[str, JsonValue]:
        """Return the response body; `num_prompt` includes the generation prompt."""
        return {"input_tokens": num_prompt}

    def response(
        self, request: CompletionRequest, id: str, created_s: int, outputs: Sequence[CompletionOutput], usage: Usage
    ) -> dict[str, JsonValue]:
        (output,) = outputs
        body: dict[str, JsonValue] = {"id": id, "type": "message", "role": "assistant", "model": request.model}
        is_omitted = request.echo.get(DISPLAY) == "omitted"
        return (
            body
            | {"content": _blocks(output.completion, id, is_omitted)}
            | stop_body(output)
            | {"usage": usage_body(usage)}
        )

    def stream(self, request: CompletionRequest, id: str, created_s: int) -> MessagesStream:
        return MessagesStream(request.model, id, is_omitted=request.echo.get(DISPLAY) == "omitted")

    def error(
        self, status: int, message: str, field: str | None = None, code: str | None = None
    ) -> dict[str, JsonValue]:
        """The vendor's error body has no field and code; messages start with the field instead."""
        return error_body(status, message)

    def too_long(self, num_prompt: int, context: int) -> BadRequestError:
        return BadRequestError(f"prompt is too long: {num_prompt} tokens > {context} maximum", "messages")


MESSAGES = AnthropicMessages()


def _blocks(completion: Completion, id: str, is_omitted: bool) -> list[JsonValue]:
    blocks: list[JsonValue] = []
    if completion.thinking:
        shown = "" if is_omitted else completion.thinking
        sign = signature(completion.thinking, id, is_omitted)
        blocks.append({"type": "thinking", "thinking": shown, "signature": sign})
    if completion.content:
        blocks.append({"type": "text", "text": completion.content})
    blocks.extend(tool_use_body(call, call.arguments) for call in completion.tool_calls)
    return blocks


def models_body(names: Sequence[str], created_s: int) -> dict[str, JsonValue]:
    data: list[JsonValue] = [model_body(name, created_s) for name in names]
    first, last = (names[0], names[-1]) if names else (None, None)
    return {"data": data, "has_more": False, "first_id": first, "last_id": last}


def model_body(name: str, created_s: int) -> dict[str, JsonValue]:
    created_at = datetime.fromtimestamp(created_s, UTC).isoformat().replace("+00:00", "Z")
    return {"type": "model", "id": name, "display_name": name, "created_at": created_at, "lifecycle": "active"}
