"""What every dialect promises, as checks that run against any of them through its vendor's real SDK.

An `Adapter` writes requests in one dialect and reads responses back with the vendor's client into `Received`. A check
knows only the neutral forms. `test_contract.py` runs every check for every dialect; what is particular to one dialect
is tested beside it.
"""

import json
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2forge.gateway.dialects.conversation import REMINDER
from m2forge.gateway.dialects.types import (
    BadRequestError,
    CompletionOutput,
    CompletionRequest,
    Dialect,
    Ending,
    Notice,
    TokenLogprob,
    Usage,
)
from m2forge.records import JsonValue, Sampling
from m2forge.text.message import Message, Tool, ToolCall
from m2forge.text.parser import CallFinished, CallStarted, Completion, ContentDelta, Event, ThinkingDelta
from tests.gateway.dialects.draw_output import arguments, arrivals, json_values, output_lists, outputs, play, usages
from tests.gateway.mutate import mutated
from tests.gateway.openai_client import Wire, streamed

Body = dict[str, JsonValue]
Arrivals = Sequence[tuple[int, list[Event], list[TokenLogprob]]]
ID, CREATED_S = "answer_1", 1_700_000_000
USAGE = Usage(num_prompt=30, num_cached=20, num_sampled=9, num_thinking=4)
GONE = "the engine is gone"
MAX_ERROR_BYTES = 1000
NUM_MUTATIONS = 60


@dataclass(frozen=True)
class FieldTable:
    """The fields of a request, and values for each."""

    sdk: AbstractSet[str]
    """Fields that the vendor's SDK can send."""
    extensions: AbstractSet[str]
    """Fields that the dialect reads besides those."""
    read: AbstractSet[str]
    allowed: AbstractSet[str]
    refused: AbstractSet[str]
    required: AbstractSet[str]
    good: Mapping[str, Sequence[JsonValue]]
    bad: Mapping[str, Sequence[JsonValue]]
    unbounded: AbstractSet[str]
    """Fields that take some values of any length."""
    needs: Mapping[str, Body] = field(default_factory=dict)
    """Other fields without which a field's good values are refused."""

    @property
    def all(self) -> AbstractSet[str]:
        return self.read | self.allowed | self.refused


@dataclass(frozen=True)
class Heard:
    """One completion as the vendor's client read it."""

    thinking: str
    content: str
    calls: tuple[ToolCall, ...]
    finish_reason: str | None
    """With the stop text or the details that the vendor tells beside it."""
    logprobs: tuple[object, ...] | None = None
    """Each sampled token in the form of `Adapter.token`."""
    turn: Any = field(default=None, compare=False)
    """The SDK's own objects, which a client appends to its history."""


@dataclass(frozen=True)
class Received:
    """One response as the vendor's client read it."""

    id: str
    model: str
    created_s: int | None
    completions: tuple[Heard, ...]
    usage: Usage | None


@dataclass(frozen=True)
class ErrorCase:
    status: int
    kind: str
    raised: type[Exception]
    code: str | None = None


