"""Requests and responses independent of the client's dialect, and the protocol of a dialect.

    request body (JSON)            -> Dialect.read     -> CompletionRequest -> the gateway samples
    CompletionOutput, Usage        -> Dialect.response -> response body (JSON)
    parser events, token by token  -> Stream           -> server-sent events

Dialects are pure: no HTTP, no clock, no engine. A request field is honoured, or noted in `CompletionRequest.notices`,
or refused with `BadRequestError`, which becomes status 400 with the vendor's error body; none is silently ignored.

Tool calls have their ids before a dialect sees them: `CallFinished.call` in a stream and `Completion.tool_calls` in a
`CompletionOutput` are equal, ids included. Neither contains the text that ended a completion (`stop_text`).

A request that is legal for its vendor is served even if the gateway cannot honour all of it. Each thing that is not
honoured is a `Notice`: a short constant text that begins with the name of the field. The client receives the notices in
the response header `x-m2forge-notice`, joined by "; ", and the record of the call holds them. With `gateway.strict` a
request with a notice is refused instead.
"""

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, NoReturn, Protocol

from m2forge.errors import FormatError, M2ForgeError, suggest
from m2forge.records import JsonValue, Sampling
from m2forge.text.message import Message, Tool, ToolCall
from m2forge.text.parser import Completion, Event

HEADER = "x-m2forge-notice"
SEPARATOR = "; "


class Notice(StrEnum):
    TOOL_CHOICE = "tool_choice: treated as auto"
    PARALLEL_TOOL_CALLS = "parallel_tool_calls: not limited to one call"
    DISABLE_PARALLEL_TOOL_USE = "disable_parallel_tool_use: not limited to one call"
    RESPONSE_FORMAT = "response_format: written into the prompt, not enforced"
    TEXT_FORMAT = "text.format: written into the prompt, not enforced"
    OUTPUT_FORMAT = "output_config.format: written into the prompt, not enforced"
    REASONING_EFFORT = "reasoning_effort: not applied"
    RESPONSES_EFFORT = "reasoning.effort: not applied"
    OUTPUT_EFFORT = "output_config.effort: not applied"
    VERBOSITY = "verbosity: not applied"
    TEXT_VERBOSITY = "text.verbosity: not applied"
    THINKING = "thinking: not switched off"
    SYSTEM_TURN = "messages: a system message after the first turn is shown as a user turn"
    IMAGE = "image: replaced by a text placeholder"
    ASSISTANT_NAME = "name: not shown on the assistant's messages"
    VENDOR_TOOL = "tools: the vendor's own tools are not shown to the model"
    WEB_SEARCH = "web_search_options: there is no web search"
    STRICT_TOOL = "tools.strict: arguments are not constrained"
    SAMPLING = "sampling: replaced by the run's"

    @property
    def field(self) -> str:
        """The request's field that it is about."""
        return self.value.partition(":")[0]


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """What a dialect needs besides the body; picklable."""

    image_placeholder: str = "[image]"
    """Text that the model reads in place of an image."""
    items: Mapping[str, JsonValue] = field(default_factory=dict)
    """Items of earlier responses by id, for requests that refer to them."""


READ_DEFAULTS = ReadOptions()


class Reading:
    """One request while a dialect reads it."""

    def __init__(self, options: ReadOptions) -> None:
        self.options = options
        self._notices: dict[Notice, None] = {}
        self.format_instruction = ""
        """Prompt text that demands the requested response format; empty if the request sets none."""

    @property
    def notices(self) -> tuple[Notice, ...]:
        """Each notice once, in the order in which they were noted."""
        return tuple(self._notices)

    def note(self, notice: Notice) -> None:
        self._notices[notice] = None

    def image(self) -> str:
        """Return the text that stands for an image."""
        self.note(Notice.IMAGE)
        return self.options.image_placeholder


def notice_headers(notices: Sequence[str]) -> list[tuple[bytes, bytes]]:
    """Return the response header, if there is a notice."""
    return [(HEADER.encode(), SEPARATOR.join(notices).encode())] if notices else []


class BadRequestError(M2ForgeError, ValueError):
    """A request that a dialect cannot honour: the message says what and why, the field says where."""

    def __init__(self, message: str, field: str | None = None, code: str | None = None) -> None:
        super().__init__(message, field, code)
        self.field = field
        """Path of the request's field, such as `messages[2].content`; None if the error concerns the whole body."""
        self.code = code
        """Error code by which the vendor's clients recognise the error; None if it has none."""

    def __str__(self) -> str:
        return str(self.args[0])


