"""OpenAI Responses, the request: JSON in, `CompletionRequest` out, or `BadRequestError` naming the field.

Fields in `READ` are honoured or repeated in the response. Fields in `ALLOWED` cannot change the response, or are
accepted only with a no-op value. Fields in `REFUSED` cannot be honoured. What is not applied is noted: forced tool
calls, the limit to one call, reasoning effort, verbosity; and the response format, which is written into the prompt.

Responses are not stored for clients: `store` may be absent or false, and `previous_response_id` is refused, so clients
send the complete conversation each time, as the agents SDK does by default. A function's `strict` is allowed, because
it is the vendor's default and SDKs send it on their own; the response's `tools` say false, since nothing is enforced.

Besides functions a request may offer

    namespace       functions that share a namespace; the model is shown them as NAMESPACE.NAME
    custom          a tool that takes a text; the model is shown a function with one argument, `input`
    web_search, …   tools that the vendor runs; the model is not shown them, and a notice says so

and the response's calls have the form that the tool was offered in.

Thinking is returned as the text of reasoning items, or as their summary if the client requests one (`auto`,
`detailed`); the summary is the full thinking. `reasoning.encrypted_content` is an opaque string that contains the
thinking (`opaque_thinking.py`), for clients that store nothing else.

Each item of `input` adds its part to a conversation:

    message                 from user, system (or developer) or assistant: text, or text parts
    reasoning               the assistant's thinking: its content, else its `encrypted_content`, else the summary
    function_call           a tool call of the assistant; custom_tool_call is one with a text
    function_call_output    its result; custom_tool_call_output likewise
    item_reference          an item of an earlier response of the same episode

The id of an item that the gateway created names its response, so the parts of one response become one turn again even
with results between its calls. Clients may omit ids. Images become a placeholder text. Items of the vendor's
server-side tools, files and refusals are refused: no chat format shows them to the model. Annotations and logprobs are
sent back with the text and cannot change the response.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from m2forge.gateway.dialects.conversation import Conversation
from m2forge.gateway.dialects.opaque_thinking import decode_thinking
from m2forge.gateway.dialects.openai.chat import (
    DEFAULT_VERBOSITY,
    EFFORTS,
    SAMPLING_FIELDS,
    SCHEMA_FIELDS,
    VERBOSITIES,
    arguments_text,
    read_format,
    read_sampling,
    read_tool_choice,
    requested_sampling,
)
from m2forge.gateway.dialects.types import (
    READ_DEFAULTS,
    BadRequestError,
    CompletionRequest,
    Fields,
    Notice,
    Reading,
    ReadOptions,
    UnknownItemError,
    make_tool,
    read_list,
    read_object,
    read_text,
    read_tools,
    refuse_value,
    shown,
)
from m2forge.records import MAX_INT32, JsonValue
from m2forge.text.message import Message, Tool, ToolCall, parse_json
from m2forge.text.parser import Completion

MESSAGE_FIELDS = frozenset({"type", "role", "content", "id", "status", "phase"})
REASONING_FIELDS = frozenset({"type", "id", "summary", "content", "encrypted_content", "status"})
CALL_FIELDS = frozenset({"type", "id", "call_id", "name", "arguments", "status", "caller", "namespace", "async"})
CALL_FIELDS |= {"async_"}
"""Some clients send `async` back under its Python name, `async_`."""
RESULT_FIELDS = frozenset({"type", "id", "call_id", "output", "status", "caller", "namespace", "name"})
CUSTOM_CALL_FIELDS = (CALL_FIELDS - {"arguments"}) | {"input"}
PART_FIELDS = frozenset({"type", "text", "annotations", "logprobs", "prompt_cache_breakpoint"})
IMAGE_FIELDS = frozenset({"type", "image_url", "file_id", "detail", "prompt_cache_breakpoint"})
CUSTOM_ARGUMENT = "input"
"""Name of the one argument by which the model calls a custom tool."""
CODEX_ITEMS = frozenset({"additional_tools", "tool_search_call", "tool_search_output"})
"""Items that change the tools within a conversation."""
_STATUSES = ("in_progress", "completed", "incomplete")
_OUR_ID = re.compile(r"(rs|msg|fc|ctc)_(.+)_([0-9]{1,9})")


def item_id(kind: str, response_id: str, index: int) -> str:
    """Return the id of an item of a response: `kind` is rs, msg, fc or ctc, `index` counts calls for fc and ctc and all
    items for the others."""
    return f"{kind}_{response_id}_{index}"


def find_items(ids: Sequence[str], find: Callable[[str], Completion | None]) -> dict[str, JsonValue]:
    """Return the recorded items with these ids, as a client would send them; `find` returns the completion of a
    response by its id."""
    items: dict[str, JsonValue] = {}
    written: set[str] = set()
    for id in ids:
        match = _OUR_ID.fullmatch(id)
        completion = find(match.group(2)) if match else None
        if match is None or completion is None:
            continue
        kind, response_id, index = match.group(1), match.group(2), int(match.group(3))
        if kind == "rs":
            content = [{"type": "reasoning_text", "text": completion.thinking}]
            items[id] = {"type": "reasoning", "id": id, "summary": [], "content": content}
        elif kind == "msg":
            # A stream sends text after a call as another message; the first one referred to holds all of it.
            text = "" if response_id in written else completion.content
            written.add(response_id)
            items[id] = {"type": "message", "id": id, "role": "assistant", "content": text}
        elif index < len(completion.tool_calls):
            call = completion.tool_calls[index]
            made: dict[str, JsonValue] = {"type": "function_call", "id": id, "call_id": call.id, "name": call.name}
            items[id] = made | {"arguments": arguments_text(call)}
    return items


def read_item(conversation: Conversation, value: JsonValue, location: str) -> None:
    item = read_object(value, location)
    kind = _kind(item)
    read = _READERS.get(kind) if isinstance(kind, str) else None
    if read is not None:
        read(conversation, item, location)
        return
    path = f"{location}.type"
    if isinstance(kind, str) and kind in CODEX_ITEMS:
        raise BadRequestError(
            f"{path}: {shown(kind)} is not supported, which Codex sends for models whose names it knows; give it a "
            "model name that it does not know, such as 'policy'",
            path,
        )
    raise BadRequestError(f"{path}: expected one of {', '.join(_READERS)}, received {shown(kind)}", path)


def _kind(item: Mapping[str, JsonValue]) -> JsonValue:
    """Return an item's type, which messages and references may omit."""
    return item.get("type") or ("message" if "role" in item else "item_reference")


