"""OpenAI's Chat Completions: `POST /v1/chat/completions`; and the settings of requests (sampling, stop texts,
streaming, tool choice, response format) and parts of responses that OpenAI's other APIs share with it.

Every field that the SDK can send is handled. Fields in `READ` are honoured or repeated in the response. Fields in
`ALLOWED` cannot change the response, or are accepted only with a no-op value. Fields in `NOTED` are not applied, and a
notice says so: the policy is sampled as it is. The same holds for forced tool calls, for the limit to one call, and for
a response format, which is also written into the prompt. Fields in `REFUSED` cannot be honoured and get status 400; so
do logprobs of tokens that were not sampled. Besides OpenAI's own fields it reads `top_k`, `min_p` and
`repetition_penalty`, under the names that open source servers use: they are sampling parameters and can be honoured.

    system, developer   content; the first ones are merged, later ones become user turns
    user                content; a participant's `name` is written before it
    assistant           content, reasoning_content (thinking; `reasoning` is an alias), tool_calls; no `name`
    tool                content, tool_call_id; `name` is redundant

Content is text or a list of text parts, which are joined; an image becomes a placeholder text. Audio, files, refusals,
custom tools and the calls of `functions` are refused: no chat format shows them to the model.
Allowed because they cannot change the response: cache hints (`prompt_cache_breakpoint`, `cache_control`), and what SDKs
attach to an assistant message and send back (`annotations`, `provider_specific_fields`, a call's `index`,
`parsed_arguments`). A function's `strict` is allowed too, though sampling is not constrained by a grammar: arguments
that violate the schema reach the client unchanged.

Thinking is `reasoning_content`, in messages and deltas, in both directions. Logprobs cover all sampled tokens in order:
thinking, content, tool calls and the end marker.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

from m2forge.gateway.dialects.conversation import format_instruction, place_instructions
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
    order_results,
    read_list,
    read_object,
    read_text,
    read_tools,
    refuse_value,
    shown,
)
from m2forge.records import MAX_INT32, JsonValue, Sampling
from m2forge.text.message import Message, Role, Tool, ToolCall, parse_json
from m2forge.text.parser import CallFinished, Completion, ContentDelta, Event, ThinkingDelta

SAMPLING_FIELDS = frozenset(
    {"temperature", "top_p", "presence_penalty", "frequency_penalty", "top_k", "min_p", "repetition_penalty"}
)
MAX_STOPS, MAX_SEED = 4, 2**63 - 1
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
VERBOSITIES = ("low", "medium", "high")
DEFAULT_VERBOSITY = "medium"
SCHEMA_FIELDS = frozenset({"name", "description", "schema", "strict"})
CHOICE_FIELDS = frozenset({"type", "function", "custom", "name", "mode", "tools", "allowed_tools", "server_label"})
CHOICE_FIELDS |= {"namespace"}


def read_sampling(fields: Fields) -> Sampling:
    numbers = {
        "temperature": fields.number("temperature", 0, 2),
        "top_p": fields.number("top_p", 0, 1),
        "min_p": fields.number("min_p", 0, 1),
        "presence_penalty": fields.number("presence_penalty", -2, 2),
        "frequency_penalty": fields.number("frequency_penalty", -2, 2),
        "repetition_penalty": fields.number("repetition_penalty", 0, 10),
    }
    numbers_set = {name: value for name, value in numbers.items() if value is not None}
    for name in ("top_p", "repetition_penalty"):
        if numbers_set.get(name) == 0:
            fields.refuse(name, "expected a number above 0, received 0; set temperature to 0 for the likeliest tokens")
    # Open source servers use -1 for no limit, which is 0 here.
    top_k = max(fields.integer("top_k", -1, MAX_INT32) or 0, 0)
    return Sampling(**numbers_set, top_k=top_k)


def requested_sampling(fields: Fields) -> frozenset[str]:
    return frozenset(name for name in SAMPLING_FIELDS if fields.has(name))


def read_stop(fields: Fields) -> tuple[str, ...]:
    value = fields.value("stop")
    values = (value,) if isinstance(value, str) else fields.items("stop")
    if len(values) > MAX_STOPS:
        fields.refuse("stop", f"expected at most {MAX_STOPS} texts, received {len(values)}")
    texts = tuple(read_text(value, f"stop[{index}]") for index, value in enumerate(values))
    if "" in texts:
        fields.refuse("stop", "expected text, received an empty one, which would end every completion at once")
    return texts


def read_seed(fields: Fields) -> int | None:
    return fields.integer("seed", -MAX_SEED - 1, MAX_SEED)


def read_num_samples(fields: Fields) -> int:
    """The gateway checks the upper limit."""
    return fields.integer("n", 1, MAX_INT32) or 1


def read_stream(fields: Fields) -> tuple[bool, dict[str, JsonValue]]:
    """Return whether the response is streamed, and the options that shape its chunks."""
    is_streamed = bool(fields.boolean("stream"))
    options = fields.object("stream_options", frozenset({"include_usage", "include_obfuscation"}))
    if options is None:
        return is_streamed, {}
    if not is_streamed:
        fields.refuse("stream_options", "only a streamed response has stream options; set stream to true")
    if options.boolean("include_obfuscation"):
        options.refuse("include_obfuscation", "chunks are not padded; leave it out or send false")
    return is_streamed, {"include_usage": True} if options.boolean("include_usage") else {}


def read_tool_choice(fields: Fields, tools: Sequence[Tool], reading: Reading) -> Literal["auto", "none"]:
    """A sampled model cannot be forced to call a tool, nor prevented from calling one that is offered: anything but
    `none` offers the tools."""
    choice = fields.value("tool_choice")
    if choice in (None, "auto", "none"):
        return "none" if choice == "none" else "auto"
    if isinstance(choice, Mapping):
        _check_named(choice, tools)
    elif choice not in ("required", "any"):
        refuse_value("tool_choice", "'auto', 'none', 'required' or a tool", choice)
    reading.note(Notice.TOOL_CHOICE)
    return "auto"


def _check_named(choice: Mapping[str, JsonValue], tools: Sequence[Tool]) -> None:
    """Refuse a choice of a tool that is not offered; one that the vendor runs has no name."""
    fields = Fields(choice, CHOICE_FIELDS, "tool_choice")
    kind = fields.required_text("type")
    if kind not in ("function", "custom"):
        return
    named = fields.object(kind, {"name"}) or fields
    name = named.required_text("name")
    if not any(name in (tool.name, tool.name.rpartition(".")[2]) for tool in tools):
        named.refuse("name", f"no tool {shown(name)} is offered")


def refuse_bias(fields: Fields) -> None:
    """Refuse logit biases; an empty object is allowed."""
    if fields.value("logit_bias") not in (None, {}):
        fields.refuse("logit_bias", "tokens cannot be biased: they would not be samples of the policy; leave it out")


def read_format(schema: Fields | None) -> str:
    """Return the instruction that stands for a response format; `schema`: None for any JSON object."""
    if schema is None:
        return format_instruction(None)
    schema.required_text("name")
    schema.boolean("strict")
    form = read_object(schema.value("schema"), schema.path("schema")) if schema.has("schema") else None
    return format_instruction(form, schema.text("description") or "")


MODELS_PATH = "/v1/models"
OWNER = "m2forge"
LOWEST_LOGPROB = -9999.0
"""Replaces a logprob that JSON cannot represent."""
DONE = b"data: [DONE]\n\n"

FINISH_REASONS: Mapping[Ending, str] = {
    Ending.STOP: "stop",
    Ending.STOP_TEXT: "stop",
    Ending.LENGTH: "length",
    Ending.TOOL_CALLS: "tool_calls",
    # OpenAI has no such finish reason; clients take "length" for a text that was cut off.
    Ending.ABORT: "length",
}

TOO_LONG = "context_length_exceeded"
"""Error code for a prompt that does not fit the context."""
TOO_FAST = "rate_limit_exceeded"
"""Error code for more connections than a key may have; a client waits and retries."""
_ERRORS: Mapping[int, tuple[str, str | None]] = {
    401: ("invalid_request_error", "invalid_api_key"),
    413: ("invalid_request_error", "request_too_large"),
    429: ("insufficient_quota", "insufficient_quota"),
    503: ("server_error", "service_unavailable"),
}
"""Type and code of an error by HTTP status. A 429 without another code is a spent budget, which no retry changes."""

quote = json.JSONEncoder().encode
"""Encodes JSON in ASCII: Unicode line separators would break event lines for some clients."""

READ = SAMPLING_FIELDS | {
    "messages",
    "model",
    "tools",
    "tool_choice",
    "max_tokens",
    "max_completion_tokens",
    "stop",
    "n",
    "seed",
    "logprobs",
    "top_logprobs",
    "stream",
    "stream_options",
    "metadata",
    "service_tier",
}
ALLOWED = frozenset(
    {
        "user",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prompt_cache_options",
        "store",
        "modalities",
        "logit_bias",
    }
)
NOTED: Mapping[str, Notice] = {
    "parallel_tool_calls": Notice.PARALLEL_TOOL_CALLS,
    "reasoning_effort": Notice.REASONING_EFFORT,
    "response_format": Notice.RESPONSE_FORMAT,
    "verbosity": Notice.VERBOSITY,
    "web_search_options": Notice.WEB_SEARCH,
}
REFUSED: Mapping[str, str] = {
    "audio": "audio is not supported; the model writes text",
    "function_call": "replaced by tool_choice",
    "functions": "replaced by tools",
    "moderation": "there is no moderation here; leave it out",
    "prediction": "predicted outputs are not supported; leave it out",
}
FIELDS = READ | ALLOWED | NOTED.keys() | REFUSED.keys()

SYSTEM_FIELDS = frozenset({"role", "content", "name"})
ASSISTANT_FIELDS = SYSTEM_FIELDS | {"reasoning_content", "reasoning", "tool_calls", "refusal", "audio", "function_call"}
ASSISTANT_FIELDS |= {"annotations", "provider_specific_fields", "parsed", "thinking_blocks", "images"}
RESULT_FIELDS = SYSTEM_FIELDS | {"tool_call_id"}
PART_FIELDS = frozenset({"type", "text", "prompt_cache_breakpoint", "cache_control"})
IMAGE_FIELDS = frozenset({"type", "image_url", "prompt_cache_breakpoint", "cache_control"})
CALL_FIELDS = frozenset({"id", "type", "function", "index"})
CALL_FUNCTION_FIELDS = frozenset({"name", "arguments", "parsed_arguments"})
TOOL_FIELDS = frozenset({"type", "function"})
FUNCTION_FIELDS = frozenset({"name", "description", "parameters", "strict"})

_PLAIN_ROLES: dict[str, Role] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Roles whose messages may have no field besides content."""
_ASSISTANT_REFUSED = {
    "refusal": "the model knows no refusals beside its content; send the text as content",
    "audio": "audio is not supported; send text",
    "function_call": "replaced by tool_calls",
    "parsed": "parsed content is not supported; send only content",
    "thinking_blocks": "send the thinking as reasoning_content",
    "images": "images are not supported; send text",
}