class UnknownItemError(BadRequestError):
    """A request refers to items of earlier responses that `ReadOptions.items` does not hold."""

    def __init__(self, message: str, field: str | None, ids: tuple[str, ...]) -> None:
        super().__init__(message, field)
        self.ids = ids


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """One request of a client."""

    messages: tuple[Message, ...]
    """The conversation; empty for a raw prompt."""
    tools: tuple[Tool, ...] = ()
    deferred_tools: tuple[Tool, ...] = ()
    """Tools that the prompt does not describe and the model may call all the same, having read of them in a message."""
    prompt: str | tuple[int, ...] | None = None
    """Text or token ids to continue without a chat format; None for a conversation."""
    max_tokens: int | None = None
    """Maximum sampled tokens of each completion, thinking included; None: what the context leaves."""
    sampling: Sampling = field(default_factory=Sampling)
    requested_sampling: frozenset[str] = frozenset()
    """Names of the fields of `sampling` that the request sets."""
    stop_texts: tuple[str, ...] = ()
    seed: int | None = None
    num_samples: int = 1
    is_streamed: bool = False
    tool_choice: Literal["auto", "none"] = "auto"
    """Whether the model is offered the tools; a sampled policy cannot be forced to call one."""
    num_top_logprobs: int | None = None
    """None: no logprobs; 0: logprobs of the sampled tokens only, since engines return no others."""
    model: str = ""
    echo: Mapping[str, JsonValue] = field(default_factory=dict)
    """Request fields that only shape the response, for the dialect that read them."""
    notices: tuple[str, ...] = ()
    """What is not honoured of the request."""


def offered(request: CompletionRequest) -> tuple[Tool, ...]:
    """Return the tools that the model is shown: none if it may call none."""
    return request.tools if request.tool_choice == "auto" else ()


def callable_tools(request: CompletionRequest) -> tuple[Tool, ...]:
    """Return the tools whose calls are parsed by their schemas."""
    return (*request.tools, *request.deferred_tools) if request.tool_choice == "auto" else ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request; sampled tokens are summed over its completions."""

    num_prompt: int
    num_cached: int
    """Number of prompt tokens served from the prefix cache."""
    num_sampled: int
    num_thinking: int
    """Number of sampled tokens that are thinking."""


class Ending(StrEnum):
    """Why a completion ended, in the terms of the response."""

    STOP = "stop"
    """The model sampled its end marker."""
    STOP_TEXT = "stop_text"
    """The completion contains one of the client's stop texts."""
    LENGTH = "length"
    """The completion reached the token limit or the end of the context."""
    TOOL_CALLS = "tool_calls"
    """The model sampled its end marker after at least one tool call."""
    ABORT = "abort"
    """The engine aborted the completion, or it timed out."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One sampled token."""

    text: bytes
    """Bytes of the token, possibly only part of a character."""
    logprob: float
    id: int


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One complete completion."""

    completion: Completion
    ending: Ending
    stop_text: str | None = None
    """The stop text that was found, for `Ending.STOP_TEXT`."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """Logprobs of every sampled token if the client asked for them, else empty."""


class Stream(Protocol):
    """Encodes one response as server-sent events, in the order that the vendor's SDK expects.

    Called in this order: `begin`; `piece` as tokens arrive, samples interleaved; `end_sample` for each; `finish`.
    `fail` may follow `begin` at any time and ends the stream. Each returns the bytes to send, possibly none.
    """

    def begin(self, num_prompt: int, num_cached: int) -> bytes: ...

    def piece(self, sample: int, events: Sequence[Event], logprobs: Sequence[TokenLogprob]) -> bytes:
        """Encode the next parser events of a sample. All events of its parser pass through here, the final ones too."""
        ...

    def end_sample(self, sample: int, output: CompletionOutput) -> bytes:
        """End a sample. Its text was already sent, so this sends only the ending."""
        ...

    def finish(self, usage: Usage) -> bytes:
        """Encode the last events. A client that receives them may rely on the call being recorded."""
        ...

    def fail(self, status: int, message: str) -> bytes:
        """Encode an error that occurs after status 200 was sent."""
        ...


class Dialect(Protocol):
    """The request and response format of one vendor's SDK."""

    path: str
    """Path that requests are posted to, such as `/v1/chat/completions`."""

    def read(self, body: Mapping[str, JsonValue], options: ReadOptions = ...) -> CompletionRequest:
        """Raises `BadRequestError`, and nothing else, for what is refused."""
        ...

    def response(
        self, request: CompletionRequest, id: str, created_s: int, outputs: Sequence[CompletionOutput], usage: Usage
    ) -> dict[str, JsonValue]:
        """Encode the complete response, one completion per sample, in order."""
        ...

    def stream(self, request: CompletionRequest, id: str, created_s: int) -> Stream: ...

    def error(
        self, status: int, message: str, field: str | None = None, code: str | None = None
    ) -> dict[str, JsonValue]:
        """Encode the vendor's error body for an HTTP status."""
        ...

    def too_long(self, num_prompt: int, context: int) -> BadRequestError:
        """Return the vendor's error for a prompt that leaves no room in the context to sample: agents recognise it and
        shorten their history."""
        ...