class Adapter(ABC):
    """One dialect, and its vendor's client, whose requests `wire` answers."""

    dialect: ClassVar[Dialect]
    fields: ClassVar[FieldTable]
    body: ClassVar[Body]
    """The shortest request."""
    full: ClassVar[Body]
    """A request with a value in most places."""
    misspelt: ClassVar[Sequence[tuple[Body, str, str]]]
    """Changes of `body` with one misspelt field, its path, and the name that was meant."""
    prompt_field: ClassVar[str]
    """The field that holds the prompt or the conversation."""
    settings: ClassVar[AbstractSet[str]]
    """Fields of `CompletionRequest`, besides model, max_tokens, sampling and is_streamed, that a request can set."""
    sampling: ClassVar[AbstractSet[str]] = frozenset(Sampling.__dataclass_fields__)
    noted: ClassVar[Sequence[tuple[Body, Sequence[Notice]]]] = ()
    """Changes of `body` that are not honoured, and what the client is told."""
    max_temperature: ClassVar[float] = 2.0
    options: ClassVar[st.SearchStrategy[dict[str, Any]]] = st.just({})
    """Request fields that shape the response."""
    has_created: ClassVar[bool] = True
    shows_every_token: ClassVar[bool] = True
    """Whether logprobs, if asked for, are those of every sampled token."""
    finish_reasons: ClassVar[Mapping[Ending, str]]
    errors: ClassVar[Sequence[ErrorCase]]
    bad_arguments: ClassVar[Sequence[JsonValue]] = ()
    """Values that a call's arguments cannot have."""
    arguments_path: ClassVar[str] = ""

    wire: Wire

    @property
    def reads(self) -> Sequence[Callable[[Body], CompletionRequest]]:
        """Everything that reads a request."""
        return [self.dialect.read]

    @property
    def has_messages(self) -> bool:
        """Whether requests hold a conversation; else responses are content alone, without thinking and calls."""
        return "messages" in self.settings

    @property
    def has_samples(self) -> bool:
        return "num_samples" in self.settings

    def read(self, **changes: JsonValue) -> CompletionRequest:
        return self.dialect.read(self.body | changes)

    def refuse(self, **changes: JsonValue) -> BadRequestError:
        with pytest.raises(BadRequestError) as caught:
            self.read(**changes)
        return caught.value

    @abstractmethod
    def write(self, request: CompletionRequest) -> Body:
        """The request, results in the order in which they stand in `request.messages`."""

    def write_call(self, arguments: JsonValue) -> Body:
        """A conversation whose second message is a call with these arguments as the dialect writes them."""
        raise NotImplementedError

    @abstractmethod
    def whole(self, options: Mapping[str, Any]) -> Received:
        """Let the client send a request with these fields and read the response."""

    @abstractmethod
    def streamed(self, options: Mapping[str, Any]) -> Received:
        """Let the client stream the response and accumulate it."""

    def resend(self, turn: Any, results: Sequence[tuple[str, str]]) -> None:
        """Let the client send user, the turn, results by call id, user."""
        raise NotImplementedError

    @abstractmethod
    def stream_until_error(self) -> tuple[str, str]:
        """Let the client stream a response that fails: the text received before, and the error's message."""

    @abstractmethod
    def validate(self, text: str) -> None:
        """Validate a response's JSON with the SDK's types; no field may be unknown to them."""

    @abstractmethod
    def validate_events(self, stream: bytes) -> None:
        """Validate every server-sent event with the SDK's types."""

    @abstractmethod
    def details(self, error: Any) -> tuple[str, str | None, str | None]:
        """Type, field and code of an error that the client raised; None where the vendor's body has no such field."""

    def token(self, token: TokenLogprob) -> object:
        """A sampled token as this vendor's client shows it."""
        raise NotImplementedError

    def has_streamed_usage(self, request: CompletionRequest) -> bool:
        return True


Check = Callable[[Adapter], None]


def serve(
    case: Adapter,
    outputs: Sequence[CompletionOutput],
    usage: Usage = USAGE,
    pieces: Arrivals = (),
    num_bytes: int = 10**6,
) -> list[CompletionRequest]:
    """Answer every request of the client alike; returns the list that the requests are appended to."""
    requests: list[CompletionRequest] = []

    def handle(body: Mapping[str, JsonValue]) -> httpx2.Response:
        request = case.dialect.read(body)
        requests.append(request)
        if not request.is_streamed:
            text = json.dumps(case.dialect.response(request, ID, CREATED_S, outputs, usage), allow_nan=False)
            case.validate(text)
            return httpx2.Response(200, content=text, headers={"content-type": "application/json"})
        stream = b"".join(play(case.dialect.stream(request, ID, CREATED_S), outputs, pieces, usage))
        case.validate_events(stream)
        # Packets end anywhere, also inside an event.
        return streamed(stream[start : start + num_bytes] for start in range(0, len(stream), num_bytes))

    case.wire.handle = handle
    return requests


def said(content: str, ending: Ending = Ending.STOP) -> CompletionOutput:
    stop_text = "END" if ending is Ending.STOP_TEXT else None
    return CompletionOutput(Completion("", content, (), (), closed=True), ending, stop_text)


def drawn_outputs(case: Adapter) -> st.SearchStrategy[list[CompletionOutput]]:
    is_raw = not case.has_messages
    return output_lists(is_raw=is_raw) if case.has_samples else outputs(is_raw=is_raw).map(lambda one: [one])


