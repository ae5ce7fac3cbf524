"""The body of a completion request: bytes in, a `CompletionRequest` out, without blocking the event loop.

    small body        read inline
    long body         read inline, in its turn (`LoopShare`)
    large body        read in a worker process (`body_worker.py`)

A body is large if it has many bytes or many JSON values: parsing, validating and counting it would block other requests
too long. Workers start at the first large body and read one body at a time; each episode may have one body in a worker
at a time, so that one key cannot starve the others. A body that exceeds a worker's memory limit is refused. A worker
that dies or exceeds its time limit is replaced, and its request gets a retryable error. All run `read_body`, so the
result is the same.

Prompts that cannot fit the context are refused before they are tokenized. A message costs at least the markers and the
template text around its content: `measure_overhead` finds the number of these tokens for each role. So more messages
than the context can hold are refused by their count. If the bytes of the text, names of tools and calls included,
probably exceed the context, it is tokenized piece by piece until it is known to be too long; what passes is
then encoded like any prompt.
"""

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import pickle
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TypeAlias, TypeVar

import numpy as np

from m2forge.errors import EngineError, FormatError
from m2forge.gateway.dialects.anthropic.messages import MESSAGES
from m2forge.gateway.dialects.openai.chat import CHAT
from m2forge.gateway.dialects.openai.completions import COMPLETIONS
from m2forge.gateway.dialects.openai.responses import RESPONSES
from m2forge.gateway.dialects.types import (
    READ_DEFAULTS,
    BadRequestError,
    CompletionRequest,
    Dialect,
    ReadOptions,
    UnknownItemError,
    offered,
)
from m2forge.gateway.history.turn import keeps_thinking
from m2forge.gateway.http.limits import HTTPError, parse_body
from m2forge.records import JsonValue
from m2forge.text.format import ChatFormat
from m2forge.text.message import Message, Role, ToolCall
from m2forge.text.tokenizer import Tokenizer

DIALECTS: Mapping[str, Dialect] = {dialect.path: dialect for dialect in (CHAT, RESPONSES, COMPLETIONS, MESSAGES)}
"""The dialects by request path."""
T = TypeVar("T")
Items: TypeAlias = Mapping[str, JsonValue]
"""Items of earlier responses by id."""

LONG_BYTES = 16 << 10
"""Requests with shorter bodies run without taking turns."""
SMALL_BYTES = 128 << 10
SMALL_VALUES = 8192
"""Maximum number of JSON delimiters in a body that is not large; a message of a conversation has about ten."""
WORKER_S = 30.0
"""Seconds after which a worker that is still reading a body is killed."""
LENGTH = struct.Struct("<Q")
"""Precedes each frame between the gateway and a worker."""
FREE_S = 0.005
"""Seconds that a turn in a conversation of a few hundred messages takes."""
PAUSES = 7.0
MAX_PAUSE_S = 0.5
LEAST_MAX_ITEMS = 1024
"""Number of messages, tools and tool calls that a request may have whatever the context is."""
_PLAIN_BYTES = 8
"""Bytes per token that most texts stay below."""
_PIECE_CHARS = 1 << 16
"""Number of characters tokenized at a time."""
_SEAM = 16
"""Tokens by which a piece may exceed its share of the text's count, since it is cut anywhere."""
_DIGEST_LENGTH = 32
_PIECE_BYTES = 256 << 10
"""Number of bytes sent to a worker at a time."""
_BRACKET_BIT = ord("[") ^ ord("{")
_PASSED_ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "TMPDIR", "VIRTUAL_ENV")
"""Environment variables that workers inherit; others are withheld because they may contain API keys."""

_calls_of = attrgetter("tool_calls")
_log = logging.getLogger(__name__)


# -- refusing what cannot fit -----------------------------------------------------------------------------------------


