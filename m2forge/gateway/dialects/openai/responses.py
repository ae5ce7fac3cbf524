"""OpenAI's Responses: `POST /v1/responses`. `responses_input.py` reads the request; this file builds the response.

    reasoning       the thinking, as text or as summary; with `encrypted_content` if the client requested it
    message         the text
    function_call   one per tool call; a custom_tool_call if the tool was offered as one that takes a text

An empty completion becomes a message with empty text, so that a client that sends items back sends an assistant turn.
As server-sent events:

    response.created, response.in_progress
    response.output_item.added … response.output_item.done               for each item, one after the other
        reasoning       response.content_part.added, response.reasoning_text.delta…, .done, response.content_part.done
                        or response.reasoning_summary_part.added, …, as a summary
        message         response.content_part.added, response.output_text.delta…, .done, response.content_part.done
        function_call   response.function_call_arguments.delta, .done: the arguments in one piece, once complete
                        or response.custom_tool_call_input.delta, .done
    response.completed, response.incomplete                              or error and response.failed, at any time

`sequence_number` counts the events from 0. A tool call is sent when it is complete, so a call that the model did not
finish is never sent. Text after a call becomes its own message, whose id names the same response.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from m2forge.gateway.dialects.opaque_thinking import encode_thinking
from m2forge.gateway.dialects.openai.chat import TOO_LONG, arguments_text, error_body, quote, token_bodies
from m2forge.gateway.dialects.openai.responses_input import CUSTOM_ARGUMENT, FORMS, HIDDEN, item_id, read_request
from m2forge.gateway.dialects.types import (
    READ_DEFAULTS,
    BadRequestError,
    CompletionOutput,
    CompletionRequest,
    Ending,
    ReadOptions,
    TokenLogprob,
    Usage,
)
from m2forge.records import JsonValue
from m2forge.text.message import ToolCall
from m2forge.text.parser import CallFinished, ContentDelta, Event, ThinkingDelta

CUT_OFF = frozenset({Ending.LENGTH, Ending.ABORT})
"""Endings of an incomplete response; the vendor has no status for one that the engine aborted."""


def response_body(request: CompletionRequest, id: str, created_s: int) -> dict[str, JsonValue]:
    """Encode the fields that are known from the start."""
    body: dict[str, JsonValue] = {"id": id, "object": "response", "created_at": created_s}
    return body | {name: value for name, value in request.echo.items() if name not in HIDDEN}


def state_body(
    status: str,
    output: Sequence[JsonValue] = (),
    usage: Usage | None = None,
    *,
    incomplete: JsonValue = None,
    error: JsonValue = None,
) -> dict[str, JsonValue]:
    """Encode the fields that change while the response is generated."""
    rendered = None if usage is None else usage_body(usage)
    return {"status": status, "error": error, "incomplete_details": incomplete, "output": output, "usage": rendered}


def ending_body(ending: Ending, output: Sequence[JsonValue], usage: Usage) -> dict[str, JsonValue]:
    if ending in CUT_OFF:
        return state_body("incomplete", output, usage, incomplete={"reason": "max_output_tokens"})
    return state_body("completed", output, usage)


def usage_body(usage: Usage) -> dict[str, JsonValue]:
    return {
        "input_tokens": usage.num_prompt,
        "input_tokens_details": {"cached_tokens": usage.num_cached, "cache_write_tokens": 0},
        "output_tokens": usage.num_sampled,
        "output_tokens_details": {"reasoning_tokens": usage.num_thinking},
        "total_tokens": usage.num_prompt + usage.num_sampled,
    }


def items_body(request: CompletionRequest, id: str, output: CompletionOutput) -> list[dict[str, JsonValue]]:
    """Encode all items. If the completion was cut off, the last item is incomplete unless it is a tool call."""
    completion = output.completion
    tokens = SpokenTokens()
    tokens.add(output.logprobs)
    tokens.take(completion.thinking)
    items: list[dict[str, JsonValue]] = []
    if completion.thinking:
        items.append(reasoning_body(request, item_id("rs", id, 0), completion.thinking, "completed"))
    if completion.content or not (items or completion.tool_calls):
        logprobs = token_bodies(tokens.take(completion.content))
        items.append(message_body(item_id("msg", id, len(items)), completion.content, logprobs, "completed"))
    if output.ending in CUT_OFF and not completion.tool_calls:
        items[-1]["status"] = "incomplete"
    items.extend(
        SentCall(request, id, index, call).body("completed") for index, call in enumerate(completion.tool_calls)
    )
    return items


def reasoning_body(request: CompletionRequest, id: str, thinking: str | None, status: str) -> dict[str, JsonValue]:
    """`thinking` is None before any was sampled."""
    body: dict[str, JsonValue] = {"id": id, "type": "reasoning", "summary": [], "status": status}
    if thinking is None:
        return body
    if request.echo.get("is_summarised"):
        body["summary"] = [{"type": "summary_text", "text": thinking}]
    else:
        body["content"] = [{"type": "reasoning_text", "text": thinking}]
    if request.echo.get("is_sealed"):
        body["encrypted_content"] = encode_thinking(thinking)
    return body


def message_body(id: str, text: str | None, logprobs: Sequence[JsonValue], status: str) -> dict[str, JsonValue]:
    """`text` is None before any was sampled."""
    content: list[JsonValue] = [] if text is None else [text_body(text, logprobs)]
    return {"id": id, "type": "message", "role": "assistant", "status": status, "content": content}


def text_body(text: str, logprobs: Sequence[JsonValue]) -> dict[str, JsonValue]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


class SentCall:
    """A tool call in the form in which its tool was offered."""

    def __init__(self, request: CompletionRequest, response_id: str, index: int, call: ToolCall) -> None:
        """`index`: among the calls of the response."""
        forms = cast("Mapping[str, tuple[str | None, str, bool]]", request.echo.get(FORMS) or {})
        self._namespace, self.name, self.is_custom = forms.get(call.name, (None, call.name, False))
        self.id, self._call_id = item_id("ctc" if self.is_custom else "fc", response_id, index), call.id
        text = call.arguments.get(CUSTOM_ARGUMENT)
        self.text = text if self.is_custom and isinstance(text, str) else arguments_text(call)
        """The text of a custom tool, or the arguments' JSON."""
        self.field = "input" if self.is_custom else "arguments"
        self.event = "response.custom_tool_call_input" if self.is_custom else "response.function_call_arguments"

    def body(self, status: str) -> dict[str, JsonValue]:
        """Its text is empty until it is completed."""
        kind = "custom_tool_call" if self.is_custom else "function_call"
        body: dict[str, JsonValue] = {"id": self.id, "type": kind, "call_id": self._call_id, "name": self.name}
        body |= {self.field: self.text if status == "completed" else "", "status": status}
        return body | ({"namespace": self._namespace} if self._namespace else {})