# -- requests ---------------------------------------------------------------------------------------------------------


def check_every_field_of_the_sdk_is_decided_once(case: Adapter) -> None:
    fields = case.fields
    assert fields.sdk | fields.extensions == fields.all
    assert not fields.read & fields.allowed
    assert not (fields.read | fields.allowed) & fields.refused
    assert fields.good.keys() == fields.read | fields.allowed
    assert fields.bad.keys() == fields.all
    assert all(fields.good.values())
    assert all(fields.bad.values())


def check_fields_take_good_values(case: Adapter) -> None:
    for name, values in case.fields.good.items():
        for value in values:
            case.read(**case.fields.needs.get(name, {}), **{name: value})


def check_null_is_the_same_as_absent(case: Adapter) -> None:
    for name in case.fields.all - case.fields.required:
        assert case.read(**{name: None}) == case.read(), name
    for name in case.fields.required:
        assert case.refuse(**{name: None}).field == name


def check_fields_refuse_bad_values_by_name(case: Adapter) -> None:
    for name, values in case.fields.bad.items():
        for value in values:
            error = case.refuse(**{name: value})
            assert error.field, (name, value, str(error))
            assert error.field.startswith(name), (name, value, str(error))
            assert str(error).startswith(error.field), (name, value, str(error))


def check_an_unknown_field_is_refused_with_the_near_name(case: Adapter) -> None:
    for changes, path, near in case.misspelt:
        error = case.refuse(**changes)
        assert error.field == path
        assert str(error) == f"{path}: unknown field; did you mean {near!r}?"


@st.composite
def conversations(draw: st.DrawFn) -> tuple[Message, ...]:
    """A conversation that ends with the user; results stand in the order of their calls."""
    texts = st.text(max_size=6)
    messages = [Message("system", draw(st.text(min_size=1, max_size=6)))] if draw(st.booleans()) else []
    for turn in range(draw(st.integers(0, 3))):
        if messages[-1:] == [] or messages[-1].role != "tool" or draw(st.booleans()):
            messages.append(Message("user", draw(texts)))
        calls = tuple(
            ToolCall(draw(st.text(min_size=1, max_size=6)), draw(arguments), f"call_{turn}_{number}")
            for number in range(draw(st.integers(0, 3)))
        )
        messages.append(Message("assistant", draw(texts), draw(texts), calls))
        messages.extend(Message("tool", draw(texts), tool_call_id=call.id) for call in calls)
    return (*messages, Message("user", draw(texts)))


@st.composite
def with_results_shuffled(draw: st.DrawFn, messages: Sequence[Message]) -> tuple[Message, ...]:
    found: list[Message] = []
    for index, message in enumerate(messages):
        if message.role != "tool":
            results = messages[index + 1 : index + 1 + len(message.tool_calls)]
            found += [message, *draw(st.permutations(results))]
    return tuple(found)


@st.composite
def requests(draw: st.DrawFn, case: Adapter) -> CompletionRequest:
    """Anything that a request of the dialect can say."""
    numbers: dict[str, st.SearchStrategy[Any]] = {
        "temperature": st.floats(0, case.max_temperature),
        "top_p": st.floats(0.01, 1),
        "top_k": st.integers(0, 100),
        "min_p": st.floats(0, 1),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "repetition_penalty": st.floats(0.1, 10),
    }
    texts = st.text(min_size=1, max_size=5)
    tools = [Tool("look", "Looks.", {"type": "object"}), Tool("find", "", {"type": "object", "properties": {}})]
    settings: dict[str, st.SearchStrategy[Any]] = {
        "messages": conversations(),
        "prompt": texts | st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=4).map(tuple),
        "tools": st.sampled_from([(), tuple(tools[:1]), tuple(tools)]),
        "tool_choice": st.sampled_from(["auto", "none"]),
        "stop_texts": st.lists(texts, max_size=4).map(tuple),
        "seed": st.none() | st.integers(-(2**63), 2**63 - 1),
        "num_samples": st.integers(1, 500),
        "num_top_logprobs": st.sampled_from([None, 0]),
    }
    return CompletionRequest(
        model=draw(texts),
        max_tokens=draw(st.integers(1, 2**31 - 1)),
        sampling=Sampling(**{name: draw(numbers[name]) for name in numbers if name in case.sampling}),
        is_streamed=draw(st.booleans()),
        **({"messages": ()} | {name: draw(settings[name]) for name in settings if name in case.settings}),
    )


