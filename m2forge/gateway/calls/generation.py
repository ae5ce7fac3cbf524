"""One request in the engine: chunks in, stream events out as they arrive, recorded before the response ends.

It runs as its own task, because a retry may wait for the same response: connections join and leave it, and it is
aborted when the last one leaves. Chunks are queued and parsed when a connection is ready to send, so a busy gateway
parses and sends fewer, larger pieces.

The endings of all samples and the last events are sent only after the commit. If the client disconnects, the tokens
sampled so far are recorded and charged to the episode. If the engine fails, tokens of a streamed response are recorded,
since the client may continue from what it received, but not charged; without a stream nothing is recorded. A retry
never receives a partial response.
"""

import asyncio
import contextlib
import logging
import math
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from m2forge.errors import EngineError, M2ForgeError, RecordError
from m2forge.gateway.calls.sample import Reply, SampleReader, write_reply
from m2forge.gateway.dialects.types import CompletionRequest, Stream, Usage
from m2forge.gateway.episodes.episode import AdmittedRequest, Episode, Sampled
from m2forge.gateway.history.history import Opening
from m2forge.protocols import Chunk, Engine, Prompt
from m2forge.records import FinishReason, IntArray, RequestedSampling
from m2forge.text.format import ChatFormat

LEAST_GAP_S = 0.001
"""Minimum gap in seconds; no model decodes this fast for one client."""
MOST_GAP_S = 0.1
GAP_PER_LATENESS = 1.0
SHARE = 0.05
"""Weight of the newest lateness in the moving average."""
WAITED_S = 0.0005
"""Seconds of waiting above which a chunk was not already available."""
AWAKE_CHUNKS = 16
"""Number of chunks to read without sleeping after a sleep during which nothing arrived."""
GRACE_S = 10.0
"""Seconds past the time limit, which the engine enforces itself, after which the gateway aborts the request."""
_log = logging.getLogger(__name__)


class Abort(StrEnum):
    """Why a generation was aborted."""

    HUNG_UP = "hung_up"
    """All clients waiting for the response have disconnected."""
    TIMED_OUT = "timed_out"
    """The engine exceeded the time limit; the client receives what was sampled."""
    SHUTDOWN = "shutdown"
    """The gateway is shutting down."""


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What to sample and how to respond."""

    id: str
    request: CompletionRequest
    opening: Opening | IntArray
    """The prompt that the history built from the messages, or the ids of a raw prompt."""
    prompt: Prompt
    requested: RequestedSampling | None
    """The requested sampling, if the episode's sampling overrides it."""
    call_prefix: str
    """Prefix of tool call ids."""
    stream: Stream | None
    created_s: int


# -- gaps between sends ------------------------------------------------------------------------------------------------


class Pace:
    """Spaces the sends of one stream: immediate while the event loop keeps up, in larger pieces while it does not.

    A send costs a system call and HTTP framing, more than all other work per token. So the gap between two sends of a
    stream grows with the lateness of the event loop: a loop that keeps up sends every token separately, a late one
    sends several together and catches up. A late loop also reads from the engine less often, since chunks read together
    cost less; but if nothing arrives meanwhile, because the engine waits for its reader, gaps would only slow it down.
    The first piece of a stream is never delayed, and neither is its end while the loop keeps up.

    Measures lateness; shared by all streams of an event loop.
    """

    def __init__(self) -> None:
        self._lateness_s = 0.0

    def note(self, lateness_s: float) -> None:
        """Record the delay between waking a task and its execution."""
        self._lateness_s += SHARE * (lateness_s - self._lateness_s)

    @property
    def is_late(self) -> bool:
        """Whether the event loop does not keep up."""
        return GAP_PER_LATENESS * self._lateness_s > LEAST_GAP_S

    @property
    def gap_s(self) -> float:
        return min(max(LEAST_GAP_S, GAP_PER_LATENESS * self._lateness_s), MOST_GAP_S)