class OpenAIChat:
    path = "/v1/chat/completions"

    def read(self, body: Mapping[str, JsonValue], options: ReadOptions = READ_DEFAULTS) -> CompletionRequest:
        fields, reading = Fields(body, FIELDS), Reading(options)
        for name, reason in REFUSED.items():
            if fields.has(name):
                fields.refuse(name, reason)
        tools = read_tools(fields, read_tool)
        _check_allowed(fields)
        _note_unapplied(fields, reading, has_tools=bool(tools))
        is_streamed, echo = read_stream(fields)
        tool_choice = read_tool_choice(fields, tools, reading)
        return CompletionRequest(
            messages=read_messages(fields, reading),
            tools=tools,
            max_tokens=_max_tokens(fields),
            sampling=read_sampling(fields),
            requested_sampling=requested_sampling(fields),
            stop_texts=read_stop(fields),
            seed=read_seed(fields),
            num_samples=read_num_samples(fields),
            is_streamed=is_streamed,
            tool_choice=tool_choice,
            num_top_logprobs=_num_top_logprobs(fields),
            model=fields.required_text("model"),
            echo=echo | _repeated(fields),
            notices=reading.notices,
        )

    def response(
        self, request: CompletionRequest, id: str, created_s: int, outputs: Sequence[CompletionOutput], usage: Usage
    ) -> dict[str, JsonValue]:
        choices = [
            {
                "index": index,
                "message": message_body(output.completion),
                "logprobs": None if request.num_top_logprobs is None else logprobs_body(output.logprobs),
                "finish_reason": FINISH_REASONS[output.ending],
            }
            for index, output in enumerate(outputs)
        ]
        body: dict[str, JsonValue] = {
            "id": id,
            "object": "chat.completion",
            "created": created_s,
            "model": request.model,
            "choices": choices,
            "usage": usage_body(usage),
        }
        return body | {name: request.echo[name] for name in ("metadata", "service_tier") if name in request.echo}

    def stream(self, request: CompletionRequest, id: str, created_s: int) -> "ChatStream":
        return ChatStream(request, id, created_s)

    def error(
        self, status: int, message: str, field: str | None = None, code: str | None = None
    ) -> dict[str, JsonValue]:
        return error_body(status, message, field, code)

    def too_long(self, num_prompt: int, context: int) -> BadRequestError:
        message = (
            f"This model's maximum context length is {context} tokens. However, your messages resulted in {num_prompt} "
            "tokens. Please reduce the length of the messages."
        )
        return BadRequestError(message, "messages", TOO_LONG)