@given(data=st.data())
def check_a_request_is_read_as_it_was_meant(case: Adapter, data: st.DataObject) -> None:
    """Messages, tools, sampling, stop texts, limits: all arrive; results come in any order and are sorted."""
    request = data.draw(requests(case))
    sent = replace(request, messages=data.draw(with_results_shuffled(request.messages)))
    read = case.dialect.read(json.loads(json.dumps(case.write(sent))))
    assert replace(read, echo={}, requested_sampling=frozenset()) == request


def check_what_is_not_honoured_is_noted(case: Adapter) -> None:
    assert case.read().notices == ()
    for changes, notices in case.noted:
        request = case.read(**changes)
        assert request.notices == tuple(notices), changes
        assert request.tool_choice == "auto"


def check_system_messages_keep_their_positions(case: Adapter) -> None:
    one, two, user = Message("system", "Be brief."), Message("system", "Be kind."), Message("user", "Hi")
    joined = Message("system", "Be brief.\n\nBe kind.")
    cases: list[tuple[tuple[Message, ...], tuple[Message, ...]]] = [
        ((one, two, user), (joined, user)),
        (
            (user, one, two, user),
            (user, *(Message("user", REMINDER.format(late.content)) for late in (one, two)), user),
        ),
        ((one, user, two, user), (one, user, Message("user", REMINDER.format(two.content)), user)),
    ]
    for sent, expected in cases:
        request = case.dialect.read(case.write(CompletionRequest(sent, model="m2", max_tokens=9)))
        assert request.messages == expected
        assert request.notices == (() if len(expected) == 2 else (Notice.SYSTEM_TURN,))


def check_every_call_needs_its_one_result(case: Adapter) -> None:
    user = Message("user", "Hi")
    calls = Message("assistant", tool_calls=(ToolCall("look", {}, "call_1"), ToolCall("look", {}, "call_2")))
    one, two = (Message("tool", "x", tool_call_id=id) for id in ("call_1", "call_2"))
    cases: list[tuple[list[Message], str]] = [
        ([user, calls, two, user], "'call_1' has no result"),
        ([user, calls, user], "'call_1' has no result"),
        ([user, calls, one, user], "'call_2' has no result"),
        ([user, calls, one, one, two, user], "'call_1'"),
        ([user, calls, one, two, user, one], "'call_1'"),
        ([user, one, user], "'call_1'"),
        ([one, user], "'call_1'"),
    ]
    for messages, reason in cases:
        with pytest.raises(BadRequestError, match=reason) as caught:
            case.dialect.read(case.write(CompletionRequest(tuple(messages), model="m2", max_tokens=9)))
        is_missing = "has no result" in reason
        assert (caught.value.field or "").startswith(case.prompt_field if is_missing else f"{case.prompt_field}[")
        assert not is_missing or caught.value.field == case.prompt_field


def check_arguments_that_are_no_object_are_refused(case: Adapter) -> None:
    for value in case.bad_arguments:
        with pytest.raises(BadRequestError) as caught:
            case.dialect.read(case.write_call(value))
        assert caught.value.field == case.arguments_path, value
        assert len(str(caught.value)) < 300


def read_or_refuse(case: Adapter, body: Body) -> None:
    """Nothing but `BadRequestError` is raised, and its message stays short."""
    for read in case.reads:
        message = ""
        try:
            read(body)
        except BadRequestError as error:
            message = str(error)
        assert len(message.encode()) < MAX_ERROR_BYTES


def check_an_error_stays_short_whatever_was_sent(case: Adapter) -> None:
    deep: JsonValue = []
    for _ in range(199):  # As deep as a body may be.
        deep = [deep]
    huge: list[JsonValue] = ["x" * 10**5, 10**5000, ["x" * 10**5] * 9, {"x": "y" * 10**5}, deep]
    for name in sorted(case.fields.all):
        for value in huge:
            read_or_refuse(case, case.body | {name: value})
            assert name in case.fields.unbounded or case.refuse(**{name: value}).field
    assert len(str(case.refuse(**{"x" * 10**5: 1}))) < MAX_ERROR_BYTES


