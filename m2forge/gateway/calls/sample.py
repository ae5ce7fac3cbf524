"""One completion being sampled: engine chunks in; events, logprobs and finally a `CompletionOutput` out.

All sampled tokens are recorded. The client receives less: not the stop text that ended the completion, and for a raw
prompt not the stop token. A suffix of the text that may become a stop text is held back. Tool calls get their ids here,
the same in the events and in the output.
"""

import codecs
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypedDict, TypeVar, cast

import numpy as np
import numpy.typing as npt

from m2forge.errors import NotFoundError
from m2forge.gateway.dialects.types import (
    CompletionOutput,
    CompletionRequest,
    Ending,
    Stream,
    TokenLogprob,
    Usage,
    callable_tools,
)
from m2forge.gateway.episodes.journal import Answered
from m2forge.protocols import Chunk
from m2forge.records import Call, FinishReason, FloatArray, IntArray, JsonValue, RequestedSampling, Sampling
from m2forge.text.format import ChatFormat
from m2forge.text.parser import THINK_CLOSE, CallFinished, Completion, ContentDelta, Event, ThinkingDelta
from m2forge.text.tokenizer import Tokenizer
from m2forge.tree.token_tree import ExpertArray

_THINK_CLOSE = THINK_CLOSE.encode()
_Number = TypeVar("_Number", np.int32, np.float32)


class Parser(Protocol):
    def feed(self, piece: bytes) -> list[Event]: ...

    def finish(self) -> Completion: ...


