"""OpenAI Responses, the request: JSON in, `Ask` out, or `AskError` naming the field.

Fields in `READ` are honoured or repeated in the response. Fields in `ALLOWED` cannot change the response, or are
accepted only with a no-op value. Fields in `REFUSED` cannot be honoured.

Responses are not stored for clients: `store` may be absent or false, and `previous_response_id` is refused, so clients
send the complete conversation each time, as the agents SDK does by default. A function's `strict` is allowed, because
it is the vendor's default and SDKs send it on their own; the response's `tools` say false, since nothing is enforced.

Thinking is returned as the text of reasoning items, or as their summary if the client requests one (`auto`,
`detailed`); the summary is the full thinking. Reasoning effort cannot be set. `reasoning.encrypted_content` is an
opaque string that contains the thinking (`opaque_thinking.py`), for clients that store nothing else.

Each item of `input` adds its part to a conversation:

    message                 from user, system (or developer) or assistant: text, or text parts
    reasoning               the assistant's thinking: its content, else its `encrypted_content`, else the summary
    function_call           a tool call of the assistant
    function_call_output    its result

The id of an item that the gateway created names its response, so the parts of one response become one turn again even
with results between its calls. Clients may omit ids. Item references are refused, because responses are not stored; so
are items of the vendor's server-side tools, images, files and refusals, which no chat format shows to the model.
Annotations and logprobs are sent back with the text and cannot change the response.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from m2forge.gateway.dialects.conversation import Conversation
from m2forge.gateway.dialects.opaque_thinking import unseal
from m2forge.gateway.dialects.openai.chat import SAMPLING_FIELDS, read_sampling, read_tool_choice
from m2forge.gateway.dialects.types import (
    Ask,
    AskError,
    Fields,
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

MESSAGE_FIELDS = frozenset({"type", "role", "content", "id", "status", "phase"})
REASONING_FIELDS = frozenset({"type", "id", "summary", "content", "encrypted_content", "status"})
CALL_FIELDS = frozenset({"type", "id", "call_id", "name", "arguments", "status", "caller", "namespace", "async"})
CALL_FIELDS |= {"async_"}
"""Some clients send `async` back under its Python name, `async_`."""
RESULT_FIELDS = frozenset({"type", "id", "call_id", "output", "status", "caller", "namespace", "name"})
PART_FIELDS = frozenset({"type", "text", "annotations", "logprobs", "prompt_cache_breakpoint"})
_STATUSES = ("in_progress", "completed", "incomplete")
_OUR_ID = re.compile(r"(?:rs|msg|fc)_(.+)_[0-9]+")


def item_id(kind: str, response_id: str, index: int) -> str:
    """Return the id of the item at `index` of a response; `kind` is rs, msg or fc."""
    return f"{kind}_{response_id}_{index}"


def read_item(conversation: Conversation, value: JsonValue, location: str) -> None:
    item = read_object(value, location)
    kind = item.get("type") or ("message" if "role" in item else "item_reference")
    read = _READERS.get(kind) if isinstance(kind, str) else None
    if read is not None:
        read(conversation, item, location)
        return
    path = f"{location}.type"
    if kind == "item_reference":
        raise AskError(
            f"{location}: responses are not stored, so items cannot be referred to; send the item itself", location
        )
    raise AskError(f"{path}: expected one of {', '.join(_READERS)}, received {shown(kind)}", path)


def _read_message(conversation: Conversation, item: Mapping[str, JsonValue], location: str) -> None:
    fields = Fields(item, MESSAGE_FIELDS, location)
    role = fields.choice("role", ("user", "assistant", "system", "developer"))
    fields.choice("status", _STATUSES)
    if fields.has("phase"):
        fields.refuse("phase", "the model is shown no phases; leave it out")
    content, source = _content(fields.value("content"), f"{location}.content"), _source(fields)
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
    sealed = unseal(word) if word else ""
    if sealed is None and not content and not summary:
        fields.refuse("encrypted_content", "is none that this model can read; leave the item out")
    conversation.think(content or sealed or summary, _source(fields))


def _read_call(conversation: Conversation, item: Mapping[str, JsonValue], location: str) -> None:
    fields = Fields(item, CALL_FIELDS, location)
    fields.choice("status", _STATUSES)
    _check_direct(fields)
    for name in ("async", "async_"):
        if fields.boolean(name):
            fields.refuse(name, "tools are not called in the background; leave it out")
    text = read_text(fields.value("arguments"), f"{location}.arguments")
    try:
        arguments = parse_json(text) if text.strip() else {}
    except ValueError as error:
        fields.refuse("arguments", f"not JSON ({error})")
    if not isinstance(arguments, Mapping):
        refuse_value(f"{location}.arguments", "the JSON text of an object", text)
    call = ToolCall(fields.required_text("name"), arguments, fields.required_text("call_id"))
    conversation.call(call, _source(fields))


def _read_result(conversation: Conversation, item: Mapping[str, JsonValue], location: str) -> None:
    fields = Fields(item, RESULT_FIELDS, location)
    fields.choice("status", _STATUSES)
    fields.text("id")
    fields.text("name")
    _check_direct(fields)
    content = _content(fields.value("output"), f"{location}.output")
    conversation.answer_call(fields.required_text("call_id"), content, location)


_READERS: Mapping[str, Callable[[Conversation, Mapping[str, JsonValue], str], None]] = {
    "message": _read_message,
    "reasoning": _read_reasoning,
    "function_call": _read_call,
    "function_call_output": _read_result,
}


def _source(fields: Fields) -> str:
    """Return the id of the response that an item belongs to; empty if the item's id does not name it."""
    found = _OUR_ID.fullmatch(fields.text("id") or "")
    return found.group(1) if found else ""