class SpokenTokens:
    """Finds the sampled tokens of a piece of text, since a response contains logprobs of its text only.

    Skips tokens of tags, thinking and tool calls in between. Returns no tokens for text that is not found, which
    happens when invalid UTF-8 was replaced.
    """

    def __init__(self) -> None:
        self._tokens: list[TokenLogprob] = []
        self._num_passed = 0
        """Number of bytes of the first token that were already matched; that token is not returned again."""

    def add(self, tokens: Iterable[TokenLogprob]) -> None:
        self._tokens.extend(tokens)

    def take(self, text: str) -> list[TokenLogprob]:
        """Return the tokens of the next text; each token once."""
        data = text.encode(errors="replace")
        start = b"".join(token.text for token in self._tokens).find(data, self._num_passed)
        if start < 0 or not data:
            return []
        taken, end, position = [], start + len(data), 0
        for index, token in enumerate(self._tokens):
            begin, position = position, position + len(token.text)
            if position > start and begin < end and (index or not self._num_passed):
                taken.append(token)
            if position > end:
                self._tokens, self._num_passed = self._tokens[index:], max(end - begin, 0)
                return taken
        self._tokens, self._num_passed = [], 0
        return taken


@dataclass(frozen=True, slots=True)
class _Form:
    """Event and part names for an item's text."""

    part: str
    """Type of the content part."""
    part_event: str
    text_event: str
    index: str