class Naps:
    """Decides how long the reader of one completion sleeps between chunks."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._has_napped, self._num_awake = False, 0

    def after(self, num_tokens: int, waited_s: float) -> float:
        """Return seconds to sleep after a chunk of `num_tokens` for which the reader waited `waited_s`."""
        had_napped, self._has_napped = self._has_napped, False
        if waited_s < WAITED_S:
            return 0.0  # more chunks may be available
        if had_napped and num_tokens <= 1:
            self._num_awake = AWAKE_CHUNKS
        if self._num_awake:
            self._num_awake -= 1
            return 0.0
        self._has_napped = self._pace.is_late
        return self._pace.gap_s if self._has_napped else 0.0


# -- the request in the engine -----------------------------------------------------------------------------------------


class Generation:
    def __init__(
        self,
        plan: Plan,
        engine: Engine,
        format: ChatFormat,
        episode: Episode,
        admitted: AdmittedRequest,
        pace: Pace,
        *,
        on_end: Callable[["Generation"], None] = lambda generation: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.plan, self.admitted, self.episode = plan, admitted, episode
        self._engine, self._clock, self._on_end, self._pace = engine, clock, on_end, pace
        self._woken_s = 0.0
        self._readers = [
            SampleReader(plan.request, format, plan.prompt.stop_ids, plan.call_prefix)
            for _ in range(plan.prompt.num_samples)
        ]
        self._loop = asyncio.get_running_loop()
        self._started_s = clock()
        self._begun_s = time.monotonic()
        self._inbox: list[Chunk] = []
        self._outbox: list[bytes] = []
        self._wakers: list[asyncio.Future[None]] = []
        self.num_listeners = 0
        """Number of connections that wait for the response."""
        self.is_begun = False
        """Whether the response has begun, so that its HTTP status is known."""
        self._is_pausing = False
        self.num_cached = 0
        self.first_chunk_s: float | None = None
        """Seconds until the first chunk arrived."""
        self.is_over = False
        self.abort_reason: Abort | None = None
        self.reply: Reply | None = None
        """The response, set once it is recorded and may be sent."""
        self.failure: M2ForgeError | None = None
        self._task = self._loop.create_task(self._run())
        self._task.add_done_callback(self._end_unrun)
        self._timer: asyncio.TimerHandle | None = None
        if plan.prompt.timeout_s is not None:
            self._timer = self._loop.call_later(plan.prompt.timeout_s + GRACE_S, self.abort, Abort.TIMED_OUT)

    # -- listeners -----------------------------------------------------------------------------------------------------

    def join(self) -> None:
        self.num_listeners += 1

    def leave(self) -> None:
        """The last listener to leave aborts the generation."""
        self.num_listeners -= 1
        if not self.num_listeners:
            self.abort(Abort.HUNG_UP)

    def abort(self, reason: Abort) -> None:
        if not self.is_over and self.abort_reason is None:
            self.abort_reason = reason
            self._task.cancel()

    @property
    def num_sampled(self) -> int:
        return sum(reader.num_sampled for reader in self._readers)

    async def more(self, since_s: float = -math.inf) -> bytes:
        """Wait for and return the next bytes to send. Pieces that arrive close together are joined: until the
        generation ends, it returns no sooner than the pace's gap after `since_s`, on the monotonic clock."""
        has_waited = False
        while not self._outbox and not self._inbox and not self.is_over:
            await self._wait()
            has_waited = True
        now_s = time.monotonic()
        if has_waited:
            self._pace.note(now_s - self._woken_s)
        gap_s = since_s + self._pace.gap_s - now_s
        if gap_s > 0 and not self.is_over:
            self._is_pausing = True
            pause = self._loop.create_future()
            timer = self._loop.call_later(gap_s, self._wake)
            self._wakers.append(pause)
            try:
                await pause
            finally:
                self._is_pausing = False
                timer.cancel()
        try:
            self._read()
        except Exception as error:  # noqa: BLE001  (see `_run`)
            self._crash(error)
            self._task.cancel()
        data = b"".join(self._outbox)
        self._outbox.clear()
        return data

    async def end(self) -> None:
        while not self.is_over:
            await self._wait()

    async def _wait(self) -> None:
        waker = self._loop.create_future()
        self._wakers.append(waker)
        await waker

    def _wake(self) -> None:
        self._woken_s = time.monotonic()
        for waker in self._wakers:
            if not waker.done():
                waker.set_result(None)
        self._wakers.clear()

    # -- the engine ----------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        failure: M2ForgeError | None = None
        try:
            async with contextlib.aclosing(self._engine.generate(self.plan.prompt)) as chunks:
                naps, requested_s = Naps(self._pace), time.monotonic()
                async for chunk in chunks:
                    self._take(chunk)
                    nap_s = naps.after(len(chunk.ids), time.monotonic() - requested_s)
                    if nap_s and chunk.finish_reason is None:
                        await asyncio.sleep(nap_s)
                    requested_s = time.monotonic()
            if self._inbox and self.plan.stream is not None and not self._pace.is_late:
                # Recording takes longer than sending: the last tokens are sent first.
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            failure = EngineError("the gateway is stopping; retry the request")
        except M2ForgeError as error:
            failure = error
        except Exception as error:  # noqa: BLE001  (one request's failure must not reach the others)
            failure = self._log(error)
        if self.is_over:
            return
        try:
            self._end(failure)
        except M2ForgeError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001  (see above)
            self._crash(error)

    def _take(self, chunk: Chunk) -> None:
        """Queue a chunk until a connection calls `more`: queued chunks are parsed together."""
        if not self.is_begun:
            self._begin(chunk.num_cached)
        if chunk.finish_reason is not None:
            self._readers[chunk.sample].finished_s = self._clock()
        self._inbox.append(chunk)
        if self._wakers and self.plan.stream is not None and not self._is_pausing:
            self._wake()

    def _read(self) -> None:
        """Parse the queued chunks into events."""
        if not self._inbox:
            return
        inbox, self._inbox = self._inbox, []
        if len(self._readers) == 1:
            self._read_sample(0, inbox)
            return
        for sample in dict.fromkeys(chunk.sample for chunk in inbox):
            self._read_sample(sample, [chunk for chunk in inbox if chunk.sample == sample])

    def _read_sample(self, sample: int, chunks: list[Chunk]) -> None:
        reader, stream, finish_reason = self._readers[sample], self.plan.stream, chunks[-1].finish_reason
        events, logprobs = reader.take(chunks)
        if finish_reason is not None:
            events += reader.finish(finish_reason)
        if stream is not None and (events or logprobs):
            self._outbox.append(stream.piece(sample, events, logprobs))

    def _begin(self, num_cached: int) -> None:
        self.is_begun, self.num_cached = True, num_cached
        self.first_chunk_s = time.monotonic() - self._begun_s
        if self.plan.stream is not None:
            self._outbox.append(self.plan.stream.begin(self.plan.prompt.ids.size, num_cached))

    # -- the end -------------------------------------------------------------------------------------------------------

    def _end(self, failure: M2ForgeError | None) -> None:
        """Commit or fail after the engine has finished or failed."""
        if failure is None:
            self._read()
            if all(reader.output is not None for reader in self._readers):
                self._commit()
                return
            failure = EngineError("the engine ended before all completions did; retry the request")
        self._break_off(failure)

    def _break_off(self, failure: M2ForgeError) -> None:
        """Record what was sampled; send it if the request timed out, else send the failure."""
        is_delivered = self.abort_reason is Abort.TIMED_OUT
        self._read()
        stays = self.plan.stream is not None or self.abort_reason is Abort.HUNG_UP
        if not is_delivered and not (stays and self.num_sampled):
            self._fail(failure)
            return
        if not self.is_begun:
            self._begin(0)
        for sample, reader in enumerate(self._readers):
            if reader.output is None:
                reader.finished_s = self._clock()
                events = reader.finish(FinishReason.ABORT)
                if is_delivered and self.plan.stream is not None:
                    self._outbox.append(self.plan.stream.piece(sample, events, ()))
        self._commit(None if is_delivered else failure)

    def _commit(self, failure: M2ForgeError | None = None) -> None:
        """Record the response; its end, or the failure, may be sent after that."""
        plan, prompt = self.plan, self.plan.prompt
        outputs = tuple(reader.output for reader in self._readers if reader.output is not None)
        num_thinking = sum(reader.num_thinking() for reader in self._readers)
        usage = Usage(prompt.ids.size, self.num_cached, self.num_sampled, num_thinking)
        reply = Reply(plan.id, plan.created_s, outputs, usage)
        try:
            samples = [
                Sampled(
                    reader.call(prompt.ids, prompt.sampling, plan.requested, self._started_s, plan.request.notices),
                    output.completion,
                    reader.experts(prompt.ids.size + reader.num_sampled),
                )
                for reader, output in zip(self._readers, outputs, strict=True)
            ]
            self.episode.commit(
                *(self.admitted, plan.opening, samples),
                id=plan.id,
                reply=write_reply(reply),
                is_delivered=failure is None,
                is_charged=failure is None or self.abort_reason is Abort.HUNG_UP,
            )
        except RecordError as error:
            raise EngineError(f"what the engine sampled cannot be recorded: {error}") from error
        if failure is not None:
            self._fail(failure)
            return
        if plan.stream is not None:
            ends = [plan.stream.end_sample(sample, output) for sample, output in enumerate(outputs)]
            self._outbox.append(b"".join([*ends, plan.stream.finish(usage)]))
        self.reply = reply
        self._finish()

    def _crash(self, error: Exception) -> None:
        failure = self._log(error)
        self._inbox.clear()
        self._fail(failure)

    def _log(self, error: Exception) -> EngineError:
        """Log an unexpected error and return the error for the client."""
        # Leaves out the error message, which may contain prompt text.
        frames = "".join(traceback.format_tb(error.__traceback__))
        _log.error("request %s: %s\n%s", self.plan.id, type(error).__name__, frames)
        return EngineError(f"the gateway failed ({type(error).__name__}); retry the request")

    def _fail(self, error: M2ForgeError) -> None:
        self.failure = error
        self.episode.num_failed += 1
        self._read()
        if self.is_begun and self.plan.stream is not None:
            self._outbox.append(self.plan.stream.fail(503, str(error)))
        self.episode.abandon(self.admitted, self.plan.opening)
        self._finish()

    def _finish(self) -> None:
        self.is_over = True
        if self._timer is not None:
            self._timer.cancel()
        self._on_end(self)
        self._wake()

    def _end_unrun(self, task: "asyncio.Task[None]") -> None:
        """Fail a task that was cancelled before its first step, so that it never ran."""
        if not self.is_over:
            self._fail(EngineError("the request was broken off; retry the request"))


def time_limit(episode: Episode, call_timeout_s: float) -> float:
    """Return the maximum seconds of a call of the episode."""
    return max(0.0, min(call_timeout_s, episode.seconds_left, math.inf))


def raw_ids(ids: Sequence[int]) -> IntArray:
    array = np.array(ids, np.int32)
    array.flags.writeable = False
    return array
