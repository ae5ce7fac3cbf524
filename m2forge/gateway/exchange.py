"""What a client asks and what it is told, whatever dialect it speaks; and what a dialect is.

    body (JSON) -> Dialect.read -> Ask -> the gateway samples -> Answer, Usage -> Dialect.answer -> body (JSON)
                                                  events, token by token       -> Stream          -> server-sent events

Dialects are pure: no HTTP, no clock, no engine. A request that they cannot honour to the letter raises `AskError`,
which the gateway answers 400 with the vendor's error body; nothing is ignored in silence.

Calls have their ids before a dialect sees them: `CallFinished.call` in a stream and `Completion.tool_calls` in an
`Answer` are equal, id and all. The text that ended a completion (`stop_text`) is no part of either.
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
        """Path of the request's field, such as `messages[2].content`; None where it is the body as a whole."""
        self.code = code
        """By which the vendor's clients tell the error; None where there is none."""

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of a client."""

    messages: tuple[Message, ...]
    """The conversation; empty for a raw prompt."""
    tools: tuple[Tool, ...] = ()
    prompt: str | tuple[int, ...] | None = None
    """Text or token ids to continue as they are, without a chat format; None for a conversation."""
    max_tokens: int | None = None
    """Sampled tokens of each completion, thinking included; None: what the context leaves."""
    sampling: Sampling = field(default_factory=Sampling)
    stop_texts: tuple[str, ...] = ()
    seed: int | None = None
    num_samples: int = 1
    is_streamed: bool = False
    tool_choice: Literal["auto", "none"] = "auto"
    """Whether tools may be called. A sampled policy cannot be forced to call one, so there is nothing else."""
    num_top_logprobs: int | None = None
    """None: no log-probabilities; 0: those of the sampled tokens. Others' are not told by an engine."""
    model: str = ""
    echo: Mapping[str, JsonValue] = field(default_factory=dict)
    """Fields of the request that shape the answer and nothing else, for the dialect that read them."""


def offered(ask: Ask) -> tuple[Tool, ...]:
    """The tools that the model is shown: none if it may call none."""
    return ask.tools if ask.tool_choice == "auto" else ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request; what was sampled is counted over all its completions."""

    num_prompt: int
    num_cached: int
    """Of the prompt's, those that were not computed again."""
    num_sampled: int
    num_thinking: int
    """Of the sampled, those that were thinking."""


class Ending(StrEnum):
    """Why a completion ended, as clients are told."""

    STOP = "stop"
    """The assistant's end marker."""
    STOP_TEXT = "stop_text"
    """One of the texts that the client gave."""
    LENGTH = "length"
    """The token limit, or the end of the context."""
    TOOL_CALLS = "tool_calls"
    """The end marker, after at least one call."""
    ABORT = "abort"
    """The engine gave it up, or its time was over."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One sampled token."""

    text: bytes
    """May be part of a character."""
    logprob: float
    id: int


@dataclass(frozen=True, slots=True)
class Answer:
    """One whole completion."""

    completion: Completion
    ending: Ending
    stop_text: str | None = None
    """Which text it was, for `Ending.STOP_TEXT`."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """Of every sampled token if the client asked for them, else none."""


class Stream(Protocol):
    """Encodes one request's answer as server-sent events, in the order that the vendor's SDK expects.

    Called in this order: `begin`; `piece` as tokens come, samples interleaved; `end_sample` for each; `finish`. `fail`
    may come at any time after `begin` and ends it. Each returns the bytes to send, perhaps none.
    """

    def begin(self, num_prompt: int, num_cached: int) -> bytes: ...

    def piece(self, sample: int, events: Sequence[Event], logprobs: Sequence[TokenLogprob]) -> bytes:
        """What more is certain of a sample. All events of its parser come through here, the final ones too."""
        ...

    def end_sample(self, sample: int, answer: Answer) -> bytes:
        """The sample is over. Its text was sent already: only the ending is told."""
        ...

    def finish(self, usage: Usage) -> bytes:
        """The last events. A client that reads them may rely on the call being recorded."""
        ...

    def fail(self, status: int, message: str) -> bytes:
        """An error, after the status line said 200."""
        ...


class Dialect(Protocol):
    """How one vendor's SDK writes a request and reads an answer."""

    path: str
    """Where requests are posted, from the root: `/v1/chat/completions`."""

    def read(self, body: Mapping[str, JsonValue]) -> Ask:
        """Raises `AskError` for what cannot be honoured, and nothing else."""
        ...

    def answer(
        self, ask: Ask, id: str, created_s: int, answers: Sequence[Answer], usage: Usage
    ) -> dict[str, JsonValue]:
        """The whole answer, one completion for each sample, in order."""
        ...

    def stream(self, ask: Ask, id: str, created_s: int) -> Stream: ...

    def error(
        self, status: int, message: str, field: str | None = None, code: str | None = None
    ) -> dict[str, JsonValue]:
        """The vendor's error body for an HTTP status."""
        ...

    def too_long(self, num_prompt: int, context: int) -> AskError:
        """The vendor's own error for a prompt that leaves nothing of the context to sample: agents recognise it, and
        shorten their history."""
        ...