def _read_reference(conversation: Conversation, item: Mapping[str, JsonValue], location: str) -> None:
    """`_check_references` has found the item."""
    id = Fields(item, {"type", "id"}, location).required_text("id")
    read_item(conversation, conversation.reading.options.items[id], location)


def _check_references(items: Sequence[JsonValue], options: ReadOptions) -> None:
    """Raises UnknownItemError for references to items that `options` does not hold. An item is referred to once: a
    request may not multiply what is recorded."""
    ids: dict[str, int] = {}
    for index, item in enumerate(items):
        if isinstance(item, dict) and _kind(item) == "item_reference" and isinstance(id := item.get("id"), str) and id:
            if id in ids:
                at = f"input[{index}]"
                raise BadRequestError(f"{at}: refers to {shown(id)} as input[{ids[id]}] does; send it once", at)
            ids[id] = index
    unknown = tuple(id for id in ids if id not in options.items)
    if unknown:
        at = f"input[{ids[unknown[0]]}]"
        raise UnknownItemError(
            f"{at}: no response of this episode has the item {shown(unknown[0])}; send the item itself", at, unknown
        )


def _read_message(conversation: Conversation, item: Mapping[str, JsonValue], location: str) -> None:
    fields = Fields(item, MESSAGE_FIELDS, location)
    role = fields.choice("role", ("user", "assistant", "system", "developer"))
    fields.choice("status", _STATUSES)
    if fields.has("phase"):
        fields.refuse("phase", "the model is shown no phases; leave it out")
    content = _content(fields.value("content"), f"{location}.content", conversation.reading)
    source = _source(fields)
    if role == "assistant":
        conversation.write(content, source, begins=True)
    elif role == "user":
        conversation.say("user", content)
    elif role is not None:
        conversation.say("system", content)
    else:
        refuse_value(f"{location}.role", "'user', 'assistant', 'system' or 'developer'", None)