@given(data=st.data())
def check_any_object_is_read_or_refused(case: Adapter, data: st.DataObject) -> None:
    known = data.draw(st.dictionaries(st.sampled_from(sorted(case.fields.all)), json_values))
    other: Body = {data.draw(st.text(max_size=5)): data.draw(json_values)}
    for body in (known, case.body | known, other, case.body | other):
        read_or_refuse(case, body)


@given(seed=st.integers(0, 2**32))
def check_any_change_of_a_good_request_is_read_or_refused(case: Adapter, seed: int) -> None:
    case.dialect.read(case.full)
    chance = random.Random(seed)
    for _ in range(NUM_MUTATIONS):
        read_or_refuse(case, mutated(case.full, chance))


# -- responses --------------------------------------------------------------------------------------------------------


@given(data=st.data(), usage=usages, num_bytes=st.sampled_from([97, 1000, 10**6]))
def check_an_answer_is_the_same_whole_streamed_and_resent(
    case: Adapter, data: st.DataObject, usage: Usage, num_bytes: int
) -> None:
    """However the text is cut into pieces, the samples interleaved, and the bytes cut into packets."""
    outputs = data.draw(drawn_outputs(case))
    options = data.draw(case.options) | ({"n": len(outputs)} if case.has_samples else {})
    usage = replace(usage, num_cached=min(usage.num_cached, usage.num_prompt))
    requests = serve(case, outputs, usage, data.draw(arrivals(outputs)), num_bytes)
    whole, streamed = case.whole(options), case.streamed(options)
    assert [request.is_streamed for request in requests] == [False, True]
    has_tokens = requests[0].num_top_logprobs is not None and case.shows_every_token
    heard = tuple(_heard(case, output, has_tokens=has_tokens) for output in outputs)
    expected = Received(ID, "m2", CREATED_S if case.has_created else None, heard, usage)
    assert whole == expected
    # A stream without tokens does not show that logprobs were asked for.
    assert [one.logprobs or () for one in streamed.completions] == [one.logprobs or () for one in heard]
    sent = tuple(replace(one, logprobs=same.logprobs) for one, same in zip(streamed.completions, heard, strict=True))
    has_usage = case.has_streamed_usage(requests[1])
    assert replace(streamed, completions=sent) == replace(expected, usage=usage if has_usage else None)
    if case.has_messages:
        _check_resent(case, data, outputs[0], [one.completions[0].turn for one in (whole, streamed)])


def _heard(case: Adapter, output: CompletionOutput, *, has_tokens: bool) -> Heard:
    completion, reason = output.completion, case.finish_reasons[output.ending]
    tokens = tuple(map(case.token, output.logprobs)) if has_tokens else None
    return Heard(completion.thinking, completion.content, completion.tool_calls, reason, tokens)


def _check_resent(case: Adapter, data: st.DataObject, output: CompletionOutput, turns: Sequence[object]) -> None:
    """A turn that the client sends back is the sampled message, and results, in any order, are sorted."""
    requests = serve(case, [said("So.")])
    results = [(call.id, f"result {index}") for index, call in enumerate(output.completion.tool_calls)]
    sent = data.draw(st.permutations(results))
    for turn in turns:
        case.resend(turn, sent)
        assert requests[-1].messages == (
            Message("user", "Hi"),
            output.completion.message(),
            *(Message("tool", text, tool_call_id=id) for id, text in results),
            Message("user", "Hi"),
        )


def check_text_after_a_call_comes_back_as_one_content(case: Adapter) -> None:
    call = ToolCall("look", {"at": 3}, "call_1")
    output = CompletionOutput(Completion("", "So. Yes.", (call,), (), closed=True), Ending.TOOL_CALLS)
    requests = serve(case, [output], USAGE, [(0, [ContentDelta("So."), CallFinished(call), ContentDelta(" Yes.")], [])])
    case.resend(case.streamed({}).completions[0].turn, [("call_1", "A cat.")])
    assert requests[-1].messages[1] == output.completion.message()


