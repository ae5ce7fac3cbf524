"""A worker process that reads large bodies for the gateway; its argument is a socket's file descriptor.

It receives a `Setup` once, then for each request a `Head` (path and size) and the body. It sends back an `Ask` with the
body's digest, or the reason for refusing the request. Frames are a little-endian uint64 length and a pickle; both ends
are this package. The worker limits its own memory, so that parsed JSON cannot exhaust the gateway's.

Refuses prompts that cannot fit the context before they are tokenized.

A message costs at least the markers and the template text around its content: `measure_overhead` finds the number of
these tokens for each role. So more messages than the context can hold are refused by count alone. If the text, names
of tools and calls included, has so many bytes that it probably exceeds the context, it is tokenized piece by piece
until it is known to be too long; what passes is then encoded like any prompt.
"""

import json
import os
import pickle
import resource
import socket
import struct
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from m2forge.errors import FormatError
from m2forge.gateway.dialects.route import digest_of, read_ask, too_long
from m2forge.gateway.dialects.types import Ask, AskError, offered
from m2forge.gateway.history.turn import keeps_thinking
from m2forge.gateway.http.limits import Refusal
from m2forge.text.format import ChatFormat
from m2forge.text.message import Message, Role, ToolCall
from m2forge.text.tokenizer import Tokenizer

LEAST_MAX_ITEMS = 1024
"""Number of messages, tools and tool calls that a request may have whatever the context is."""
_PLAIN_BYTES = 8
"""Bytes per token that most texts stay below."""
_PIECE = 1 << 16
"""Number of characters tokenized at a time."""
_calls_of = attrgetter("tool_calls")
_SEAM = 16
"""Tokens by which a piece may exceed its share of the whole text's count, since it is cut anywhere."""


class PromptTooLongError(AskError):
    """The prompt is longer than the context; `dialects.too_long` converts it to the vendor's error."""

    def __init__(self, num_tokens: int, context: int, field: str) -> None:
        super().__init__(f"the text is more than {num_tokens} tokens long and the context {context}; send less", field)
        self.num_tokens = num_tokens