def _read_reasoning(conversation: Conversation, item: Mapping[str, JsonValue], location: str) -> None:
    fields = Fields(item, REASONING_FIELDS, location)
    fields.choice("status", _STATUSES)
    content = _texts(fields, "content", "reasoning_text")
    summary = _texts(fields, "summary", "summary_text")
    word = fields.text("encrypted_content")
    decoded = decode_thinking(word) if word else ""
    if decoded is None and not content and not summary:
        fields.refuse("encrypted_content", "is none that this model can read; leave the item out")
    conversation.think(content or decoded or summary, _source(fields))


def _read_call(conversation: Conversation, item: Mapping[str, JsonValue], location: str) -> None:
    fields = Fields(item, CALL_FIELDS, location)
    _check_direct(fields)
    text = read_text(fields.value("arguments"), f"{location}.arguments")
    try:
        arguments = parse_json(text) if text.strip() else {}
    except ValueError as error:
        fields.refuse("arguments", f"not JSON ({error})")
    if not isinstance(arguments, Mapping):
        refuse_value(f"{location}.arguments", "the JSON text of an object", text)
    call = ToolCall(_tool_name(fields), arguments, fields.required_text("call_id"))
    conversation.call(call, _source(fields))


def _read_custom_call(conversation: Conversation, item: Mapping[str, JsonValue], location: str) -> None:
    fields = Fields(item, CUSTOM_CALL_FIELDS, location)
    _check_direct(fields)
    arguments = {CUSTOM_ARGUMENT: read_text(fields.value("input"), f"{location}.input")}
    conversation.call(ToolCall(_tool_name(fields), arguments, fields.required_text("call_id")), _source(fields))


def _tool_name(fields: Fields) -> str:
    """Return the name that the model is shown: with the namespace, if the tool has one."""
    namespace, name = fields.text("namespace"), fields.required_text("name")
    return f"{namespace}.{name}" if namespace else name


def _read_result(conversation: Conversation, item: Mapping[str, JsonValue], location: str) -> None:
    fields = Fields(item, RESULT_FIELDS, location)
    fields.text("id")
    fields.text("name")
    _check_direct(fields)
    fields.text("namespace")
    content = _content(fields.value("output"), f"{location}.output", conversation.reading)
    conversation.answer_call(fields.required_text("call_id"), content, location)


_READERS: Mapping[str, Callable[[Conversation, Mapping[str, JsonValue], str], None]] = {
    "message": _read_message,
    "reasoning": _read_reasoning,
    "function_call": _read_call,
    "function_call_output": _read_result,
    "custom_tool_call": _read_custom_call,
    "custom_tool_call_output": _read_result,
    "item_reference": _read_reference,
}


def _source(fields: Fields) -> str:
    """Return the id of the response that an item belongs to; empty if the item's id does not name it."""
    found = _OUR_ID.fullmatch(fields.text("id") or "")
    return found.group(2) if found else ""


def _check_direct(fields: Fields) -> None:
    """Check a call or a result: the model called the tool, and waited for it."""
    fields.choice("status", _STATUSES)
    for name in ("async", "async_"):
        if name in fields.data and fields.boolean(name):
            fields.refuse(name, "tools are not called in the background; leave it out")
    caller = fields.object("caller", {"type", "caller_id"})
    if caller is not None and caller.value("type") != "direct":
        caller.refuse("type", "only the model calls tools here; leave it out or say 'direct'")


def _content(value: JsonValue, location: str, reading: Reading) -> str:
    """Return a string as it is, or the joined texts of a list of parts."""
    if isinstance(value, str):
        return value
    if not isinstance(value, Sequence):
        refuse_value(location, "text or a list of parts", value)
    texts = []
    for index, part in enumerate(value):
        at = f"{location}[{index}]"
        kind = read_object(part, at).get("type")
        if kind == "input_image":
            Fields(part, IMAGE_FIELDS, at)
            texts.append(reading.image())
            continue
        if kind not in ("input_text", "output_text"):
            path = f"{at}.type"
            raise BadRequestError(
                f"{path}: expected input_text or output_text, received {shown(kind)}; the model reads only text", path
            )
        texts.append(read_text(Fields(part, PART_FIELDS, at).value("text"), f"{at}.text"))
    return "".join(texts)


def _texts(fields: Fields, name: str, kind: str) -> str:
    texts = []
    for index, value in enumerate(fields.items(name)):
        part = Fields(value, {"type", "text"}, f"{fields.path(name)}[{index}]")
        if part.value("type") != kind:
            refuse_value(part.path("type"), repr(kind), part.value("type"))
        texts.append(read_text(part.value("text"), part.path("text")))
    return "".join(texts)