def check_a_call_that_never_finished_is_not_sent(case: Adapter) -> None:
    pieces: Arrivals = [(0, [ContentDelta("So")], []), (0, [CallStarted("look")], [])]
    serve(case, [said("So", Ending.LENGTH)], USAGE, pieces)
    (heard,) = case.streamed({}).completions
    assert (heard.content, heard.calls) == ("So", ())


def check_endings_have_the_vendors_names(case: Adapter) -> None:
    """Beside a text that must arrive exactly: white space at both ends, a line separator, quotes, an emoji."""
    text = ' \n So "said"\\ \u2028 💥 \n'
    assert case.finish_reasons.keys() == set(Ending)
    for ending, name in case.finish_reasons.items():
        serve(case, [said(text, ending)], USAGE, [(0, [ContentDelta(text)], [])])
        heard = [received.completions[0] for received in (case.whole({}), case.streamed({}))]
        assert [(one.finish_reason, one.content) for one in heard] == [(name, text)] * 2, ending


# -- errors -----------------------------------------------------------------------------------------------------------


def check_the_client_raises_its_own_errors(case: Adapter) -> None:
    assert {error.status for error in case.errors} >= {400, 401, 403, 404, 413, 429, 500, 503}
    for error in case.errors:
        body = case.dialect.error(error.status, "this cannot be", case.prompt_field)
        case.wire.handle = lambda _, status=error.status, body=body: httpx2.Response(status, json=body)  # type: ignore[misc]
        with pytest.raises(error.raised, match="this cannot be") as caught:
            case.whole({})
        kind, path, code = case.details(caught.value)
        assert (kind, code) == (error.kind, error.code), error.status
        assert path in (case.prompt_field, None)


def check_an_error_reaches_the_client_at_any_time(case: Adapter) -> None:
    events: list[Event] = [ThinkingDelta("Hm"), ContentDelta("So"), ContentDelta(" so")]
    events = events if case.has_messages else events[1:]
    texts = [event.text for event in events if isinstance(event, ContentDelta)]
    for num_events in range(len(events) + 1):

        def fail(body: Mapping[str, JsonValue], num_events: int = num_events) -> httpx2.Response:
            stream = case.dialect.stream(case.dialect.read(body), ID, CREATED_S)
            sent = [stream.begin(3, 0), *(stream.piece(0, [event], []) for event in events[:num_events])]
            return streamed(iter([*sent, stream.fail(503, GONE)]))

        case.wire.handle = fail
        num_texts = max(num_events - (len(events) - len(texts)), 0)
        text, message = case.stream_until_error()
        assert text == "".join(texts[:num_texts])
        assert GONE in message


def check_a_prompt_that_is_too_long_is_named_with_its_size(case: Adapter) -> None:
    error = case.dialect.too_long(4321, 1234)
    assert error.field == case.prompt_field
    assert "4321" in str(error)
    assert "1234" in str(error)
    body = case.dialect.error(400, str(error), error.field, error.code)
    assert str(error) in json.dumps(body)
    assert error.code is None or error.code in json.dumps(body)


CONTRACT: tuple[Check, ...] = (
    check_every_field_of_the_sdk_is_decided_once,
    check_fields_take_good_values,
    check_null_is_the_same_as_absent,
    check_fields_refuse_bad_values_by_name,
    check_an_unknown_field_is_refused_with_the_near_name,
    check_a_request_is_read_as_it_was_meant,
    check_what_is_not_honoured_is_noted,
    check_an_error_stays_short_whatever_was_sent,
    check_any_object_is_read_or_refused,
    check_any_change_of_a_good_request_is_read_or_refused,
    check_an_answer_is_the_same_whole_streamed_and_resent,
    check_endings_have_the_vendors_names,
    check_the_client_raises_its_own_errors,
    check_an_error_reaches_the_client_at_any_time,
    check_a_prompt_that_is_too_long_is_named_with_its_size,
)
CONVERSATION_CONTRACT: tuple[Check, ...] = (
    check_system_messages_keep_their_positions,
    check_every_call_needs_its_one_result,
    check_arguments_that_are_no_object_are_refused,
    check_text_after_a_call_comes_back_as_one_content,
    check_a_call_that_never_finished_is_not_sent,
)
"""What a dialect promises besides, if its requests hold a conversation."""