_WORDS = _Form("output_text", "response.content_part", "response.output_text", "content_index")
_THINKING = _Form("reasoning_text", "response.content_part", "response.reasoning_text", "content_index")
_SUMMARY = _Form("summary_text", "response.reasoning_summary_part", "response.reasoning_summary_text", "summary_index")


@dataclass(slots=True)
class _Item:
    """An item whose text is still arriving."""

    form: _Form
    id: str
    location: str
    """JSON fields that locate its text: item id, output index and part index."""
    texts: list[str] = field(default_factory=list)
    logprobs: list[JsonValue] = field(default_factory=list)


class ResponsesStream:
    """See `types.Stream`."""

    def __init__(self, request: CompletionRequest, id: str, created_s: int) -> None:
        self._request, self._id = request, id
        self._response = quote(response_body(request, id, created_s))[:-1]
        """JSON of the constant fields without the closing brace, encoded once and sent three times."""
        self._thinking = _SUMMARY if request.echo.get("is_summarised") else _THINKING
        self._tokens = SpokenTokens() if request.num_top_logprobs is not None else None
        self._num_events = 0
        self._output: list[JsonValue] = []
        """Completed items."""
        self._num_calls = 0
        self._item: _Item | None = None
        self._ending = Ending.STOP

    def begin(self, num_prompt: int, num_cached: int) -> bytes:
        response = self._response_json(state_body("in_progress"))
        return self._event("response.created", response) + self._event("response.in_progress", response)

    def piece(self, sample: int, events: Sequence[Event], logprobs: Sequence[TokenLogprob]) -> bytes:
        if self._tokens is not None:
            self._tokens.add(logprobs)
        return b"".join(map(self._one, events))

    def end_sample(self, sample: int, output: CompletionOutput) -> bytes:
        self._ending = output.ending
        opened = b"" if self._item is not None or self._output else self._open(_WORDS)
        return opened + self._close("incomplete" if output.ending in CUT_OFF else "completed")

    def finish(self, usage: Usage) -> bytes:
        body = ending_body(self._ending, self._output, usage)
        return self._event(f"response.{body['status']}", self._response_json(body))

    def fail(self, status: int, message: str) -> bytes:
        code = "rate_limit_exceeded" if status == 429 else "invalid_prompt" if status < 500 else "server_error"
        error: dict[str, JsonValue] = {"code": code, "message": message}
        rendered = self._event("error", f'"code":{quote(code)},"message":{quote(message)},"param":null')
        return rendered + self._event(
            "response.failed", self._response_json(state_body("failed", self._output, error=error))
        )

    # -- items --------------------------------------------------------------------------------------------------------

    def _one(self, event: Event) -> bytes:
        if isinstance(event, ContentDelta):
            return self._more(_WORDS, event.text)
        if isinstance(event, ThinkingDelta):
            return self._more(self._thinking, event.text)
        return self._call(event.call) if isinstance(event, CallFinished) else b""

    def _more(self, form: _Form, text: str) -> bytes:
        item, opened = self._item, b""
        if item is None or item.form is not form:
            opened = self._open(form)
            item = self._item
            assert item is not None
        item.texts.append(text)
        fields = f'{item.location},"delta":{quote(text)}'
        if form is _WORDS:
            fields = f'{fields},"logprobs":{self._logprobs(item, text)}'
        elif self._tokens is not None:
            self._tokens.take(text)
        return opened + self._event(f"{form.text_event}.delta", fields)

    def _logprobs(self, item: _Item, text: str) -> str:
        if self._tokens is None:
            return "[]"
        rendered = token_bodies(self._tokens.take(text))
        item.logprobs.extend(rendered)
        return quote(rendered)

    def _open(self, form: _Form) -> bytes:
        closed = self._close("completed")
        index = len(self._output)
        id = item_id("msg" if form is _WORDS else "rs", self._id, index)
        self._item = _Item(form, id, f'"item_id":{quote(id)},"output_index":{index},"{form.index}":0')
        if form is _WORDS:
            body, part = message_body(id, None, [], "in_progress"), text_body("", [])
        else:
            body, part = reasoning_body(self._request, id, None, "in_progress"), {"type": form.part, "text": ""}
        added = self._event("response.output_item.added", f'"output_index":{index},"item":{quote(body)}')
        return closed + added + self._event(f"{form.part_event}.added", f'{self._item.location},"part":{quote(part)}')

    def _close(self, status: str) -> bytes:
        item, self._item = self._item, None
        if item is None:
            return b""
        form, text, index = item.form, "".join(item.texts), len(self._output)
        done = f'{item.location},"text":{quote(text)}'
        if form is _WORDS:
            done = f'{done},"logprobs":{quote(item.logprobs)}'
            body, part = message_body(item.id, text, item.logprobs, status), text_body(text, item.logprobs)
        else:
            body, part = reasoning_body(self._request, item.id, text, status), {"type": form.part, "text": text}
        self._output.append(body)
        return (
            self._event(f"{form.text_event}.done", done)
            + self._event(f"{form.part_event}.done", f'{item.location},"part":{quote(part)}')
            + self._event("response.output_item.done", f'"output_index":{index},"item":{quote(body)}')
        )

    def _call(self, call: ToolCall) -> bytes:
        closed = self._close("completed")
        index, sent = len(self._output), SentCall(self._request, self._id, self._num_calls, call)
        self._num_calls += 1
        location, text = f'"item_id":{quote(sent.id)},"output_index":{index}', quote(sent.text)
        name = "" if sent.is_custom else f'"name":{quote(sent.name)},'
        begun, body = sent.body("in_progress"), sent.body("completed")
        self._output.append(body)
        return (
            closed
            + self._event("response.output_item.added", f'"output_index":{index},"item":{quote(begun)}')
            + self._event(f"{sent.event}.delta", f'{location},"delta":{text}')
            + self._event(f"{sent.event}.done", f'{location},{name}"{sent.field}":{text}')
            + self._event("response.output_item.done", f'"output_index":{index},"item":{quote(body)}')
        )

    # -- events -------------------------------------------------------------------------------------------------------

    def _response_json(self, state: dict[str, JsonValue]) -> str:
        """Encode the response in its current state as JSON."""
        return f'"response":{self._response},{quote(state)[1:]}'

    def _event(self, name: str, fields: str) -> bytes:
        number, self._num_events = self._num_events, self._num_events + 1
        return f'event: {name}\ndata: {{"type":"{name}","sequence_number":{number},{fields}}}\n\n'.encode()


class OpenAIResponses:
    path = "/v1/responses"

    def read(self, body: Mapping[str, JsonValue], options: ReadOptions = READ_DEFAULTS) -> CompletionRequest:
        return read_request(body, options)

    def response(
        self, request: CompletionRequest, id: str, created_s: int, outputs: Sequence[CompletionOutput], usage: Usage
    ) -> dict[str, JsonValue]:
        (output,) = outputs
        return response_body(request, id, created_s) | ending_body(
            output.ending, items_body(request, id, output), usage
        )

    def stream(self, request: CompletionRequest, id: str, created_s: int) -> ResponsesStream:
        return ResponsesStream(request, id, created_s)

    def error(
        self, status: int, message: str, field: str | None = None, code: str | None = None
    ) -> dict[str, JsonValue]:
        return error_body(status, message, field, code)

    def too_long(self, num_prompt: int, context: int) -> BadRequestError:
        message = (
            "Your input exceeds the context window of this model. Please adjust your input and try again. It is "
            f"{num_prompt} tokens long, the context window {context}."
        )
        return BadRequestError(message, "input", TOO_LONG)


RESPONSES = OpenAIResponses()
