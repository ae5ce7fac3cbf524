"""The types of a conversation: messages, tool calls, tools; and their conversion from and to OpenAI's JSON.

Everything here is text and JSON values; chat formats turn a conversation into tokens. A message that no format could
express (a tool call by a user, an unknown role) raises a `FormatError` on construction, and so does a tool whose schema
is not JSON.

`parse_json` reads what models write and what trajectory files contain into values that can be serialized again: finite
numbers, no lone surrogates. Later consumers recurse (templates, serializers, schema checks), so depth is bounded here.
Unescaped newlines inside strings are accepted, because models write them.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NoReturn, TypeAlias, get_args

from m2forge.errors import FormatError
from m2forge.records import JsonValue

MAX_DEPTH = 100
"""Arrays and objects nested deeper than this are refused."""
MAX_DOCUMENT_DEPTH = 2 * MAX_DEPTH
"""Maximum depth of whole documents: arguments and schemas are nested some levels down in them."""


def parse_json(text: str, max_depth: int = MAX_DEPTH) -> JsonValue:
    """Raises ValueError for an unacceptable value, json.JSONDecodeError if the text is not JSON."""
    try:
        value: JsonValue = _DECODER.decode(text)
    except RecursionError:
        raise ValueError(f"nested deeper than {max_depth}") from None
    if text.count("[") + text.count("{") > max_depth and is_deeper(value, max_depth):
        raise ValueError(f"nested deeper than {max_depth}")
    if "\\u" in text:
        json.dumps(value, ensure_ascii=False).encode()
    return value


def is_deeper(value: JsonValue, depth: int) -> bool:
    """Whether arrays and objects are nested more than `depth` deep; not recursive itself."""
    level = [value]
    for _ in range(depth + 1):
        # Plain types first: a long body holds thousands of values, and abstract isinstance checks are slow.
        outers = [
            item
            for item in level
            if type(item) not in _LEAVES and isinstance(item, _OUTERS) and not isinstance(item, str)
        ]
        if not outers:
            return False
        level = [inner for outer in outers for inner in (outer.values() if isinstance(outer, _OBJECTS) else outer)]
    return True


_LEAVES = frozenset((str, int, float, bool, type(None)))
_OBJECTS = (dict, Mapping)
_OUTERS = (dict, list, Mapping, Sequence)


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse_constant(text)


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite, strict=False)


Role: TypeAlias = Literal["system", "user", "assistant", "tool"]
FormatName: TypeAlias = Literal["auto", "minimax_m2", "chatml", "template"]
"""A chat format in configs; defined here because `text/format.py` imports the formats' libraries."""
RewritePolicy: TypeAlias = Literal["allow", "refuse"]
"""Whether a chat format may render earlier messages differently because of later ones; see `text/rewrite.py`."""
ROLES: tuple[Role, ...] = get_args(Role)
FORMAT_NAMES: tuple[FormatName, ...] = get_args(FormatName)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call of the assistant."""

    name: str
    arguments: Mapping[str, JsonValue]
    id: str = ""
    """Assigned by the server, matched by the result's `tool_call_id`; no chat format shows it to the model."""