CHAT = OpenAIChat()


# -- the request's fields ---------------------------------------------------------------------------------------------


def _max_tokens(fields: Fields) -> int | None:
    """Read both names of the limit; the older one predates thinking."""
    older, newer = (fields.integer(name, 1, MAX_INT32) for name in ("max_tokens", "max_completion_tokens"))
    if older is not None and newer is not None and older != newer:
        fields.refuse("max_tokens", f"{older} is not max_completion_tokens, {newer}, which replaced it; send only that")
    return older if newer is None else newer


def _num_top_logprobs(fields: Fields) -> int | None:
    num_top = fields.integer("top_logprobs", 0, 20)
    if not fields.boolean("logprobs"):
        if num_top is not None:
            fields.refuse("top_logprobs", "log-probabilities were not requested; set logprobs to true")
        return None
    if num_top:
        fields.refuse(
            "top_logprobs", f"expected 0, received {num_top}; the engine reports logprobs only of sampled tokens"
        )
    return 0


def _check_allowed(fields: Fields) -> None:
    """Check that the fields in `ALLOWED`, if present, ask for nothing that the gateway does not do."""
    for name in ("user", "safety_identifier", "prompt_cache_key"):
        fields.text(name)
    fields.choice("prompt_cache_retention", ("in_memory", "24h"))
    if (cache := fields.object("prompt_cache_options", frozenset({"mode", "ttl"}))) is not None:
        cache.choice("mode", ("implicit", "explicit"))
        cache.text("ttl")
    if fields.boolean("store"):
        fields.refuse("store", "completions cannot be listed afterwards; send false")
    if fields.value("modalities") not in (None, ["text"]):
        fields.refuse("modalities", "expected ['text']; the model writes nothing else")
    refuse_bias(fields)