class PromptTooLongError(BadRequestError):
    """The prompt is longer than the context; `body.too_long` converts it to the vendor's error."""

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

    def check_counts(self, request: CompletionRequest) -> None:
        """Raises BadRequestError for more messages than the context holds, or more items than one request may have."""
        num_tokens = 0
        # Most conversations fit even if every message cost the maximum: for those, roles need not be checked.
        if len(request.messages) * max(self.overhead.values()) > self.context:
            num_tokens = sum(self.overhead[message.role] for message in request.messages)
        if isinstance(request.prompt, tuple):
            num_tokens = len(request.prompt)
        if num_tokens > self.context:
            raise self._too_long(request, num_tokens)
        tools = offered(request)
        num_items = len(request.messages) + len(tools) + sum(map(len, map(_calls_of, request.messages)))
        if num_items > self.max_items:
            raise BadRequestError(
                f"the request has {num_items} messages, tools and calls, expected at most {self.max_items}; send "
                "fewer, or raise gateway.max_items",
                "messages" if len(tools) < self.max_items else "tools",
            )

    def needs_count(self, request: CompletionRequest, num_body_bytes: int) -> bool:
        """Return whether the bytes of the text probably exceed the context."""
        most_bytes = _PLAIN_BYTES * self.context
        return num_body_bytes > most_bytes and sum(len(text.encode()) for text in self._texts(request)) > most_bytes

    def check_text(self, request: CompletionRequest) -> None:
        """Raises BadRequestError if the text is longer than the context."""
        num_tokens = 0
        for text in self._texts(request):
            for start in range(0, len(text), _PIECE_CHARS):
                piece = text[start : start + _PIECE_CHARS]
                # Each token has at least one byte, so a short text has no more tokens than the seam.
                if len(piece) * 4 > _SEAM:
                    num_tokens += max(0, len(self.tokenizer.encode(piece)) - _SEAM)
                if num_tokens > self.context:
                    raise self._too_long(request, num_tokens)

    def _too_long(self, request: CompletionRequest, num_tokens: int) -> "PromptTooLongError":
        return PromptTooLongError(num_tokens, self.context, "messages" if request.prompt is None else "prompt")

    def _texts(self, request: CompletionRequest) -> Iterator[str]:
        if isinstance(request.prompt, str):
            yield request.prompt
        for message in request.messages:
            yield message.content
            if self.has_thinking:
                yield message.thinking
            if message.tool_calls:
                yield "".join(call.name + _json(call.arguments) for call in message.tool_calls)
        if tools := offered(request):
            yield "".join(tool.name + tool.description + _json(tool.parameters) for tool in tools)


def measure_overhead(format: ChatFormat) -> dict[Role, int]:
    """Return the minimum tokens that a message of each role adds; 0 if the format cannot render it."""
    user, answer = Message("user"), Message("assistant")
    calling, result = Message("assistant", tool_calls=(ToolCall("f", {}),)), Message("tool")
    both = _marginal(format, [user, answer], [user, answer])
    user_only = min(_marginal(format, [user], [user]) or both, both)
    called = _marginal(format, [user, calling, result], [calling, result])
    answered = _marginal(format, [user, Message("assistant", tool_calls=2 * calling.tool_calls), result], [result])
    assistant = min(both, called) - max(user_only, answered)
    return {"system": 0, "user": user_only, "assistant": max(assistant, 0), "tool": min(answered, called)}


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


# -- what the gateway and a worker exchange ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Setup:
    sizes: PromptSizes
    max_depth: int
    max_body_bytes: int
    image_placeholder: str = READ_DEFAULTS.image_placeholder


@dataclass(frozen=True, slots=True)
class Head:
    """Precedes each body."""

    path: str
    num_bytes: int
    items: Items


@dataclass(frozen=True, slots=True)
class Read:
    request: CompletionRequest
    digest: str


@dataclass(frozen=True, slots=True)
class Refused:
    """Picklable form of `HTTPError` and `BadRequestError`, whose constructors take more than a message."""

    message: str
    status: int | None = None
    field: str | None = None
    code: str | None = None
    unknown_items: tuple[str, ...] = ()

    def error(self) -> HTTPError | BadRequestError:
        if self.unknown_items:
            return UnknownItemError(self.message, self.field, self.unknown_items)
        return (
            BadRequestError(self.message, self.field, self.code)
            if self.status is None
            else HTTPError(self.status, self.message)
        )


@dataclass(frozen=True, slots=True)
class Failed:
    """A failure of the gateway, without the error message, which may contain prompt text."""

    kind: str
    frames: str


# -- reading a body, in the gateway or in a worker --------------------------------------------------------------------


def read_body(setup: Setup, path: str, body: bytes, items: Items = READ_DEFAULTS.items) -> Read:
    """Raises `HTTPError` and `BadRequestError`. Does not check the length of the text."""
    request = read_request(path, body, setup.max_depth, ReadOptions(setup.image_placeholder, items))
    try:
        setup.sizes.check_counts(request)
    except PromptTooLongError as error:
        raise too_long(path, error.num_tokens, setup.sizes.context) from None
    return Read(request, digest_of(path, body))