@dataclass(frozen=True, slots=True)
class Message:
    """One turn, or one tool result."""

    role: Role
    content: str = ""
    thinking: str = ""
    """The assistant's reasoning before `content`."""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    """Id of the call that this result answers; empty: the next unanswered one."""

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise FormatError(f"role: expected one of {', '.join(ROLES)}, received {self.role!r}")
        object.__setattr__(self, "tool_calls", tuple(self.tool_calls))
        if self.role != "assistant" and (self.thinking or self.tool_calls):
            raise FormatError(f"a message of role {self.role!r} has thinking or tool calls, which only assistants have")
        if self.role != "tool" and self.tool_call_id:
            raise FormatError(f"a message of role {self.role!r} has a tool_call_id, which only results of tools have")


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that the assistant may call."""

    name: str
    description: str = ""
    parameters: Mapping[str, JsonValue] = field(default_factory=dict)
    """JSON schema of the arguments object; empty: unrestricted."""

    def __post_init__(self) -> None:
        if is_deeper(self.parameters, MAX_DEPTH):
            raise FormatError(f"tool {self.name}: parameters: nested deeper than {MAX_DEPTH}")
        try:
            json.dumps(self.parameters, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise FormatError(f"tool {self.name}: parameters: not a JSON value ({error})") from error


# -- OpenAI's JSON ----------------------------------------------------------------------------------------------------


def message_from_openai(data: Mapping[str, JsonValue]) -> Message:
    """Parse one message. Unknown keys are ignored: every server adds its own."""
    if not isinstance(data, Mapping):
        raise FormatError(f"message: expected an object, received {_shown(data)}")
    role = data.get("role")
    if role == "developer":
        role = "system"
    for known in ROLES:
        if role == known:
            return Message(
                role=known,
                content=_text_of(data.get("content"), "content"),
                thinking=_thinking_of(data) if known == "assistant" else "",
                tool_calls=_calls_of(data.get("tool_calls")),
                tool_call_id=_optional_string(data, "tool_call_id") if known == "tool" else "",
            )
    raise FormatError(f"role: expected one of {', '.join(ROLES)} or developer, received {_shown(role)}")


def message_to_openai(message: Message) -> dict[str, JsonValue]:
    """The message as an OpenAI client sends it; arguments are JSON text, thinking is `reasoning_content`."""
    data: dict[str, JsonValue] = {"role": message.role, "content": message.content}
    if message.thinking:
        data["reasoning_content"] = message.thinking
    if message.tool_calls:
        data["tool_calls"] = [_call_to_openai(call) for call in message.tool_calls]
    if message.tool_call_id:
        data["tool_call_id"] = message.tool_call_id
    return data


def tool_from_openai(data: Mapping[str, JsonValue]) -> Tool:
    """Parse `{"type": "function", "function": {…}}`, or the bare function."""
    if not isinstance(data, Mapping):
        raise FormatError(f"tool: expected an object, received {_shown(data)}")
    if data.get("type", "function") != "function":
        raise FormatError(f"tool: type: expected 'function', received {_shown(data['type'])}")
    function = data.get("function", data)
    if not isinstance(function, Mapping):
        raise FormatError(f"tool: function: expected an object, received {_shown(function)}")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not name:
        raise FormatError(f"tool: name: expected text, received {_shown(name)}")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise FormatError(f"tool {name}: parameters: expected a JSON schema, received {_shown(parameters)}")
    return Tool(name, _optional_string(function, "description"), parameters or {})


def tool_to_openai(tool: Tool) -> dict[str, JsonValue]:
    function: dict[str, JsonValue] = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
    }
    return {"type": "function", "function": function}


def _call_to_openai(call: ToolCall) -> dict[str, JsonValue]:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _text_of(value: JsonValue, name: str) -> str:
    """Text from a string, null, or a list of text parts."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, Sequence):
        raise FormatError(f"{name}: expected text, null or a list of text parts, received {_shown(value)}")
    texts = []
    for index, part in enumerate(value):
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, Mapping) else None
        kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
        if kind != "text" or not isinstance(text, str):
            raise FormatError(f"{name}[{index}]: expected a part of type text, received {_shown(part)}")
        texts.append(text)
    return "".join(texts)


def _thinking_of(data: Mapping[str, JsonValue]) -> str:
    for key in ("reasoning_content", "reasoning"):
        if data.get(key) is not None:
            return _text_of(data[key], key)
    return ""


def _calls_of(value: JsonValue) -> tuple[ToolCall, ...]:
    if value is None:
        return ()
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise FormatError(f"tool_calls: expected a list, received {_shown(value)}")
    return tuple(_call_of(call, f"tool_calls[{index}]") for index, call in enumerate(value))


def _call_of(value: JsonValue, location: str) -> ToolCall:
    if not isinstance(value, Mapping):
        raise FormatError(f"{location}: expected an object, received {_shown(value)}")
    function = value.get("function", value)
    if not isinstance(function, Mapping):
        raise FormatError(f"{location}.function: expected an object, received {_shown(function)}")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise FormatError(f"{location}.name: expected text, received {_shown(name)}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments) if arguments.strip() else {}
        except ValueError as error:
            raise FormatError(f"{location}.arguments: not JSON ({error}), received {_shown(arguments)}") from error
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        raise FormatError(f"{location}.arguments: expected an object or its JSON text, received {_shown(arguments)}")
    return ToolCall(name, arguments, _optional_string(value, "id"))


def _optional_string(data: Mapping[str, JsonValue], name: str) -> str:
    value = data.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise FormatError(f"{name}: expected text, received {_shown(value)}")
    return value


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"
