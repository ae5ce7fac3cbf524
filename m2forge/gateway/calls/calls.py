"""Completion requests, from body to response: admits or deduplicates retries, tokenizes, samples and sends.

    body -> dialect -> CompletionRequest -> AdmittedRequest of the episode: new or a retry
        -> prompt ids -> Generation -> response or events

A client that disconnects leaves its generation, which is aborted when no other connection waits for it. An undelivered
response is stored for the retry. A request waits while the token budget it needs is reserved by other requests.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

from m2forge.errors import EngineError, M2ForgeError
from m2forge.gateway.calls.body import LONG_BYTES, Bodies, LoopShare, PromptSizes, Read, Setup
from m2forge.gateway.calls.generation import Abort, Generation, Pace, Plan, raw_ids, time_limit
from m2forge.gateway.calls.sample import Reply, play, read_reply
from m2forge.gateway.config import GatewayConfig
from m2forge.gateway.dialects.openai.responses_input import find_items
from m2forge.gateway.dialects.types import BadRequestError, CompletionRequest, Dialect, Notice, notice_headers, offered
from m2forge.gateway.episodes.episode import AdmittedRequest, Episode, RequestState, ReservedError
from m2forge.gateway.history.history import Opening
from m2forge.gateway.http.limits import (
    STREAM_HEADERS,
    ClientDisconnected,
    Headers,
    Receive,
    Send,
    id_headers,
    read_body,
    read_retry,
    respond,
    respond_bytes,
    status_of,
)
from m2forge.gateway.metrics import GatewayCounts, Outcome
from m2forge.protocols import Engine, Prompt
from m2forge.records import IntArray, RequestedSampling, Sampling
from m2forge.text.format import ChatFormat
from m2forge.text.tokenizer import UnencodedError, pre_encoded

T = TypeVar("T")

_SEED_MASK = (1 << 63) - 1
"""Maps OpenAI's seeds, which may be negative, to the non-negative seeds that engines take."""
MAX_CHARS = 16 << 10
"""Maximum number of characters tokenized on the event loop at a time."""
NUM_ENCODERS = 2
"""Threads that tokenize longer texts."""
_NOTICE_S = 0.002
"""Seconds in which a busy event loop notices a client's disconnect."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Route:
    """A dialect and the prefixes of its response and tool call ids."""

    name: str
    dialect: Dialect
    id_prefix: str
    call_prefix: str


class Calls:
    def __init__(
        self, engine: Engine, format: ChatFormat, config: GatewayConfig, context: int, counts: GatewayCounts
    ) -> None:
        self._engine, self._format, self._config, self._counts = engine, format, config, counts
        self._context, self._pace, self.share = context, Pace(), LoopShare()
        sizes = PromptSizes.of(format, context, config.max_items)
        setup = Setup(sizes, config.max_depth, config.max_body_bytes, config.image_placeholder)
        self._bodies = Bodies(setup, config.num_body_workers, self.share)
        self._encoders = ThreadPoolExecutor(NUM_ENCODERS, "encode")
        end = format.tokenizer.end_of_text_id
        self._raw_stop_ids = tuple(dict.fromkeys((*format.stop_ids, *(() if end is None else (end,)))))
        self._running: dict[AdmittedRequest, Generation] = {}
        self._opening: dict[AdmittedRequest, asyncio.Event] = {}
        """Requests whose prompts are being built; the event is set when building ends."""
        self.is_draining = False
        """Whether the gateway refuses new requests because it is shutting down."""

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def running(self) -> tuple[Generation, ...]:
        return tuple(self._running.values())

    def abort_all(self) -> None:
        """Abort all generations in flight; streamed ones are recorded as aborted."""
        for generation in self.running:
            generation.abort(Abort.SHUTDOWN)

    async def close(self) -> None:
        """Stop body workers and encoder threads; no request may follow."""
        await self._bodies.close()
        self._encoders.shutdown(wait=False)

    async def complete(self, route: Route, episode: Episode, headers: Headers, receive: Receive, send: Send) -> None:
        """Serve one request. Raises the error to respond with if nothing was sent yet."""
        num_failed = episode.num_failed
        try:
            outcome = await self._complete(route, episode, headers, receive, send)
        except ClientDisconnected:
            outcome = Outcome.HUNG_UP
        except M2ForgeError as error:
            if status_of(error) >= 500 and episode.num_failed == num_failed:
                episode.num_failed += 1
            self._counts.note_request(route.name, Outcome.FAILED if status_of(error) >= 500 else Outcome.REFUSED)
            raise
        self._counts.note_request(route.name, outcome)

    async def _complete(
        self, route: Route, episode: Episode, headers: Headers, receive: Receive, send: Send
    ) -> Outcome:
        body = await read_body(headers, receive, self._config)
        read = await self._read(route.dialect.path, body, episode)
        request, is_long = read.request, len(body) > LONG_BYTES
        if request.num_samples > self._config.max_samples:
            raise BadRequestError(
                f"n: expected at most {self._config.max_samples}, received {request.num_samples}", "n"
            )
        del body
        attempt, retry_token = read_retry(headers)
        until_s, context = None, episode.context_within(self._context)
        while True:
            if self.is_draining:
                raise EngineError("the gateway is stopping; retry the request")
            try:
                admitted, is_repeated = episode.admit(
                    read.digest,
                    num_samples=request.num_samples,
                    max_tokens=min(request.max_tokens or context, context),
                    attempt=attempt,
                    retry_token=retry_token,
                )
            except ReservedError:
                now_s = time.monotonic()
                until_s = now_s + time_limit(episode, self._config.call_timeout_s) if until_s is None else until_s
                watch = asyncio.create_task(_wait_for_disconnect(receive))
                if not await _unless_disconnected(watch, episode.wait_for_end(), until_s - now_s):
                    raise
                continue
            admitted.num_waiting += 1
            try:
                if not is_repeated:
                    generation = await self._start(route, request, episode, admitted, is_long=is_long)
                    return await self._follow(route, generation, receive, send)
                outcome = await self._repeat(route, request, admitted, receive, send)
            finally:
                admitted.num_waiting -= 1
            if outcome is not None:
                return outcome

    async def count(self, path: str, body: bytes, episode: Episode) -> tuple[int, tuple[str, ...]]:
        """Return the number of prompt tokens that the request would have, and its notices."""
        request = (await self._read(path, body, episode)).request
        is_long = len(body) > LONG_BYTES
        num_tokens = await self._with_encoded(
            lambda: episode.count(request.messages, offered(request)), is_long=is_long
        )
        return num_tokens, request.notices

    async def _read(self, path: str, body: bytes, episode: Episode) -> Read:
        """Read a body and add the notice of the episode's own sampling. Raises BadRequestError for a notice if the
        gateway is strict."""
        read = await self._bodies.read(path, body, episode.reading, lambda ids: find_items(ids, episode.answer_of))
        if is_overridden(read.request, episode.sampling):
            read = replace(read, request=replace(read.request, notices=(*read.request.notices, Notice.SAMPLING)))
        if self._config.strict and read.request.notices:
            first = read.request.notices[0]
            raise BadRequestError(f"{first}, and gateway.strict refuses what is not honoured", first.partition(":")[0])
        return read

    # -- new requests --------------------------------------------------------------------------------------------------

    async def _start(
        self, route: Route, request: CompletionRequest, episode: Episode, admitted: AdmittedRequest, *, is_long: bool
    ) -> Generation:
        opening: Opening | IntArray | None = None
        self._opening[admitted] = asyncio.Event()
        try:
            opening = await self._open(request, episode, is_long)
            if self.is_draining:
                raise EngineError("the gateway is stopping; retry the request")
            plan = self._plan(route, request, episode, admitted, opening)
            generation = Generation(
                plan, self._engine, self._format, episode, admitted, self._pace, on_end=self._on_end
            )
            self._running[admitted] = generation
        except BaseException:
            episode.abandon(admitted, opening)
            raise
        finally:
            self._opening.pop(admitted).set()
        return generation

    def _plan(
        self,
        route: Route,
        request: CompletionRequest,
        episode: Episode,
        admitted: AdmittedRequest,
        opening: Opening | IntArray,
    ) -> Plan:
        ids = opening.ids if isinstance(opening, Opening) else opening
        context = episode.context_within(self._context)
        room = context - ids.size
        if room < 1:
            raise route.dialect.too_long(ids.size, context)
        created_s = time.time()
        id = route.id_prefix + secrets.token_hex(12)
        sampling, seed, requested = decide_sampling(request, episode.sampling)
        prompt = Prompt(
            ids=ids,
            max_tokens=episode.reserve(admitted, min(request.max_tokens or room, room)),
            sampling=sampling,
            stop_ids=self._format.stop_ids if request.prompt is None else self._raw_stop_ids,
            stop_texts=request.stop_texts,
            seed=None if seed is None else seed & _SEED_MASK,
            num_samples=request.num_samples,
            timeout_s=time_limit(episode, self._config.call_timeout_s),
            returns_experts=self._config.records_experts,
            affinity=episode.id,
        )
        stream = route.dialect.stream(request, id, int(created_s)) if request.is_streamed else None
        if self._config.logs_text:
            _log.info("request %s of %s: %r", id, episode.id, self._format.tokenizer.decode(ids.tolist()))
        return Plan(id, request, opening, prompt, requested, route.call_prefix, stream, int(created_s))

    async def _open(self, request: CompletionRequest, episode: Episode, is_long: bool) -> Opening | IntArray:
        if request.prompt is None:
            return await self._with_encoded(lambda: episode.open(request.messages, offered(request)), is_long=is_long)
        tokenizer, prompt = self._format.tokenizer, request.prompt
        if isinstance(prompt, str):
            text = prompt
            ids: Sequence[int] = await self._with_encoded(lambda: tokenizer.encode(text), is_long=is_long)
        else:
            ids = prompt
        if max(ids, default=0) >= tokenizer.vocab_size:
            raise BadRequestError(f"prompt: expected ids below {tokenizer.vocab_size}, received {max(ids)}", "prompt")
        return raw_ids(ids)

    async def _with_encoded(self, make: Callable[[], T], *, is_long: bool) -> T:
        """Return `make()`. Encoder threads tokenize long texts beforehand, and long requests take turns on the event
        loop. Awaits nothing if everything is short."""
        known: dict[str, list[int]] = {}

        def run() -> T:
            with pre_encoded(known, MAX_CHARS):
                return make()

        while True:
            try:
                return await self.share.run(run) if is_long else run()
            except UnencodedError as error:
                texts = error.texts
            encode = self._format.tokenizer.encode_batch
            ids = await asyncio.get_running_loop().run_in_executor(self._encoders, encode, texts)
            known |= zip(texts, ids, strict=True)

    async def _follow(self, route: Route, generation: Generation, receive: Receive, send: Send) -> Outcome:
        watch = _watch(generation, receive)
        try:
            if generation.plan.stream is None:
                await generation.end()
                if generation.reply is not None and not watch.done():
                    await self._send_reply(route, generation.plan.request, generation.reply, send)
            else:
                data = await generation.more()
                if generation.is_begun and not watch.done():
                    await self._stream(generation, data, send)
            # Nothing is awaited in between: the end of a response also completes the watch.
            is_disconnected = watch.done()
        finally:
            watch.cancel()
        return _outcome(generation, is_disconnected)

    async def _stream(self, generation: Generation, data: bytes, send: Send) -> None:
        plan = generation.plan
        headers = [*STREAM_HEADERS, *id_headers(plan.id), *notice_headers(plan.request.notices)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        while not generation.is_over:
            await send({"type": "http.response.body", "body": data, "more_body": True})
            data = await generation.more(time.monotonic())
        await send({"type": "http.response.body", "body": data})

    async def _send_reply(self, route: Route, request: CompletionRequest, reply: Reply, send: Send) -> None:
        body = route.dialect.response(request, reply.id, reply.created_s, reply.outputs, reply.usage)
        await respond(send, 200, body, [*id_headers(reply.id), *notice_headers(request.notices)])

    def _on_end(self, generation: Generation) -> None:
        self._running.pop(generation.admitted, None)
        plan, opening = generation.plan, generation.plan.opening
        self._counts.note_sampled(generation.num_sampled, generation.first_chunk_s)
        if isinstance(opening, Opening):
            self._counts.note_prompt(opening.ids.size, opening.num_encoded, opening.divergence)
        else:
            self._counts.note_prompt(opening.size, opening.size, None)
        self._counts.num_aborted += generation.abort_reason is not None
        if self._config.logs_text and generation.reply is not None:
            _log.info("response %s: %r", plan.id, [output.completion for output in generation.reply.outputs])

    # -- retries -------------------------------------------------------------------------------------------------------

    async def _repeat(
        self, route: Route, request: CompletionRequest, admitted: AdmittedRequest, receive: Receive, send: Send
    ) -> Outcome | None:
        """Resend the response to an earlier request, waiting until it is there; None if that request got none."""
        opening = self._opening.get(admitted)
        if opening is not None:
            await _unless_disconnected(asyncio.create_task(_wait_for_disconnect(receive)), opening.wait())
        generation = self._running.get(admitted)
        if generation is not None:
            await _unless_disconnected(_watch(generation, receive), generation.end())
        if admitted.state is not RequestState.ANSWERED or admitted.answer is None or not admitted.answer.digest:
            return None
        reply = read_reply(admitted.answer, request, self._format.tokenizer)
        watch = asyncio.create_task(_wait_for_disconnect(receive))
        try:
            await asyncio.wait((watch,), timeout=_NOTICE_S)
            if not watch.done():
                await self._resend(route, request, reply, send)
            # Nothing is awaited in between: see `_follow`.
            is_disconnected = watch.done()
        finally:
            watch.cancel()
        admitted.is_delivered |= not is_disconnected
        return Outcome.HUNG_UP if is_disconnected else Outcome.REPEATED

    async def _resend(self, route: Route, request: CompletionRequest, reply: Reply, send: Send) -> None:
        if not request.is_streamed:
            await self._send_reply(route, request, reply, send)
            return
        data = play(route.dialect.stream(request, reply.id, reply.created_s), reply)
        headers = (*STREAM_HEADERS, *id_headers(reply.id), *notice_headers(request.notices))
        await respond_bytes(send, 200, data, headers)


def decide_sampling(
    request: CompletionRequest, decided: Sampling | None
) -> tuple[Sampling, int | None, RequestedSampling | None]:
    """Return the sampling parameters, the seed, and the requested sampling if that differs. An episode with fixed
    sampling ignores the request's seed, which would make all attempts of a group identical."""
    if decided is None:
        return request.sampling, request.seed, None
    is_same = request.sampling == decided and request.seed is None
    return decided, None, None if is_same else RequestedSampling(request.sampling, request.seed)