def check_text(setup: Setup, path: str, request: CompletionRequest) -> None:
    """Raises the vendor's error if the text is longer than the context."""
    try:
        setup.sizes.check_text(request)
    except PromptTooLongError as error:
        raise too_long(path, error.num_tokens, setup.sizes.context) from None


def read_request(path: str, body: bytes, max_depth: int, options: ReadOptions) -> CompletionRequest:
    """Raises `HTTPError` if the body is not a JSON object and `BadRequestError` if its dialect refuses it."""
    read = MESSAGES.read_count if path == MESSAGES.count_path else DIALECTS[path].read
    return read(parse_body(body, max_depth), options)


def digest_of(path: str, body: bytes) -> str:
    """Return a hash that identifies a request within its episode."""
    hashed = hashlib.sha256(b"%b " % path.encode())
    hashed.update(body)
    return hashed.hexdigest()[:_DIGEST_LENGTH]


def too_long(path: str, num_tokens: int, context: int) -> BadRequestError:
    """Return the vendor's error for a prompt of at least `num_tokens`, on which its clients truncate their history."""
    return DIALECTS.get(path, MESSAGES).too_long(num_tokens, context)


# -- the event loop's share -------------------------------------------------------------------------------------------


class LoopShare:
    """Limits the share of the event loop that long requests may take, however many arrive.

    Their work cannot be interrupted, so it runs in pieces, one at a time and in order of arrival, and the loop serves
    other requests between two pieces. A piece that took t seconds, more than `FREE_S`, is followed by a pause of
    `PAUSES` * (t - `FREE_S`), at most `MAX_PAUSE_S`, while other requests are in flight. A short piece with no other
    waiting costs no extra iteration of the loop.
    """

    def __init__(self) -> None:
        self.num_requests = 0
        """Number of requests in flight in the gateway, short ones included; the gateway updates it."""
        self._is_busy = False
        """Whether a piece or the pause after it is running, or the next piece was woken."""
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def run(self, work: Callable[[], T]) -> T:
        """Run one piece when it is its turn."""
        if self._is_busy:
            await self._wait()
        self._is_busy = True
        start_s = time.monotonic()
        try:
            return work()
        finally:
            self._end(time.monotonic() - start_s)

    async def _wait(self) -> None:
        woken = asyncio.get_running_loop().create_future()
        self._waiting.append(woken)
        try:
            await woken
        except asyncio.CancelledError:
            if woken.done() and not woken.cancelled():
                self._wake_next()  # wake the next piece instead of this one
            raise

    def _end(self, took_s: float) -> None:
        is_long = took_s > FREE_S
        if not is_long and not self._waiting:
            self._is_busy = False
            return
        has_others = self.num_requests > 1
        pause_s = min(PAUSES * (took_s - FREE_S), MAX_PAUSE_S) if is_long and has_others else 0.0
        # Even without a pause the loop runs once, so that it can serve other events.
        asyncio.get_running_loop().call_later(pause_s, self._wake_next)

    def _wake_next(self) -> None:
        while self._waiting:
            woken = self._waiting.popleft()
            if not woken.done():
                woken.set_result(None)
                return
        self._is_busy = False


# -- choosing where it is read ----------------------------------------------------------------------------------------


def is_large(body: bytes) -> bool:
    if len(body) > SMALL_BYTES:
        return True
    if len(body) <= SMALL_VALUES:
        return False  # each value takes at least one byte
    # Runs for every body, so it compares many bytes at once: bytes.count stops at each match.
    signs = np.frombuffer(body, np.uint8)
    num_parted = np.count_nonzero(signs == ord(",")) + np.count_nonzero(signs == ord(":"))
    # The two opening brackets differ in one bit.
    return bool(num_parted + np.count_nonzero((signs | _BRACKET_BIT) == ord("{")) > SMALL_VALUES)


