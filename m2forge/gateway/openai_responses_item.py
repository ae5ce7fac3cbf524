"""OpenAI Responses, the items of `input`: each adds its part to a conversation, or raises `AskError`.

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

from m2forge.gateway.conversation import Conversation
from m2forge.gateway.exchange import AskError
from m2forge.gateway.reading import Fields, read_object, read_text, refuse_value, shown
from m2forge.gateway.seal import unseal
from m2forge.records import JsonValue
from m2forge.text.json_value import parse_json
from m2forge.text.message import ToolCall

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


def read_item(conversation: Conversation, value: JsonValue, place: str) -> None:
    item = read_object(value, place)
    kind = item.get("type") or ("message" if "role" in item else "item_reference")
    read = _READERS.get(kind) if isinstance(kind, str) else None
    if read is not None:
        read(conversation, item, place)
        return
    path = f"{place}.type"
    if kind == "item_reference":
        raise AskError(f"{place}: responses are not kept, so items cannot be referred to; send the item itself", place)
    raise AskError(f"{path}: expected one of {', '.join(_READERS)}, received {shown(kind)}", path)


def _read_message(conversation: Conversation, item: Mapping[str, JsonValue], place: str) -> None:
    fields = Fields(item, MESSAGE_FIELDS, place)
    role = fields.choice("role", ("user", "assistant", "system", "developer"))
    fields.choice("status", _STATUSES)
    if fields.has("phase"):
        fields.refuse("phase", "the model is shown no phases; leave it out")
    content, source = _content(fields.value("content"), f"{place}.content"), _source(fields)
    if role == "assistant":
        conversation.write(content, source, begins=True)
    elif role == "user":
        conversation.say("user", content)
    elif role is not None:
        conversation.say("system", content)
    else:
        refuse_value(f"{place}.role", "'user', 'assistant', 'system' or 'developer'", None)


def _read_reasoning(conversation: Conversation, item: Mapping[str, JsonValue], place: str) -> None:
    fields = Fields(item, REASONING_FIELDS, place)
    fields.choice("status", _STATUSES)
    content = _texts(fields, "content", "reasoning_text")
    summary = _texts(fields, "summary", "summary_text")
    word = fields.text("encrypted_content")
    sealed = unseal(word) if word else ""
    if sealed is None and not content and not summary:
        fields.refuse("encrypted_content", "is none that this model can read; leave the item out")
    conversation.think(content or sealed or summary, _source(fields))


def _read_call(conversation: Conversation, item: Mapping[str, JsonValue], place: str) -> None:
    fields = Fields(item, CALL_FIELDS, place)
    fields.choice("status", _STATUSES)
    _check_direct(fields)
    for name in ("async", "async_"):
        if fields.boolean(name):
            fields.refuse(name, "tools are not called in the background; leave it out")
    text = read_text(fields.value("arguments"), f"{place}.arguments")
    try:
        arguments = parse_json(text) if text.strip() else {}
    except ValueError as error:
        fields.refuse("arguments", f"not JSON ({error})")
    if not isinstance(arguments, Mapping):
        refuse_value(f"{place}.arguments", "the JSON text of an object", text)
    call = ToolCall(fields.required_text("name"), arguments, fields.required_text("call_id"))
    conversation.call(call, _source(fields))


def _read_result(conversation: Conversation, item: Mapping[str, JsonValue], place: str) -> None:
    fields = Fields(item, RESULT_FIELDS, place)
    fields.choice("status", _STATUSES)
    fields.text("id")
    fields.text("name")
    _check_direct(fields)
    content = _content(fields.value("output"), f"{place}.output")
    conversation.answer_call(fields.required_text("call_id"), content, place)


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


def _content(value: JsonValue, place: str) -> str:
    """Return a string as it is, or the joined texts of a list of parts."""
    if isinstance(value, str):
        return value
    if not isinstance(value, Sequence):
        refuse_value(place, "text or a list of parts", value)
    texts = []
    for index, part in enumerate(value):
        at = f"{place}[{index}]"
        kind = read_object(part, at).get("type")
        if kind not in ("input_text", "output_text"):
            path = f"{at}.type"
            raise AskError(
                f"{path}: expected input_text or output_text, received {shown(kind)}; the model reads text alone", path
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