def _note_unapplied(fields: Fields, reading: Reading, *, has_tools: bool) -> None:
    """Note the fields in `NOTED` that ask for something, and read the response format."""
    if fields.boolean("parallel_tool_calls") is False and has_tools:
        reading.note(Notice.PARALLEL_TOOL_CALLS)
    if fields.choice("reasoning_effort", EFFORTS) is not None:
        reading.note(Notice.REASONING_EFFORT)
    if fields.choice("verbosity", VERBOSITIES) not in (None, DEFAULT_VERBOSITY):
        reading.note(Notice.VERBOSITY)
    if fields.has("web_search_options"):
        read_object(fields.value("web_search_options"), "web_search_options")
        reading.note(Notice.WEB_SEARCH)
    format = fields.object("response_format", frozenset({"type", "json_schema"}))
    if format is None:
        return
    schema = format.object("json_schema", SCHEMA_FIELDS)
    kind = format.choice("type", ("text", "json_object", "json_schema"))
    if kind is None or (kind == "json_schema") != (schema is not None):
        fields.refuse("response_format", "expected type text, json_object, or json_schema with the schema beside it")
    if kind != "text":
        reading.format_instruction = read_format(schema)
        reading.note(Notice.RESPONSE_FORMAT)


def _repeated(fields: Fields) -> dict[str, JsonValue]:
    repeated: dict[str, JsonValue] = {}
    if (metadata := fields.metadata()) is not None:
        repeated["metadata"] = metadata
    if fields.choice("service_tier", ("auto", "default")) is not None:
        repeated["service_tier"] = "default"
    return repeated