def is_overridden(request: CompletionRequest, decided: Sampling | None) -> bool:
    """Return whether the episode's sampling overrides a parameter that the request sets to another value."""
    if decided is None:
        return False
    names = request.requested_sampling
    return request.seed is not None or any(getattr(request.sampling, name) != getattr(decided, name) for name in names)


async def _wait_for_disconnect(receive: Receive) -> None:
    """Return when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _watch(generation: Generation, receive: Receive) -> "asyncio.Task[None]":
    """Return a task that ends when the client disconnects. Until then the connection counts as a listener."""
    generation.join()
    watch = asyncio.get_running_loop().create_task(_wait_for_disconnect(receive))
    watch.add_done_callback(lambda task: generation.leave())
    return watch


async def _unless_disconnected(
    watch: "asyncio.Task[None]", coming: Coroutine[object, object, object], limit_s: float | None = None
) -> bool:
    """Return whether `coming` finished within the limit. Raises ClientDisconnected if the client (`watch`) disconnects
    first."""
    awaited = asyncio.ensure_future(coming)
    try:
        await asyncio.wait((watch, awaited), timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        if watch.done() and not awaited.done():
            raise ClientDisconnected
        return awaited.done()
    finally:
        watch.cancel()
        awaited.cancel()


def _outcome(generation: Generation, is_disconnected: bool) -> Outcome:
    """Return the outcome of a request whose response was sent, or could not be."""
    if generation.reply is not None:
        generation.admitted.is_delivered |= not is_disconnected
        return Outcome.HUNG_UP if is_disconnected else Outcome.ANSWERED
    if is_disconnected or generation.abort_reason is Abort.HUNG_UP:
        return Outcome.HUNG_UP
    if generation.is_begun and generation.plan.stream is not None:
        return Outcome.FAILED
    assert generation.failure is not None
    raise generation.failure