MAX_METADATA, MAX_KEY_LENGTH, MAX_VALUE_LENGTH = 16, 64, 512
_NUM_SHOWN = 80
"""Maximum number of characters of a refused value in an error message."""


class Fields:
    """Strict reading of JSON objects: a value of the wrong type or range raises `BadRequestError` naming the field.

    null is the same as absent, as on the vendors' servers: SDKs serialize unset fields. An unknown key is refused with
    a suggestion, because a misspelt setting that does nothing is worse than an error.

    Bodies come from `parse_json`, so their text can be written as UTF-8, their numbers are finite and their depth
    bounded.

    A JSON object being read. Each method returns None if the field is absent or null.
    """

    __slots__ = ("data", "location")

    def __init__(self, value: JsonValue, known: AbstractSet[str], location: str = "") -> None:
        """`location` is the object's own path, empty for the body."""
        self.data, self.location = read_object(value, location), location
        if not self.data.keys() <= known:
            name = next(name for name in self.data if name not in known)
            path = self.path(name[:_NUM_SHOWN])
            raise BadRequestError(f"{path}: unknown field; {suggest(name[:_NUM_SHOWN], known)}", path)

    def path(self, name: str) -> str:
        return f"{self.location}.{name}" if self.location else name

    def has(self, name: str) -> bool:
        return self.data.get(name) is not None

    def value(self, name: str) -> JsonValue:
        return self.data.get(name)

    def refuse(self, name: str, reason: str) -> NoReturn:
        """Raise `BadRequestError`: the field, or its value, cannot be honoured for this reason."""
        path = self.path(name)
        raise BadRequestError(f"{path}: {reason}", path)

    def text(self, name: str) -> str | None:
        value = self.data.get(name)
        if value is not None and not isinstance(value, str):
            refuse_value(self.path(name), "text", value)
        return value

    def required_text(self, name: str) -> str:
        """Refuses an empty text."""
        value = self.data.get(name)
        if not isinstance(value, str) or not value:
            refuse_value(self.path(name), "text", value)
        return value

    def boolean(self, name: str) -> bool | None:
        value = self.data.get(name)
        if value is not None and not isinstance(value, bool):
            refuse_value(self.path(name), "true or false", value)
        return value

    def integer(self, name: str, low: int, high: int) -> int | None:
        value = self.data.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            refuse_value(self.path(name), f"an integer from {low} to {high}", value)
        return value

    def number(self, name: str, low: float, high: float) -> float | None:
        value = self.data.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            refuse_value(self.path(name), f"a number from {low:g} to {high:g}", value)
        return float(value)

    def choice(self, name: str, known: Sequence[str]) -> str | None:
        value = self.data.get(name)
        if value is None:
            return None
        if not isinstance(value, str) or value not in known:
            refuse_value(self.path(name), " or ".join(map(repr, known)), value)
        return value

    def items(self, name: str) -> Sequence[JsonValue]:
        """An absent list has no items."""
        value = self.data.get(name)
        return () if value is None else read_list(value, self.path(name))

    def object(self, name: str, known: AbstractSet[str]) -> "Fields | None":
        value = self.data.get(name)
        return None if value is None else Fields(value, known, self.path(name))

    def metadata(self, name: str = "metadata") -> Mapping[str, JsonValue] | None:
        """Return up to 16 short texts by name, which the response repeats."""
        value = self.data.get(name)
        if value is None:
            return None
        pairs = read_object(value, self.path(name))
        if len(pairs) > MAX_METADATA:
            self.refuse(name, f"expected at most {MAX_METADATA} pairs, received {len(pairs)}")
        for key, text in pairs.items():
            if len(key) > MAX_KEY_LENGTH:
                self.refuse(name, f"expected keys of at most {MAX_KEY_LENGTH} characters, received {shown(key)}")
            if not isinstance(text, str) or len(text) > MAX_VALUE_LENGTH:
                refuse_value(f"{self.path(name)}.{key}", f"text of at most {MAX_VALUE_LENGTH} characters", text)
        return pairs