# -- the request's messages and tools ---------------------------------------------------------------------------------


def read_messages(fields: Fields, reading: Reading) -> tuple[Message, ...]:
    location = fields.path("messages")
    values = read_list(fields.value("messages"), location)
    if not values:
        raise BadRequestError(f"{location}: expected at least one message, received none", location)
    messages, later_systems = [], 0
    for index, value in enumerate(values):
        # Fast path for most messages of a long history.
        if type(value) is dict and len(value) == 2 and type(content := value.get("content")) is str:
            role = value.get("role")
            if type(role) is str and (plain := _PLAIN_ROLES.get(role)) is not None:
                if index and plain == "system":
                    later_systems += 1
                messages.append(Message(plain, content))
                continue
        message = _message(value, f"{location}[{index}]", reading)
        later_systems += bool(index) and message.role == "system"
        messages.append(message)
    ordered = order_results(messages, location)
    return place_instructions(ordered, reading) if later_systems or reading.format_instruction else ordered


def _message(value: JsonValue, location: str, reading: Reading) -> Message:
    role = read_object(value, location).get("role")
    read = _READERS.get(role) if isinstance(role, str) else None
    if read is None:
        refuse_value(f"{location}.role", "one of system, developer, user, assistant, tool", role)
    return read(value, location, reading)


def _system(value: JsonValue, location: str, reading: Reading) -> Message:
    return Message("system", _named_content(value, location, reading))


def _user(value: JsonValue, location: str, reading: Reading) -> Message:
    return Message("user", _named_content(value, location, reading))


def _named_content(value: JsonValue, location: str, reading: Reading) -> str:
    """Return the content after the participant's name, if there is one."""
    fields = Fields(value, SYSTEM_FIELDS, location)
    name, content = fields.text("name"), _content(fields, reading)
    return f"{name}: {content}" if name else content


def _assistant(value: JsonValue, location: str, reading: Reading) -> Message:
    fields = Fields(value, ASSISTANT_FIELDS, location)
    for name in fields.data.keys() & _ASSISTANT_REFUSED.keys():
        if fields.has(name):
            fields.refuse(name, _ASSISTANT_REFUSED[name])
    values = fields.items("tool_calls")
    calls = tuple([_call(call, f"{location}.tool_calls[{index}]") for index, call in enumerate(values)])
    if fields.text("name"):
        # Written into the content, it would no longer be what was sampled.
        reading.note(Notice.ASSISTANT_NAME)
    content = _content(fields, reading) if fields.has("content") else ""
    return Message("assistant", content, _thinking(fields), calls)


def _thinking(fields: Fields) -> str:
    thinking, other = fields.text("reasoning_content"), fields.text("reasoning")
    if thinking is not None and other is not None and thinking != other:
        fields.refuse("reasoning_content", "differs from reasoning, which is another name of it; send one of them")
    return thinking or other or ""


def _result(value: JsonValue, location: str, reading: Reading) -> Message:
    fields = Fields(value, RESULT_FIELDS, location)
    fields.text("name")
    return Message("tool", _content(fields, reading), tool_call_id=fields.required_text("tool_call_id"))


_READERS: dict[str, Callable[[JsonValue, str, Reading], Message]] = {
    "system": _system,
    "developer": _system,
    "user": _user,
    "assistant": _assistant,
    "tool": _result,
}


def _content(fields: Fields, reading: Reading) -> str:
    value = fields.value("content")
    if isinstance(value, str):
        return value
    location = fields.path("content")
    if not isinstance(value, Sequence):
        refuse_value(location, "text or a list of text parts", value)
    return "".join(_part(part, f"{location}[{index}]", reading) for index, part in enumerate(value))