READ = SAMPLING_FIELDS | {
    "include",
    "input",
    "instructions",
    "max_output_tokens",
    "max_tool_calls",
    "metadata",
    "model",
}
READ |= {"prompt_cache_key", "prompt_cache_retention", "reasoning", "safety_identifier", "service_tier", "stream"}
READ |= {"tool_choice", "tools", "top_logprobs", "user"}
ALLOWED = frozenset({"background", "client_metadata", "context_management", "parallel_tool_calls"})
ALLOWED |= {"prompt_cache_options", "store", "stream_options", "text", "truncation"}
REFUSED: Mapping[str, str] = {
    "access_programs": "there are none here; leave it out",
    "conversation": "conversations are not stored; send the complete conversation as input",
    "image": "images are not supported; send text",
    "moderation": "there is no moderation here; leave it out",
    "previous_response_id": "responses are not stored; send the complete conversation as input",
    "prompt": "prompts are not stored; send instructions and input",
}
FIELDS = READ | ALLOWED | REFUSED.keys()

FORMS = "forms"
"""Key of `CompletionRequest.echo`: tools that are not plain functions, by the name that the model is shown, with their
namespace, their name in it, and whether they take a text."""
HIDDEN = frozenset({"is_summarised", "is_sealed", FORMS})
"""Keys of `CompletionRequest.echo` that shape items; all others are fields of the response."""
TOOL_FIELDS = frozenset({"type", "name", "description", "parameters", "strict", "allowed_callers", "async"})
TOOL_FIELDS |= {"defer_loading", "output_schema"}
CUSTOM_FIELDS = frozenset({"type", "name", "description", "format", "defer_loading", "allowed_callers", "async"})
VENDOR_TOOLS = frozenset({"code_interpreter", "file_search", "image_generation", "mcp", "tool_search"})
VENDOR_TOOLS |= {"web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11"}
"""Types of tools that the vendor's servers run."""
_SEALED, _LOGPROBS = "reasoning.encrypted_content", "message.output_text.logprobs"


def read_request(body: Mapping[str, JsonValue], options: ReadOptions = READ_DEFAULTS) -> CompletionRequest:
    fields, reading = Fields(body, FIELDS), Reading(options)
    for name, reason in REFUSED.items():
        if fields.has(name):
            fields.refuse(name, reason)
    forms: dict[str, JsonValue] = {}
    tools = read_tools(fields, lambda value, location: _tools(value, location, forms, reading))
    _check_allowed(fields, reading, has_tools=bool(tools))
    include = _include(fields)
    if fields.integer("top_logprobs", 0, 20):
        fields.refuse("top_logprobs", "only the sampled token's log-probability is known; leave it out or send 0")
    tool_choice, summary = read_tool_choice(fields, tools, reading), _summary(fields, reading)
    request = CompletionRequest(
        messages=_messages(fields, reading),
        tools=tools,
        max_tokens=fields.integer("max_output_tokens", 1, MAX_INT32),
        sampling=read_sampling(fields),
        requested_sampling=requested_sampling(fields),
        is_streamed=bool(fields.boolean("stream")),
        tool_choice=tool_choice,
        num_top_logprobs=0 if _LOGPROBS in include else None,
        model=fields.required_text("model"),
    )
    shape: dict[str, JsonValue] = {"is_summarised": summary is not None, "is_sealed": _SEALED in include, FORMS: forms}
    return replace(request, echo=_repeated(fields, request, summary, forms) | shape, notices=reading.notices)