def read_object(value: JsonValue, location: str) -> Mapping[str, JsonValue]:
    # Parsed bodies contain dict and list, for which isinstance is much faster than for the abstract types.
    if not isinstance(value, dict) and not isinstance(value, Mapping):
        refuse_value(location, "an object", value)
    return value


def read_list(value: JsonValue, location: str) -> Sequence[JsonValue]:
    if not isinstance(value, list) and (isinstance(value, str) or not isinstance(value, Sequence)):
        refuse_value(location, "a list", value)
    return value


def read_text(value: JsonValue, location: str) -> str:
    if not isinstance(value, str):
        refuse_value(location, "text", value)
    return value


def refuse_value(location: str, expected: str, value: JsonValue) -> NoReturn:
    received = "nothing" if value is None else shown(value)
    raise BadRequestError(f"{location or 'the body'}: expected {expected}, received {received}", location or None)


def shown(value: JsonValue) -> str:
    """Return a shortened repr; long values are not formatted first."""
    if isinstance(value, str):
        text = repr(value[:_NUM_SHOWN])
        return text if len(value) <= _NUM_SHOWN else f"{text}…"
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, Sequence):
        return f"a list of {len(value)}"
    if isinstance(value, int) and value.bit_length() > 4 * _NUM_SHOWN:
        return "a very large integer"
    return repr(value)


def order_results(messages: Sequence[Message], location: str = "messages") -> tuple[Message, ...]:
    """Sorts tool results into the order of their calls.

    Clients that run tools concurrently send results as they finish, each with its call's id. Chat formats show the
    model no ids, only the order, so it must match the calls. Every call needs a result, as the vendors require too: if
    one were missing, the model would take the next for it.

    Return the messages, with the results after each assistant turn in the order of its calls.

    Refuses a result for a call that is not in that turn or already has one, and a call without a result.
    """
    ordered = list(messages)
    index, end = 0, len(ordered)
    while index < end:
        message = ordered[index]
        index += 1
        if message.tool_calls:
            start = index
            while index < end and ordered[index].role == "tool":
                index += 1
            _order(message.tool_calls, ordered, start, index, location)
        elif message.role == "tool":
            _refuse(message.tool_call_id, "the assistant did not make just before", f"{location}[{index - 1}]")
    return tuple(ordered)


def _order(calls: Sequence[ToolCall], messages: list[Message], start: int, end: int, location: str) -> None:
    """Sort the results of these calls, `messages[start:end]`."""
    if len(calls) == 1 and end == start + 1 and messages[start].tool_call_id == calls[0].id:
        return
    rank_of_id = {call.id: rank for rank, call in enumerate(calls)}
    if len(rank_of_id) < len(calls):
        raise BadRequestError(f"{location}: calls of one turn have the same id; give each its own", location)
    answered: set[str] = set()
    for index in range(start, end):
        id = messages[index].tool_call_id
        if id not in rank_of_id or id in answered:
            wrong = "was answered before" if id in answered else "the assistant did not make just before"
            _refuse(id, wrong, f"{location}[{index}]")
        answered.add(id)
    missing = [call.id for call in calls if call.id not in answered]
    if missing:
        raise BadRequestError(
            f"{location}: call {shown(missing[0])} has no result; send one for each call, just after", location
        )
    messages[start:end] = sorted(messages[start:end], key=lambda result: rank_of_id[result.tool_call_id])


def _refuse(id: str, wrong: str, path: str) -> NoReturn:
    raise BadRequestError(f"{path}: a tool's result answers call {shown(id)}, which {wrong}", path)


def read_tools(fields: Fields, read_tool: Callable[[JsonValue, str], Sequence[Tool]]) -> tuple[Tool, ...]:
    """Reads the tools that a request offers, in any dialect: field names differ, schemas are JSON.

    `read_tool` reads one entry of the list, given its path: usually one tool, but there are entries that group several,
    and entries that the model is not shown.
    """
    tools: dict[str, Tool] = {}
    location = fields.path("tools")
    for index, value in enumerate(fields.items("tools")):
        for tool in read_tool(value, f"{location}[{index}]"):
            if tool.name in tools:
                fields.refuse("tools", f"expected names to differ, received {shown(tool.name)} more than once")
            tools[tool.name] = tool
    return tuple(tools.values())


def make_tool(fields: Fields, schema: Mapping[str, JsonValue], location: str) -> Tool:
    """Create a tool from its name, description and schema; raises `BadRequestError` at `location` if it is invalid."""
    try:
        return Tool(fields.required_text("name"), fields.text("description") or "", schema)
    except FormatError as error:
        raise BadRequestError(f"{location}: {error}", location) from error