def _part(value: JsonValue, location: str, reading: Reading) -> str:
    if read_object(value, location).get("type") == "image_url":
        image = Fields(value, IMAGE_FIELDS, location).object("image_url", {"url", "detail"})
        if image is None:
            refuse_value(f"{location}.image_url", "an object", None)
        image.required_text("url")
        return reading.image()
    fields = _of_kind("text", value, PART_FIELDS, location)
    return read_text(fields.value("text"), fields.path("text"))


def _call(value: JsonValue, location: str) -> ToolCall:
    fields = _of_kind("function", value, CALL_FIELDS, location)
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


def read_tool(value: JsonValue, location: str) -> Sequence[Tool]:
    fields = _of_kind("function", value, TOOL_FIELDS, location)
    function = Fields(fields.value("function"), FUNCTION_FIELDS, fields.path("function"))
    function.boolean("strict")
    parameters = function.value("parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        refuse_value(function.path("parameters"), "a JSON schema", parameters)
    return [make_tool(function, parameters or {}, location)]


def _of_kind(kind: str, value: JsonValue, known: frozenset[str], location: str) -> Fields:
    """Check the type before the fields, since other types have other fields."""
    received = read_object(value, location).get("type")
    if received != kind:
        refuse_value(f"{location}.type", f"{kind!r}, the only kind that is supported", received)
    return Fields(value, known, location)


# -- the response -----------------------------------------------------------------------------------------------------


def message_body(completion: Completion) -> dict[str, JsonValue]:
    """Encode an assistant message. With tool calls, empty content is null, as SDKs expect."""
    body: dict[str, JsonValue] = {"role": "assistant", "content": completion.content, "refusal": None}
    if completion.thinking:
        body["reasoning_content"] = completion.thinking
    if completion.tool_calls:
        body["content"] = completion.content or None
        body["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments_text(call)}}
            for call in completion.tool_calls
        ]
    return body


def usage_body(usage: Usage) -> dict[str, JsonValue]:
    return {
        "prompt_tokens": usage.num_prompt,
        "completion_tokens": usage.num_sampled,
        "total_tokens": usage.num_prompt + usage.num_sampled,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached},
        "completion_tokens_details": {"reasoning_tokens": usage.num_thinking},
    }


def error_body(status: int, message: str, field: str | None = None, code: str | None = None) -> dict[str, JsonValue]:
    kind, usual = _ERRORS.get(status, ("server_error" if status >= 500 else "invalid_request_error", None))
    kind = "requests" if code == TOO_FAST else kind
    return {"error": {"message": message, "type": kind, "param": field, "code": code or usual}}


def arguments_text(call: ToolCall) -> str:
    return json.dumps(call.arguments, ensure_ascii=False)


def token_bodies(logprobs: Iterable[TokenLogprob]) -> list[JsonValue]:
    """A token may be part of a character: its bytes are exact, its text is not."""
    return [
        {
            "token": token.text.decode(errors="replace"),
            "logprob": finite_logprob(token.logprob),
            "bytes": list(token.text),
            "top_logprobs": [],
        }
        for token in logprobs
    ]


def logprobs_body(logprobs: Iterable[TokenLogprob]) -> dict[str, JsonValue]:
    """Encode the logprobs of a chat completion's choice."""
    return {"content": token_bodies(logprobs), "refusal": None}