def _repeated(
    fields: Fields, request: CompletionRequest, summary: str | None, forms: Mapping[str, JsonValue]
) -> dict[str, JsonValue]:
    """Return the request's fields that the response repeats."""
    grouped = [tool for tool in fields.items("tools") if read_object(tool, "tools").get("type") in _GROUPED]
    return {
        "background": False,
        "instructions": fields.value("instructions"),
        "max_output_tokens": request.max_tokens,
        "max_tool_calls": fields.integer("max_tool_calls", 0, MAX_INT32),
        "metadata": fields.metadata() or {},
        "model": request.model,
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "prompt_cache_key": fields.text("prompt_cache_key"),
        "prompt_cache_retention": fields.choice("prompt_cache_retention", ("in_memory", "24h")),
        "reasoning": {"effort": None, "summary": summary},
        "safety_identifier": fields.text("safety_identifier"),
        "service_tier": fields.choice("service_tier", ("auto", "default")) and "default",
        "temperature": request.sampling.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": request.tool_choice,
        "tools": [
            {
                "type": "function",
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.parameters,
                "strict": False,
            }
            for tool in request.tools
            if tool.name not in forms
        ]
        + grouped,
        "top_logprobs": 0,
        "top_p": request.sampling.top_p,
        "truncation": "disabled",
        "user": fields.text("user"),
    }


# -- settings ---------------------------------------------------------------------------------------------------------


def _check_allowed(fields: Fields, reading: Reading, *, has_tools: bool) -> None:
    if fields.has("client_metadata"):
        read_object(fields.value("client_metadata"), "client_metadata")
    if fields.boolean("background"):
        fields.refuse("background", "responses are made while the client waits; leave it out or send false")
    if fields.boolean("store"):
        fields.refuse("store", "responses are not stored for retrieval; leave it out or send false")
    if fields.items("context_management"):
        fields.refuse("context_management", "context is never edited here; leave it out")
    if fields.boolean("parallel_tool_calls") is False and has_tools:
        reading.note(Notice.PARALLEL_TOOL_CALLS)
    if fields.choice("truncation", ("auto", "disabled")) == "auto":
        fields.refuse("truncation", "context is never cut here; leave it out or say 'disabled'")
    cache = fields.object("prompt_cache_options", {"comparison_response_id", "mode", "prewarm", "ttl"})
    if cache is not None:
        cache.choice("mode", ("implicit", "explicit"))
        cache.choice("ttl", ("30m", "12h"))
        if cache.has("comparison_response_id"):
            cache.refuse("comparison_response_id", "no diagnostics of the prompt cache are stored; leave it out")
        if cache.boolean("prewarm"):
            cache.refuse("prewarm", "a prompt cannot be sent without sampling a completion; leave it out")
    options = fields.object("stream_options", {"include_obfuscation"})
    if options is not None and options.boolean("include_obfuscation"):
        options.refuse("include_obfuscation", "events are not padded; leave it out or send false")
    _read_text(fields, reading)


def _read_text(fields: Fields, reading: Reading) -> None:
    text = fields.object("text", {"format", "verbosity"})
    if text is None:
        return
    if text.choice("verbosity", VERBOSITIES) not in (None, DEFAULT_VERBOSITY):
        reading.note(Notice.TEXT_VERBOSITY)
    format = text.object("format", SCHEMA_FIELDS | {"type"})
    if format is None:
        return
    kind = format.choice("type", ("text", "json_object", "json_schema"))
    if kind is None:
        refuse_value("text.format.type", "'text', 'json_object' or 'json_schema'", None)
    if kind != "text":
        reading.format_instruction = read_format(format if kind == "json_schema" else None)
        reading.note(Notice.TEXT_FORMAT)


def _include(fields: Fields) -> frozenset[str]:
    """Only these two are accepted: the others concern tools that the gateway does not have."""
    known = set()
    for index, value in enumerate(fields.items("include")):
        if not isinstance(value, str) or value not in (_SEALED, _LOGPROBS):
            refuse_value(f"include[{index}]", f"{_SEALED!r} or {_LOGPROBS!r}", value)
        known.add(value)
    return frozenset(known)


def _summary(fields: Fields, reading: Reading) -> str | None:
    reasoning = fields.object("reasoning", {"context", "effort", "generate_summary", "mode", "summary"})
    if reasoning is None:
        return None
    if reasoning.choice("effort", EFFORTS) is not None:
        reading.note(Notice.RESPONSES_EFFORT)
    if reasoning.choice("mode", ("standard", "pro")) == "pro":
        reasoning.refuse("mode", "'pro' cannot be had; leave it out or say 'standard'")
    if reasoning.choice("context", ("auto", "current_turn", "all_turns")) == "current_turn":
        reasoning.refuse("context", "thinking that is sent is shown to the model; leave out what it should not see")
    summaries = [reasoning.choice(name, ("auto", "concise", "detailed")) for name in ("summary", "generate_summary")]
    if "concise" in summaries:
        reasoning.refuse("summary", "thinking is not shortened; say 'auto' or 'detailed', or leave it out")
    return summaries[0] or summaries[1]