def _check_direct(fields: Fields) -> None:
    caller = fields.object("caller", {"type", "caller_id"})
    if caller is not None and caller.value("type") != "direct":
        caller.refuse("type", "only the model calls tools here; leave it out or say 'direct'")
    if fields.has("namespace"):
        fields.refuse("namespace", "tools have no namespaces here; leave it out")


def _content(value: JsonValue, location: str) -> str:
    """Return a string as it is, or the joined texts of a list of parts."""
    if isinstance(value, str):
        return value
    if not isinstance(value, Sequence):
        refuse_value(location, "text or a list of parts", value)
    texts = []
    for index, part in enumerate(value):
        at = f"{location}[{index}]"
        kind = read_object(part, at).get("type")
        if kind not in ("input_text", "output_text"):
            path = f"{at}.type"
            raise AskError(
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
ALLOWED = frozenset({"background", "context_management", "parallel_tool_calls", "prompt_cache_options", "store"})
ALLOWED |= {"stream_options", "text", "truncation"}
REFUSED: Mapping[str, str] = {
    "access_programs": "there are none here; leave it out",
    "conversation": "conversations are not stored; send the complete conversation as input",
    "image": "images are not supported; send text",
    "moderation": "there is no moderation here; leave it out",
    "previous_response_id": "responses are not stored; send the complete conversation as input",
    "prompt": "prompts are not stored; send instructions and input",
}
FIELDS = READ | ALLOWED | REFUSED.keys()

HIDDEN = frozenset({"is_summarised", "is_sealed"})
"""Keys of `Ask.echo` that shape reasoning items; all others are fields of the response."""
TOOL_FIELDS = frozenset({"type", "name", "description", "parameters", "strict", "allowed_callers", "async"})
TOOL_FIELDS |= {"defer_loading", "output_schema"}
_SEALED, _LOGPROBS = "reasoning.encrypted_content", "message.output_text.logprobs"


def read_ask(body: Mapping[str, JsonValue]) -> Ask:
    fields = Fields(body, FIELDS)
    for name, reason in REFUSED.items():
        if fields.has(name):
            fields.refuse(name, reason)
    tools = read_tools(fields, _tool)
    _check_allowed(fields, has_tools=bool(tools))
    include = _include(fields)
    if fields.integer("top_logprobs", 0, 20):
        fields.refuse("top_logprobs", "only the sampled token's log-probability is known; leave it out or send 0")
    ask = Ask(
        messages=_messages(fields),
        tools=tools,
        max_tokens=fields.integer("max_output_tokens", 1, MAX_INT32),
        sampling=read_sampling(fields),
        is_streamed=bool(fields.boolean("stream")),
        tool_choice=read_tool_choice(fields),
        num_top_logprobs=0 if _LOGPROBS in include else None,
        model=fields.required_text("model"),
    )
    summary = _summary(fields)
    shape = {"is_summarised": summary is not None, "is_sealed": _SEALED in include}
    return replace(ask, echo=_repeated(fields, ask, summary) | shape)


def _repeated(fields: Fields, ask: Ask, summary: str | None) -> dict[str, JsonValue]:
    """Return the request's fields that the response repeats."""
    return {
        "background": False,
        "instructions": fields.value("instructions"),
        "max_output_tokens": ask.max_tokens,
        "max_tool_calls": fields.integer("max_tool_calls", 0, MAX_INT32),
        "metadata": fields.metadata() or {},
        "model": ask.model,
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "prompt_cache_key": fields.text("prompt_cache_key"),
        "prompt_cache_retention": fields.choice("prompt_cache_retention", ("in_memory", "24h")),
        "reasoning": {"effort": None, "summary": summary},
        "safety_identifier": fields.text("safety_identifier"),
        "service_tier": fields.choice("service_tier", ("auto", "default")) and "default",
        "temperature": ask.sampling.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": ask.tool_choice,
        "tools": [
            {
                "type": "function",
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.parameters,
                "strict": False,
            }
            for tool in ask.tools
        ],
        "top_logprobs": 0,
        "top_p": ask.sampling.top_p,
        "truncation": "disabled",
        "user": fields.text("user"),
    }


# -- settings ---------------------------------------------------------------------------------------------------------


def _check_allowed(fields: Fields, *, has_tools: bool) -> None:
    if fields.boolean("background"):
        fields.refuse("background", "responses are made while the client waits; leave it out or send false")
    if fields.boolean("store"):
        fields.refuse("store", "responses are not stored for retrieval; leave it out or send false")
    if fields.items("context_management"):
        fields.refuse("context_management", "context is never edited here; leave it out")
    if fields.boolean("parallel_tool_calls") is False and has_tools:
        fields.refuse("parallel_tool_calls", "the model decides how many tools it calls; leave it out or send true")
    if fields.choice("truncation", ("auto", "disabled")) == "auto":
        fields.refuse("truncation", "context is never cut here; leave it out or say 'disabled'")
    cache = fields.object("prompt_cache_options", {"comparison_response_id", "mode", "prewarm", "ttl"})
    if cache is not None:
        cache.choice("mode", ("implicit", "explicit"))
        cache.choice("ttl", ("30m", "12h"))
        if cache.has("comparison_response_id"):
            cache.refuse("comparison_response_id", "no diagnostics of the prompt cache are stored; leave it out")
        if cache.boolean("prewarm"):
            cache.refuse("prewarm", "a prompt cannot be sent without sampling an answer; leave it out")
    options = fields.object("stream_options", {"include_obfuscation"})
    if options is not None and options.boolean("include_obfuscation"):
        options.refuse("include_obfuscation", "events are not padded; leave it out or send false")
    _check_text(fields)


def _check_text(fields: Fields) -> None:
    text = fields.object("text", {"format", "verbosity"})
    if text is None:
        return
    if text.choice("verbosity", ("low", "medium", "high")) not in (None, "medium"):
        text.refuse("verbosity", "how much the model writes cannot be set; leave it out, or say so in a message")
    if text.has("format") and read_object(text.value("format"), "text.format").get("type") != "text":
        text.refuse("format", "the answer's form cannot be enforced; leave it out and ask for it in a message")


def _include(fields: Fields) -> frozenset[str]:
    """Only these two are accepted: the others concern tools that the gateway does not have."""
    known = set()
    for index, value in enumerate(fields.items("include")):
        if not isinstance(value, str) or value not in (_SEALED, _LOGPROBS):
            refuse_value(f"include[{index}]", f"{_SEALED!r} or {_LOGPROBS!r}", value)
        known.add(value)
    return frozenset(known)


def _summary(fields: Fields) -> str | None:
    reasoning = fields.object("reasoning", {"context", "effort", "generate_summary", "mode", "summary"})
    if reasoning is None:
        return None
    if reasoning.has("effort"):
        reasoning.refuse("effort", "how long the model thinks cannot be set; leave it out, or limit max_output_tokens")
    if reasoning.choice("mode", ("standard", "pro")) == "pro":
        reasoning.refuse("mode", "'pro' cannot be had; leave it out or say 'standard'")
    if reasoning.choice("context", ("auto", "current_turn", "all_turns")) == "current_turn":
        reasoning.refuse("context", "thinking that is sent is shown to the model; leave out what it should not see")
    summaries = [reasoning.choice(name, ("auto", "concise", "detailed")) for name in ("summary", "generate_summary")]
    if "concise" in summaries:
        reasoning.refuse("summary", "thinking is not shortened; say 'auto' or 'detailed', or leave it out")
    return summaries[0] or summaries[1]


def _tool(value: JsonValue, location: str) -> Tool:
    kind = read_object(value, location).get("type")
    if kind != "function":
        path = f"{location}.type"
        raise AskError(f"{path}: expected 'function', received {shown(kind)}; the gateway runs no tools", path)
    fields = Fields(value, TOOL_FIELDS, location)
    fields.boolean("strict")
    if fields.boolean("async"):
        fields.refuse("async", "tools are not called in the background; leave it out or send false")
    if fields.boolean("defer_loading"):
        fields.refuse("defer_loading", "there is no search for tools; leave it out or send false")
    if fields.has("allowed_callers") and list(fields.items("allowed_callers")) != ["direct"]:
        fields.refuse("allowed_callers", "only the model calls tools here; leave it out or say ['direct']")
    if fields.has("output_schema"):
        fields.refuse("output_schema", "the model is shown no schema of results; put it into the description")
    schema = read_object(fields.value("parameters"), f"{location}.parameters") if fields.has("parameters") else {}
    return make_tool(fields, schema, location)


# -- the conversation -------------------------------------------------------------------------------------------------


def _messages(fields: Fields) -> tuple[Message, ...]:
    conversation = Conversation()
    instructions, value = fields.text("instructions"), fields.value("input")
    if instructions is not None:
        conversation.say("system", instructions)
    if isinstance(value, str):
        conversation.say("user", value)
    else:
        for index, item in enumerate(read_list(value, "input")):
            read_item(conversation, item, f"input[{index}]")
    messages = conversation.messages("input")
    if not messages:
        fields.refuse("input", "expected text or at least one item, received none")
    return messages