class RawParser:
    """Treats everything sampled as content."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._texts: list[str] = []

    def feed(self, piece: bytes) -> list[Event]:
        return self._add(self._decoder.decode(piece))

    def finish(self) -> Completion:
        events = tuple(self._add(self._decoder.decode(b"", final=True)))
        return Completion("", "".join(self._texts), (), (), closed=True, final_events=events)

    def _add(self, text: str) -> list[Event]:
        if not text:
            return []
        self._texts.append(text)
        return [ContentDelta(text)]


class StopCutter:
    """Cuts a text at the stop text that is complete first."""

    def __init__(self, stop_texts: Sequence[str]) -> None:
        self._stops = [(text.encode(), text) for text in stop_texts]
        self._held = b""
        self.stop_text: str | None = None

    def cut(self, data: bytes) -> bytes:
        """Return the text that is final and was not returned yet."""
        if self.stop_text is not None:
            return b""
        data = self._held + data
        ends = [(at + len(stop), at, text) for stop, text in self._stops if (at := data.find(stop)) >= 0]
        if ends:
            _, at, self.stop_text = min(ends)
            self._held = b""
            return data[:at]
        keep = max((_overlap(data, stop) for stop, _ in self._stops), default=0)
        self._held = data[len(data) - keep :]
        return data[: len(data) - keep]

    def flush(self) -> bytes:
        """Return the text held back, when nothing follows."""
        held, self._held = self._held, b""
        return held


class SampleReader:
    def __init__(
        self, request: CompletionRequest, format: ChatFormat, stop_ids: Sequence[int], call_prefix: str
    ) -> None:
        self._tokenizer, self._call_prefix = format.tokenizer, call_prefix
        self._is_raw, self._stop_ids = request.prompt is not None, stop_ids
        self._parser: Parser = RawParser() if self._is_raw else format.parser(callable_tools(request))
        self._cutter = StopCutter(request.stop_texts) if request.stop_texts else None
        self._has_logprobs = request.num_top_logprobs is not None
        self._ids: list[IntArray] = []
        self._logprobs: list[FloatArray] = []
        self._versions: list[IntArray] = []
        self._experts: list[ExpertArray] = []
        self._sent_logprobs: list[TokenLogprob] = []
        self._call_ids: list[str] = []
        self.finish_reason: FinishReason | None = None
        self.finished_s = 0.0
        self.num_sampled = 0
        self.output: CompletionOutput | None = None
        """Set by `finish`."""

    def take(self, chunks: Sequence[Chunk]) -> tuple[list[Event], list[TokenLogprob]]:
        """Add the next chunks and return the events and logprobs that can be sent."""
        ids: list[int] = []
        for chunk in chunks:
            self._ids.append(chunk.ids)
            self._logprobs.append(chunk.logprobs)
            self._versions.append(chunk.versions)
            if chunk.experts is not None:
                self._experts.append(chunk.experts)
            ids += chunk.ids.tolist()
        self.num_sampled += len(ids)
        logprobs: list[TokenLogprob] = []
        if self._has_logprobs:
            drawn = zip(ids, (number for chunk in chunks for number in chunk.logprobs.tolist()), strict=True)
            logprobs = [TokenLogprob(text_of(self._tokenizer, id), logprob, id) for id, logprob in drawn]
            self._sent_logprobs += logprobs
        if self._is_raw and ids and ids[-1] in self._stop_ids:
            ids.pop()
        data = text_of(self._tokenizer, *ids)
        if self._cutter is not None:
            data = self._cutter.cut(data)
        return self._named(self._parser.feed(data)) if data else [], logprobs

    def finish(self, finish_reason: FinishReason) -> list[Event]:
        """Return the last events and set `output`."""
        events = self._named(self._parser.feed(self._cutter.flush())) if self._cutter is not None else []
        completion = self._parser.finish()
        events += self._named(list(completion.final_events))
        calls = [replace(call, id=id) for call, id in zip(completion.tool_calls, self._call_ids, strict=True)]
        completion = replace(completion, tool_calls=tuple(calls), final_events=())
        stop_text = None if self._cutter is None else self._cutter.stop_text
        self.finish_reason = finish_reason
        ending = _ending(finish_reason, has_calls=bool(calls), stop_text=stop_text)
        self.output = CompletionOutput(completion, ending, stop_text, tuple(self._sent_logprobs))
        return events

    def call(
        self,
        prompt_ids: IntArray,
        sampling: Sampling,
        requested: RequestedSampling | None,
        started_s: float,
        notices: tuple[str, ...] = (),
    ) -> Call:
        """Return the call to record."""
        assert self.finish_reason is not None
        return Call(
            prompt_ids=prompt_ids,
            response_ids=_concat(self._ids, np.int32),
            logprobs=_concat(self._logprobs, np.float32),
            versions=_concat(self._versions, np.int32),
            finish_reason=self.finish_reason,
            started_s=started_s,
            finished_s=max(self.finished_s, started_s),
            sampling=sampling,
            requested=requested,
            notices=notices,
        )

    def experts(self, num_tokens: int) -> ExpertArray | None:
        """Return the routed experts of the first `num_tokens` tokens of prompt plus completion: an engine may have run
        tokens past a stop. None if they were not requested, or the network has no experts."""
        return np.concatenate(self._experts)[:num_tokens] if self._experts else None

    def num_thinking(self) -> int:
        """Count the sampled tokens before the end-of-thinking tag, which may be one token or several; all tokens if the
        tag is missing."""
        if self.output is None or not self.output.completion.thinking:
            return 0
        ids = [id for chunk in self._ids for id in chunk.tolist()]
        close_id = self._tokenizer.special_ids.get(THINK_CLOSE)
        if close_id in ids:
            return ids.index(close_id)
        pieces = [text_of(self._tokenizer, id) for id in ids]
        end = b"".join(pieces).find(_THINK_CLOSE)
        num_bytes = 0
        for number, piece in enumerate(pieces):
            num_bytes += len(piece)
            if 0 <= end < num_bytes:
                return number
        return len(pieces)

    def _named(self, events: list[Event]) -> list[Event]:
        for index, event in enumerate(events):
            if type(event) is CallFinished:
                id = self._call_prefix + secrets.token_hex(12)
                self._call_ids.append(id)
                events[index] = CallFinished(replace(event.call, id=id))
        return events


def text_of(tokenizer: Tokenizer, *ids: int) -> bytes:
    """Decode ids to bytes. Networks have a few more ids than their tokenizers; these have no text."""
    try:
        return tokenizer.decode_bytes(ids)
    except NotFoundError:
        return b"".join(text_of(tokenizer, id) for id in ids) if len(ids) > 1 else b""


def _overlap(data: bytes, stop: bytes) -> int:
    """Return the length of the longest suffix of `data` that is a proper prefix of `stop`."""
    for size in range(min(len(stop) - 1, len(data)), 0, -1):
        if data.endswith(stop[:size]):
            return size
    return 0


def _ending(finish_reason: FinishReason, *, has_calls: bool, stop_text: str | None) -> Ending:
    if stop_text is not None:
        return Ending.STOP_TEXT
    if finish_reason is FinishReason.STOP:
        return Ending.TOOL_CALLS if has_calls else Ending.STOP
    return Ending.LENGTH if finish_reason is FinishReason.LENGTH else Ending.ABORT


def _concat(arrays: list[npt.NDArray[_Number]], dtype: type[_Number]) -> npt.NDArray[_Number]:
    joined = np.concatenate(arrays, dtype=dtype) if arrays else np.empty(0, dtype)
    joined.flags.writeable = False
    return joined


# -- resending a recorded response -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reply:
    """Resends a recorded response: what the journal stores for it, and the encoding.

    A reply stores what tokens and completion do not contain: the creation time, the usage counts, and how each sample
    ended. A resent response has the id, text, tool calls and logprobs of the original; streamed, each part is one
    piece.

    Everything that a dialect needs to encode a response.
    """

    id: str
    created_s: int
    outputs: tuple[CompletionOutput, ...]
    usage: Usage


class _StoredReply(TypedDict):
    """A reply in the journal."""

    created_s: int
    usage: tuple[int, int, int, int]
    endings: list[tuple[str, str | None]]


def write_reply(reply: Reply) -> dict[str, JsonValue]:
    usage = reply.usage
    return {
        "created_s": reply.created_s,
        "usage": [usage.num_prompt, usage.num_cached, usage.num_sampled, usage.num_thinking],
        "endings": [[output.ending, output.stop_text] for output in reply.outputs],
    }


def read_reply(recorded: Answered, request: CompletionRequest, tokenizer: Tokenizer) -> Reply:
    stored = cast("_StoredReply", recorded.reply)
    outputs = []
    for sample, (ending, stop_text) in zip(recorded.samples, stored["endings"], strict=True):
        logprobs: tuple[TokenLogprob, ...] = ()
        if request.num_top_logprobs is not None:
            drawn = zip(sample.response_ids.tolist(), sample.logprobs.tolist(), strict=True)
            logprobs = tuple(TokenLogprob(text_of(tokenizer, id), logprob, id) for id, logprob in drawn)
        outputs.append(CompletionOutput(sample.completion, Ending(ending), stop_text, logprobs))
    return Reply(recorded.id, stored["created_s"], tuple(outputs), Usage(*stored["usage"]))


def play(stream: Stream, reply: Reply) -> bytes:
    """Encode the whole stream of a response."""
    chunks = [stream.begin(reply.usage.num_prompt, reply.usage.num_cached)]
    for sample, output in enumerate(reply.outputs):
        chunks.append(stream.piece(sample, list(_events(output.completion)), output.logprobs))
    chunks += [stream.end_sample(sample, output) for sample, output in enumerate(reply.outputs)]
    return b"".join([*chunks, stream.finish(reply.usage)])


def _events(completion: Completion) -> Iterator[Event]:
    if completion.thinking:
        yield ThinkingDelta(completion.thinking)
    if completion.content:
        yield ContentDelta(completion.content)
    yield from map(CallFinished, completion.tool_calls)