_GROUPED = ("namespace", "custom")
"""Types of tools that are no plain functions; the response repeats them as they were sent."""


def _tools(value: JsonValue, location: str, forms: dict[str, JsonValue], reading: Reading) -> Sequence[Tool]:
    """Return the functions that the model is shown for one entry of the tools, and add their forms."""
    kind = read_object(value, location).get("type")
    if kind == "function":
        return [_function(value, location)]
    if kind == "custom":
        tool = _custom(value, location)
        forms[tool.name] = [None, tool.name, True]
        return [tool]
    if kind == "namespace":
        return _namespace(value, location, forms)
    if isinstance(kind, str) and kind in VENDOR_TOOLS:
        reading.note(Notice.VENDOR_TOOL)
        return []
    path = f"{location}.type"
    raise BadRequestError(f"{path}: expected function, custom or namespace, received {shown(kind)}", path)


def _namespace(value: JsonValue, location: str, forms: dict[str, JsonValue]) -> list[Tool]:
    """Return the functions of a namespace; its description precedes that of the first one."""
    fields = Fields(value, {"type", "name", "description", "tools"}, location)
    namespace, about = fields.required_text("name"), fields.text("description") or ""
    shown_tools = []
    for index, inner in enumerate(fields.items("tools")):
        at = f"{location}.tools[{index}]"
        is_custom = read_object(inner, at).get("type") == "custom"
        tool = _custom(inner, at) if is_custom else _function(inner, at)
        name = f"{namespace}.{tool.name}"
        forms[name] = [namespace, tool.name, is_custom]
        description = tool.description if index or not about else f"{about}\n\n{tool.description}"
        shown_tools.append(replace(tool, name=name, description=description))
    return shown_tools


def _custom(value: JsonValue, location: str) -> Tool:
    """Return a function that takes the tool's text; a grammar of the text is added to the description."""
    fields = Fields(value, CUSTOM_FIELDS, location)
    _check_offer(fields)
    schema: dict[str, JsonValue] = {"type": "string"}
    format = fields.object("format", {"type", "syntax", "definition"})
    if format is not None and format.choice("type", ("text", "grammar")) == "grammar":
        schema["description"] = f"Follows this {format.text('syntax') or ''} grammar:\n{format.text('definition')}"
    parameters: dict[str, JsonValue] = {
        "type": "object",
        "properties": {CUSTOM_ARGUMENT: schema},
        "required": [CUSTOM_ARGUMENT],
    }
    return make_tool(fields, parameters, location)


def _check_offer(fields: Fields) -> None:
    if fields.boolean("async"):
        fields.refuse("async", "tools are not called in the background; leave it out or send false")
    if fields.boolean("defer_loading"):
        fields.refuse("defer_loading", "there is no search for tools; leave it out or send false")
    if fields.has("allowed_callers") and list(fields.items("allowed_callers")) != ["direct"]:
        fields.refuse("allowed_callers", "only the model calls tools here; leave it out or say ['direct']")


def _function(value: JsonValue, location: str) -> Tool:
    if read_object(value, location).get("type") != "function":
        refuse_value(f"{location}.type", "'function'", read_object(value, location).get("type"))
    fields = Fields(value, TOOL_FIELDS, location)
    fields.boolean("strict")
    _check_offer(fields)
    if fields.has("output_schema"):
        fields.refuse("output_schema", "the model is shown no schema of results; put it into the description")
    schema = read_object(fields.value("parameters"), f"{location}.parameters") if fields.has("parameters") else {}
    return make_tool(fields, schema, location)


# -- the conversation -------------------------------------------------------------------------------------------------


def _messages(fields: Fields, reading: Reading) -> tuple[Message, ...]:
    conversation = Conversation(reading)
    instructions, value = fields.text("instructions"), fields.value("input")
    if instructions is not None:
        conversation.say("system", instructions)
    if isinstance(value, str):
        conversation.say("user", value)
    else:
        items = read_list(value, "input")
        _check_references(items, reading.options)
        for index, item in enumerate(items):
            read_item(conversation, item, f"input[{index}]")
    messages = conversation.messages("input")
    if not messages:
        fields.refuse("input", "expected text or at least one item, received none")
    return messages