def finite_logprob(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LOWEST_LOGPROB


class ChatStream:
    """A chat completion as server-sent events (`types.Stream`): `chat.completion.chunk` objects, then `[DONE]`.

    For each choice: a chunk with the role, in the order of the choices, because SDKs append choices as they see them;
    then deltas of `reasoning_content`, `content` and `tool_calls`, choices interleaved; then one with the finish
    reason. The usage comes last, if the client requested it, in a chunk without choices.

    A tool call is sent when it is complete: one that has started may turn out malformed, and a delta cannot be
    retracted. Its id and name come first, then all its arguments in a second delta.

    The constant part of a request's chunks is encoded once; each delta encodes one small JSON string.
    """

    def __init__(self, request: CompletionRequest, id: str, created_s: int) -> None:
        same: dict[str, JsonValue] = {
            "id": id,
            "object": "chat.completion.chunk",
            "created": created_s,
            "model": request.model,
        }
        if "service_tier" in request.echo:
            same["service_tier"] = request.echo["service_tier"]
        self._has_usage = bool(request.echo.get("include_usage"))
        self._has_logprobs = request.num_top_logprobs is not None
        self._head = f"data: {quote(same)[:-1]}, "
        """Start of every chunk, before its remaining fields."""
        self._deltas = [f'{self._head}"choices": [{{"index": {n}, "delta": {{' for n in range(request.num_samples)]
        """Start of each choice's chunks, before the delta's fields."""
        self._tail = ', "usage": null}\n\n' if self._has_usage else "}\n\n"
        self._plain_end = f'}}, "logprobs": null, "finish_reason": null}}]{self._tail}'
        """End of a chunk after the delta's fields, without logprobs and finish reason."""
        self._num_calls = [0] * request.num_samples
        self._has_content = [False] * request.num_samples

    def begin(self, num_prompt: int, num_cached: int) -> bytes:
        role = '"role": "assistant", "content": null, "refusal": null'
        return "".join(f"{delta}{role}{self._plain_end}" for delta in self._deltas).encode()

    def piece(self, sample: int, events: Sequence[Event], logprobs: Sequence[TokenLogprob]) -> bytes:
        start, chunks = self._deltas[sample], []
        # The piece's logprobs go into its first chunk.
        end = self._end(logprobs_body(logprobs), None) if self._has_logprobs and logprobs else self._plain_end
        for event in events:
            match event:
                case ContentDelta(text):
                    self._has_content[sample] = True
                    delta = f'"content": {quote(text)}'
                case ThinkingDelta(text):
                    delta = f'"reasoning_content": {quote(text)}'
                case CallFinished(call):
                    opened, delta = self._call(sample, call)
                    chunks.append(f"{start}{opened}{end}")
                    end = self._plain_end
                case _:
                    continue
            chunks.append(f"{start}{delta}{end}")
            end = self._plain_end
        if end is not self._plain_end:
            chunks.append(f"{start}{end}")
        return "".join(chunks).encode()

    def end_sample(self, sample: int, output: CompletionOutput) -> bytes:
        # Clients that concatenate deltas get null if there were none; an empty completion is an empty string.
        delta = "" if self._has_content[sample] or self._num_calls[sample] else '"content": ""'
        return f"{self._deltas[sample]}{delta}{self._end(None, FINISH_REASONS[output.ending])}".encode()

    def finish(self, usage: Usage) -> bytes:
        if not self._has_usage:
            return DONE
        return f'{self._head}"choices": [], "usage": {quote(usage_body(usage))}}}\n\n'.encode() + DONE

    def fail(self, status: int, message: str) -> bytes:
        return f"data: {quote(error_body(status, message))}\n\n".encode()

    def _end(self, logprobs: JsonValue, finish_reason: str | None) -> str:
        return f'}}, "logprobs": {quote(logprobs)}, "finish_reason": {quote(finish_reason)}}}]{self._tail}'

    def _call(self, sample: int, call: ToolCall) -> tuple[str, str]:
        """Return the fields of two deltas: id and name, then the arguments."""
        index = self._num_calls[sample]
        self._num_calls[sample] += 1
        opened = {"index": index, "id": call.id, "type": "function", "function": {"name": call.name, "arguments": ""}}
        filled = {"index": index, "function": {"arguments": arguments_text(call)}}
        return f'"tool_calls": [{quote(opened)}]', f'"tool_calls": [{quote(filled)}]'


# -- the list of models: `GET /v1/models` and `GET /v1/models/NAME` ---------------------------------------------------


def models_body(names: Sequence[str], created_s: int) -> dict[str, JsonValue]:
    """A gateway serves one policy under any number of names, because agents insist on the names they know."""
    return {"object": "list", "data": [model_body(name, created_s) for name in names]}


def model_body(name: str, created_s: int) -> dict[str, JsonValue]:
    return {"id": name, "object": "model", "created": created_s, "owned_by": OWNER}
