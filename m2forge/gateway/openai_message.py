"""Strict reader of messages and tools in OpenAI's Chat Completions format.

    system, developer   content; consecutive ones are merged
    user                content
    assistant           content, reasoning_content (thinking; `reasoning` is an alias), tool_calls
    tool                content, tool_call_id; `name` is redundant

Content is text or a list of text parts, which are joined. Images, audio, files, refusals, custom tools and the calls of
`functions` are refused: no chat format shows them to the model. A participant's `name` is refused for the same reason.

Allowed because they cannot change the response: cache hints (`prompt_cache_breakpoint`, `cache_control`), and what SDKs
attach to an assistant message and send back (`annotations`, `provider_specific_fields`, a call's `index`,
`parsed_arguments`). A function's `strict` is allowed too, though sampling is not constrained by a grammar: arguments
that violate the schema reach the client unchanged.
"""

from collections.abc import Callable, Mapping, Sequence

from m2forge.gateway.conversation import join_systems
from m2forge.gateway.exchange import AskError
from m2forge.gateway.reading import Fields, read_list, read_object, read_text, refuse_value
from m2forge.gateway.tool_list import make_tool
from m2forge.gateway.tool_result import order_results
from m2forge.records import JsonValue
from m2forge.text.json_value import parse_json
from m2forge.text.message import Message, Role, Tool, ToolCall

SYSTEM_FIELDS = frozenset({"role", "content", "name"})
ASSISTANT_FIELDS = SYSTEM_FIELDS | {"reasoning_content", "reasoning", "tool_calls", "refusal", "audio", "function_call"}
ASSISTANT_FIELDS |= {"annotations", "provider_specific_fields", "parsed", "thinking_blocks", "images"}
RESULT_FIELDS = SYSTEM_FIELDS | {"tool_call_id"}
PART_FIELDS = frozenset({"type", "text", "prompt_cache_breakpoint", "cache_control"})
CALL_FIELDS = frozenset({"id", "type", "function", "index"})
CALL_FUNCTION_FIELDS = frozenset({"name", "arguments", "parsed_arguments"})
TOOL_FIELDS = frozenset({"type", "function"})
FUNCTION_FIELDS = frozenset({"name", "description", "parameters", "strict"})

_PLAIN_ROLES: dict[str, Role] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Roles whose messages may have no field besides content."""
_NAME = "the model is shown no names of participants; write it into the content"
_ASSISTANT_REFUSED = {
    "name": _NAME,
    "refusal": "the model knows no refusals beside its content; send the text as content",
    "audio": "audio is not supported; send text",
    "function_call": "replaced by tool_calls",
    "parsed": "parsed answers are not supported; send content alone",
    "thinking_blocks": "send the thinking as reasoning_content",
    "images": "images are not supported; send text",
}


def read_messages(fields: Fields) -> tuple[Message, ...]:
    place = fields.path("messages")
    values = read_list(fields.value("messages"), place)
    if not values:
        raise AskError(f"{place}: expected at least one message, received none", place)
    messages, num_systems = [], 0
    for index, value in enumerate(values):
        # Fast path for most messages of a long history.
        if type(value) is dict and len(value) == 2 and type(content := value.get("content")) is str:
            role = value.get("role")
            if type(role) is str and (plain := _PLAIN_ROLES.get(role)) is not None:
                if plain == "system":
                    num_systems += 1
                messages.append(Message(plain, content))
                continue
        message = _message(value, f"{place}[{index}]")
        num_systems += message.role == "system"
        messages.append(message)
    ordered = order_results(messages, place)
    return ordered if num_systems < 2 else tuple(join_systems(ordered))


def _message(value: JsonValue, place: str) -> Message:
    role = read_object(value, place).get("role")
    read = _READERS.get(role) if isinstance(role, str) else None
    if read is None:
        refuse_value(f"{place}.role", "one of system, developer, user, assistant, tool", role)
    return read(value, place)


def _system(value: JsonValue, place: str) -> Message:
    return Message("system", _said(value, place))


def _user(value: JsonValue, place: str) -> Message:
    return Message("user", _said(value, place))


def _said(value: JsonValue, place: str) -> str:
    fields = Fields(value, SYSTEM_FIELDS, place)
    if fields.has("name"):
        fields.refuse("name", _NAME)
    return _content(fields)


def _assistant(value: JsonValue, place: str) -> Message:
    fields = Fields(value, ASSISTANT_FIELDS, place)
    for name in fields.data.keys() & _ASSISTANT_REFUSED.keys():
        if fields.has(name):
            fields.refuse(name, _ASSISTANT_REFUSED[name])
    values = fields.items("tool_calls")
    calls = tuple([_call(call, f"{place}.tool_calls[{index}]") for index, call in enumerate(values)])
    content = _content(fields) if fields.has("content") else ""
    return Message("assistant", content, _thinking(fields), calls)


def _thinking(fields: Fields) -> str:
    thinking, other = fields.text("reasoning_content"), fields.text("reasoning")
    if thinking is not None and other is not None and thinking != other:
        fields.refuse("reasoning_content", "differs from reasoning, which is another name of it; send one of them")
    return thinking or other or ""


def _result(value: JsonValue, place: str) -> Message:
    fields = Fields(value, RESULT_FIELDS, place)
    fields.text("name")
    return Message("tool", _content(fields), tool_call_id=fields.required_text("tool_call_id"))


_READERS: dict[str, Callable[[JsonValue, str], Message]] = {
    "system": _system,
    "developer": _system,
    "user": _user,
    "assistant": _assistant,
    "tool": _result,
}


def _content(fields: Fields) -> str:
    value = fields.value("content")
    if isinstance(value, str):
        return value
    place = fields.path("content")
    if not isinstance(value, Sequence):
        refuse_value(place, "text or a list of text parts", value)
    return "".join(_part(part, f"{place}[{index}]") for index, part in enumerate(value))


def _part(value: JsonValue, place: str) -> str:
    fields = _of_kind("text", value, PART_FIELDS, place)
    return read_text(fields.value("text"), fields.path("text"))


def _call(value: JsonValue, place: str) -> ToolCall:
    fields = _of_kind("function", value, CALL_FIELDS, place)
    function = Fields(fields.value("function"), CALL_FUNCTION_FIELDS, fields.path("function"))
    text = function.text("arguments")
    if text is None:
        refuse_value(function.path("arguments"), "the JSON text of an object", None)
    try:
        arguments = parse_json(text) if text else {}
    except ValueError as error:
        function.refuse("arguments", f"not JSON ({error})")
    if not isinstance(arguments, dict):
        refuse_value(function.path("arguments"), "the JSON text of an object", text)
    return ToolCall(function.required_text("name"), arguments, fields.required_text("id"))


def read_tool(value: JsonValue, place: str) -> Tool:
    fields = _of_kind("function", value, TOOL_FIELDS, place)
    function = Fields(fields.value("function"), FUNCTION_FIELDS, fields.path("function"))
    function.boolean("strict")
    parameters = function.value("parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        refuse_value(function.path("parameters"), "a JSON schema", parameters)
    return make_tool(function, parameters or {}, place)


def _of_kind(kind: str, value: JsonValue, known: frozenset[str], place: str) -> Fields:
    """Check the type before the fields, since other types have other fields."""
    received = read_object(value, place).get("type")
    if received != kind:
        refuse_value(f"{place}.type", f"{kind!r}, the only kind that is supported", received)
    return Fields(value, known, place)