class Bodies:
    def __init__(self, setup: Setup, num_workers: int, share: LoopShare) -> None:
        self._setup, self._share = setup, share
        self._idle: list[_Worker | None] = [None] * num_workers
        """Idle workers; None is a worker that has not been started."""
        self._slots = asyncio.Semaphore(num_workers)

    async def read(
        self,
        path: str,
        body: bytes,
        lock: asyncio.Lock,
        find_items: Callable[[Sequence[str]], Items] = lambda ids: READ_DEFAULTS.items,
    ) -> Read:
        """Raises `HTTPError` and `BadRequestError`. `lock` is the episode's lock, held while a worker reads;
        `find_items` returns the episode's items with the given ids, for a body that refers to some, which is then read
        again."""
        try:
            return await self._read(path, body, lock, {})
        except UnknownItemError as error:
            items = find_items(error.ids)
            if len(items) < len(set(error.ids)):
                raise
        return await self._read(path, body, lock, items)

    async def _read(self, path: str, body: bytes, lock: asyncio.Lock, items: Items) -> Read:
        if is_large(body):
            async with lock:
                return await self._read_apart(path, body, items)
        if len(body) <= LONG_BYTES:
            read = read_body(self._setup, path, body, items)
        else:
            read = await self._share.run(lambda: read_body(self._setup, path, body, items))
        if self._setup.sizes.needs_count(read.request, len(body)):
            await asyncio.to_thread(check_text, self._setup, path, read.request)
        return read

    async def close(self) -> None:
        """Kill the idle workers; a busy worker ends when its channel closes."""
        for worker in self._idle:
            if worker is not None:
                worker.end()
        self._idle = [None] * len(self._idle)
        # The loop closes their channels in its next iteration.
        await asyncio.sleep(0)

    async def _read_apart(self, path: str, body: bytes, items: Items) -> Read:
        async with self._worker() as worker:
            try:
                async with asyncio.timeout(WORKER_S):
                    data = await worker.read(path, body, items)
            except TimeoutError:
                # The machine may be overloaded, so the request is not to blame.
                raise EngineError(
                    f"reading the body took longer than {WORKER_S:g} s; retry the request, or send less"
                ) from None
            except (OSError, EOFError) as error:
                _log.warning("a worker that read a body of %d bytes died (%s)", len(body), type(error).__name__)
                raise EngineError("the process that read the body died; retry the request") from None
        result: Read | Refused | Failed = await self._share.run(lambda: pickle.loads(data))
        if isinstance(result, Failed):
            _log.error("a body: %s\n%s", result.kind, result.frames)
            raise EngineError(f"the gateway failed ({result.kind}); retry the request")
        if isinstance(result, Refused):
            raise result.error()
        return result

    @contextlib.asynccontextmanager
    async def _worker(self) -> "AsyncIterator[_Worker]":
        """Yield a worker exclusively. If anything raises, the worker is killed, since it may still be reading."""
        async with self._slots:
            worker = self._idle.pop()
            try:
                if worker is None:
                    worker = await self._start()
                yield worker
            except BaseException:
                if worker is not None:
                    worker.end()
                worker = None
                raise
            finally:
                self._idle.append(worker)

    async def _start(self) -> "_Worker":
        try:
            async with asyncio.timeout(WORKER_S):
                return await _Worker.start(self._setup)
        except (OSError, TimeoutError) as error:
            _log.warning("a worker that reads bodies did not start (%s)", type(error).__name__)
            raise EngineError("the process that reads bodies did not start; retry the request") from None


class _Worker:
    def __init__(
        self, process: "subprocess.Popen[bytes]", reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process, self._reader, self._writer = process, reader, writer

    @classmethod
    async def start(cls, setup: Setup) -> "_Worker":
        ours, theirs = socket.socketpair()
        environment = {name: os.environ[name] for name in _PASSED_ENVIRONMENT if name in os.environ}
        environment |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TOKENIZERS_PARALLELISM": "false"}
        command = [sys.executable, "-c", "from m2forge.gateway.calls.body_worker import main; main()"]
        with theirs:
            process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                env=environment,
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        worker = cls(process, *await asyncio.open_connection(sock=ours))
        try:
            await worker._send(pickle.dumps(setup, pickle.HIGHEST_PROTOCOL), is_frame=True)
        except BaseException:
            worker.end()
            raise
        return worker

    async def read(self, path: str, body: bytes, items: Items) -> bytes:
        """Return the worker's pickled result."""
        await self._send(pickle.dumps(Head(path, len(body), items)), is_frame=True)
        await self._send(body)
        (size,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
        return await self._reader.readexactly(size)

    async def _send(self, data: bytes, *, is_frame: bool = False) -> None:
        if is_frame:
            self._writer.write(LENGTH.pack(len(data)))
        for start in range(0, len(data), _PIECE_BYTES):
            self._writer.write(memoryview(data)[start : start + _PIECE_BYTES])
            await self._writer.drain()

    def end(self) -> None:
        self._writer.transport.abort()  # drops unsent data
        self._process.kill()
        # Reaped in a thread: the kernel may take a while to free the memory.
        threading.Thread(target=self._process.wait, daemon=True).start()