@dataclass(frozen=True, slots=True)
class PromptSizes:
    """Computes lower bounds of a prompt's size; picklable."""

    tokenizer: Tokenizer
    context: int
    max_items: int
    """Maximum messages, tools and tool calls of one request together."""
    has_thinking: bool
    overhead: Mapping[Role, int]
    """Minimum number of tokens of a message, by role."""

    @classmethod
    def of(cls, format: ChatFormat, context: int, max_items: int | None) -> "PromptSizes":
        """`max_items`: None derives it from the context and the cheapest message."""
        overhead = measure_overhead(format)
        if max_items is None:
            max_items = max(LEAST_MAX_ITEMS, context // min((cost for cost in overhead.values() if cost), default=1))
        return cls(format.tokenizer, context, max_items, keeps_thinking(format), overhead)

    def check_counts(self, ask: Ask) -> None:
        """Raises AskError for more messages than the context holds, or more items than one request may have."""
        num_tokens = 0
        # Most conversations fit even if every message cost the maximum: for those, roles need not be checked.
        if len(ask.messages) * max(self.overhead.values()) > self.context:
            num_tokens = sum(self.overhead[message.role] for message in ask.messages)
        if isinstance(ask.prompt, tuple):
            num_tokens = len(ask.prompt)
        if num_tokens > self.context:
            raise self._too_long(ask, num_tokens)
        tools = offered(ask)
        num_items = len(ask.messages) + len(tools) + sum(map(len, map(_calls_of, ask.messages)))
        if num_items > self.max_items:
            raise AskError(
                f"the request has {num_items} messages, tools and calls, expected at most {self.max_items}; send "
                "fewer, or raise gateway.max_items",
                "messages" if len(tools) < self.max_items else "tools",
            )

    def needs_count(self, ask: Ask, num_body_bytes: int) -> bool:
        """Return whether the text has so many bytes that it probably exceeds the context."""
        most_bytes = _PLAIN_BYTES * self.context
        return num_body_bytes > most_bytes and sum(len(text.encode()) for text in self._texts(ask)) > most_bytes

    def check_text(self, ask: Ask) -> None:
        """Raises AskError if the text is longer than the context."""
        num_tokens = 0
        for text in self._texts(ask):
            for start in range(0, len(text), _PIECE):
                piece = text[start : start + _PIECE]
                # Each token has at least one byte, so a short text has no more tokens than the seam.
                if len(piece) * 4 > _SEAM:
                    num_tokens += max(0, len(self.tokenizer.encode(piece)) - _SEAM)
                if num_tokens > self.context:
                    raise self._too_long(ask, num_tokens)

    def _too_long(self, ask: Ask, num_tokens: int) -> "PromptTooLongError":
        return PromptTooLongError(num_tokens, self.context, "messages" if ask.prompt is None else "prompt")

    def _texts(self, ask: Ask) -> Iterator[str]:
        if isinstance(ask.prompt, str):
            yield ask.prompt
        for message in ask.messages:
            yield message.content
            if self.has_thinking:
                yield message.thinking
            if message.tool_calls:
                yield "".join(call.name + _json(call.arguments) for call in message.tool_calls)
        if tools := offered(ask):
            yield "".join(tool.name + tool.description + _json(tool.parameters) for tool in tools)


def measure_overhead(format: ChatFormat) -> dict[Role, int]:
    """Return the minimum tokens that a message of each role adds; 0 if the format cannot render it."""
    user, answer = Message("user"), Message("assistant")
    calling, result = Message("assistant", tool_calls=(ToolCall("f", {}),)), Message("tool")
    both = _marginal(format, [user, answer], [user, answer])
    alone = min(_marginal(format, [user], [user]) or both, both)
    called = _marginal(format, [user, calling, result], [calling, result])
    answered = _marginal(format, [user, Message("assistant", tool_calls=2 * calling.tool_calls), result], [result])
    assistant = min(both, called) - max(alone, answered)
    return {"system": 0, "user": alone, "assistant": max(assistant, 0), "tool": min(answered, called)}


def _marginal(format: ChatFormat, before: Sequence[Message], new: Sequence[Message]) -> int:
    """Return the minimum tokens that `new` adds, whatever its content: each text between markers counts as one."""
    try:
        counts = [_num_runs(format, messages) for messages in (before, [*before, *new])]
    except FormatError:
        return 0
    return max(counts[1] - counts[0], 0)


def _num_runs(format: ChatFormat, messages: Sequence[Message]) -> int:
    """Count special tokens and the runs of text between them: each run has at least one token."""
    special = set(format.tokenizer.special_ids.values())
    count, was_text = 0, False
    for id in format.extend((), messages).ids:
        is_text = id not in special
        count += not (is_text and was_text)
        was_text = is_text
    return count


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


NICENESS = 10
"""Lowers the worker's priority so that the event loop runs first on a busy machine."""
LENGTH = struct.Struct("<Q")
MEMORY_BYTES = 1 << 30
"""Minimum address space limit, beyond what the process uses at start."""
MEMORY_PER_BODY_BYTE = 16


@dataclass(frozen=True, slots=True)
class Setup:
    sizes: PromptSizes
    max_depth: int
    max_body_bytes: int


@dataclass(frozen=True, slots=True)
class Head:
    """Precedes each body."""

    path: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Read:
    ask: Ask
    digest: str


@dataclass(frozen=True, slots=True)
class Refused:
    """Picklable form of `Refusal` and `AskError`, whose constructors take more than a message."""

    message: str
    status: int | None = None
    field: str | None = None
    code: str | None = None

    def error(self) -> Refusal | AskError:
        return (
            AskError(self.message, self.field, self.code) if self.status is None else Refusal(self.status, self.message)
        )


@dataclass(frozen=True, slots=True)
class Failed:
    """A failure of the gateway, without the error message, which may contain prompt text."""

    kind: str
    frames: str


def read_body(setup: Setup, path: str, body: bytes) -> Read:
    """Raises `Refusal` and `AskError`. Does not check the length of the text."""
    ask = read_ask(path, body, setup.max_depth)
    try:
        setup.sizes.check_counts(ask)
    except PromptTooLongError as error:
        raise too_long(path, error.num_tokens, setup.sizes.context) from None
    return Read(ask, digest_of(path, body))


def check_text(setup: Setup, path: str, ask: Ask) -> None:
    """Raises the vendor's error if the text is longer than the context."""
    try:
        setup.sizes.check_text(ask)
    except PromptTooLongError as error:
        raise too_long(path, error.num_tokens, setup.sizes.context) from None


def _answer(setup: Setup, path: str, body: bytes) -> Read | Refused | Failed:
    try:
        read = read_body(setup, path, body)
        if setup.sizes.needs_count(read.ask, len(body)):
            check_text(setup, path, read.ask)
        return read
    except Refusal as error:
        return Refused(str(error), status=error.status)
    except AskError as error:
        return Refused(str(error), field=error.field, code=error.code)
    except MemoryError:
        return Refused("the body takes more memory than a request may; send less", status=413)
    except Exception as error:  # noqa: BLE001  (the worker continues; the gateway logs it)
        return Failed(type(error).__name__, "".join(traceback.format_tb(error.__traceback__)))


def main() -> None:
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        stream = channel.makefile("rwb")

        def receive() -> object:
            (size,) = LENGTH.unpack(_exactly(LENGTH.size))
            return pickle.loads(_exactly(size))

        def _exactly(size: int) -> bytes:
            data = stream.read(size)
            if len(data) < size:
                raise SystemExit(0)  # the gateway has exited
            return data

        setup = receive()
        assert isinstance(setup, Setup)
        os.nice(NICENESS)
        _limit_memory(max(MEMORY_BYTES, MEMORY_PER_BODY_BYTE * setup.max_body_bytes))
        while True:
            head = receive()
            assert isinstance(head, Head)
            answer = _answer(setup, head.path, _exactly(head.num_bytes))
            data = pickle.dumps(answer, pickle.HIGHEST_PROTOCOL)
            del answer
            try:
                stream.write(LENGTH.pack(len(data)))
                stream.write(data)
                stream.flush()
            except OSError:
                raise SystemExit(0) from None  # the gateway has exited


def _limit_memory(num_bytes: int) -> None:
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return  # not Linux
    used = int(statm.read_text().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = used + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))
