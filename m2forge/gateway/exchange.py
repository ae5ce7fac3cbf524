"""Requests and responses independent of the client's dialect, and the protocol of a dialect.

    body (JSON) -> Dialect.read -> Ask -> the gateway samples -> Answer, Usage -> Dialect.answer -> body (JSON)
                                                  events, token by token       -> Stream          -> server-sent events

Dialects are pure: no HTTP, no clock, no engine. A request that they cannot honour exactly raises `AskError`, which the
gateway answers with status 400 and the vendor's error body; nothing is silently ignored.

Tool calls have their ids before a dialect sees them: `CallFinished.call` in a stream and `Completion.tool_calls` in an
`Answer` are equal, ids included. Neither contains the text that ended a completion (`stop_text`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, Protocol

from m2forge.errors import M2ForgeError
from m2forge.records import JsonValue, Sampling
from m2forge.text.completion import Completion, Event
from m2forge.text.message import Message, Tool


class AskError(M2ForgeError, ValueError):
    """A request that a dialect cannot honour: the message says what and why, the field says where."""

    def __init__(self, message: str, field: str | None = None, code: str | None = None) -> None:
        super().__init__(message, field, code)
        self.field = field
        """Path of the request's field, such as `messages[2].content`; None if the error concerns the whole body."""
        self.code = code
        """Error code by which the vendor's clients recognise the error; None if it has none."""

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of a client."""

    messages: tuple[Message, ...]
    """The conversation; empty for a raw prompt."""
    tools: tuple[Tool, ...] = ()
    prompt: str | tuple[int, ...] | None = None
    """Text or token ids to continue without a chat format; None for a conversation."""
    max_tokens: int | None = None
    """Maximum sampled tokens of each completion, thinking included; None: what the context leaves."""
    sampling: Sampling = field(default_factory=Sampling)
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


def offered(ask: Ask) -> tuple[Tool, ...]:
    """Return the tools that the model is shown: none if it may call none."""
    return ask.tools if ask.tool_choice == "auto" else ()


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
class Answer:
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

    def end_sample(self, sample: int, answer: Answer) -> bytes:
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

    def read(self, body: Mapping[str, JsonValue]) -> Ask:
        """Raises `AskError`, and nothing else, for what cannot be honoured."""
        ...

    def answer(
        self, ask: Ask, id: str, created_s: int, answers: Sequence[Answer], usage: Usage
    ) -> dict[str, JsonValue]:
        """Encode the complete response, one completion per sample, in order."""
        ...

    def stream(self, ask: Ask, id: str, created_s: int) -> Stream: ...

    def error(
        self, status: int, message: str, field: str | None = None, code: str | None = None
    ) -> dict[str, JsonValue]:
        """Encode the vendor's error body for an HTTP status."""
        ...

    def too_long(self, num_prompt: int, context: int) -> AskError:
        """Return the vendor's error for a prompt that leaves no room in the context to sample: agents recognise it and
        shorten their history."""
        ...
