"""Requests for completions, from a body to its answer: who asks, whether it is a retry, what is sampled, what is told.

    body -> dialect -> Ask -> admitted by the episode, or a retry -> prompt as tokens -> Generation -> answer or events

A client that hangs up leaves its generation, which is aborted when nobody else waits for it. An answer that could not
be delivered is kept for the retry.
"""

import asyncio
import hashlib
import logging
import secrets
import time
from dataclasses import dataclass

from m2forge.errors import EngineError, M2ForgeError
from m2forge.gateway.config import GatewayConfig
from m2forge.gateway.counts import GatewayCounts, Outcome
from m2forge.gateway.episode import Episode
from m2forge.gateway.exchange import Ask, AskError, Dialect
from m2forge.gateway.generation import Abort, Generation, Plan, raw_ids, time_limit
from m2forge.gateway.history import Opening
from m2forge.gateway.limits import Gone, Headers, Receive, Refusal, Send, parse_body, read_body, read_retry
from m2forge.gateway.pace import Pace
from m2forge.gateway.reply import Reply, play, read_reply
from m2forge.gateway.respond import STREAM_HEADERS, respond, respond_bytes, status_of
from m2forge.gateway.retry import Request, RequestState
from m2forge.gateway.sample import offered
from m2forge.protocols import Engine, Prompt
from m2forge.records import IntArray
from m2forge.text.format import ChatFormat

_SEED_MASK = (1 << 63) - 1
"""Seeds may be negative for OpenAI; engines draw with what is 0 or more."""
_DIGEST_LENGTH = 32

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Route:
    """A dialect, and how its ids begin."""

    name: str
    dialect: Dialect
    id_prefix: str
    call_prefix: str


class Calls:
    def __init__(
        self, engine: Engine, format: ChatFormat, config: GatewayConfig, context: int, counts: GatewayCounts
    ) -> None:
        self._engine, self._format, self._config, self._counts = engine, format, config, counts
        self._context, self._pace = context, Pace()
        end = format.tokenizer.end_of_text_id
        self._raw_stop_ids = tuple(dict.fromkeys((*format.stop_ids, *(() if end is None else (end,)))))
        self._running: dict[Request, Generation] = {}
        self.is_draining = False
        """Whether new requests are refused."""

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def running(self) -> tuple[Generation, ...]:
        return tuple(self._running.values())

    def abort_all(self) -> None:
        """What is in flight is broken off, and recorded as such."""
        for generation in self.running:
            generation.abort(Abort.SHUTDOWN)

    async def complete(self, route: Route, episode: Episode, headers: Headers, receive: Receive, send: Send) -> None:
        """Answer one request. Raises the error that it is to be answered with, if nothing was sent yet."""
        try:
            outcome = await self._complete(route, episode, headers, receive, send)
        except Gone:
            outcome = Outcome.HUNG_UP
        except M2ForgeError as error:
            self._counts.note_request(route.name, Outcome.FAILED if status_of(error) >= 500 else Outcome.REFUSED)
            raise
        self._counts.note_request(route.name, outcome)

    async def _complete(
        self, route: Route, episode: Episode, headers: Headers, receive: Receive, send: Send
    ) -> Outcome:
        body = await read_body(headers, receive, self._config)
        ask = route.dialect.read(parse_body(body, self._config.max_depth))
        if ask.num_samples > self._config.max_samples:
            raise Refusal(400, f"expected at most {self._config.max_samples} samples, received {ask.num_samples}")
        digest = digest_of(route.dialect.path, body)
        attempt, retry_token = read_retry(headers)
        while True:
            if self.is_draining:
                raise EngineError("the gateway is stopping; ask again")
            request, is_repeated = episode.admit(
                digest, num_samples=ask.num_samples, attempt=attempt, retry_token=retry_token
            )
            if not is_repeated:
                generation = self._start(route, ask, episode, request)
                return await self._follow(route, generation, receive, send)
            if request in self._running:
                await self._wait(self._running[request], receive)
            if request.state is RequestState.ANSWERED and request.answer is not None and request.answer.digest:
                reply = read_reply(request.answer, ask, self._format.tokenizer)
                return await self._repeat(route, ask, request, reply, send)

    def count(self, ask: Ask, episode: Episode) -> int:
        """Tokens of the prompt that the request would have."""
        return int(episode.open(ask.messages, offered(ask)).ids.size)

    # -- a request of its own ------------------------------------------------------------------------------------------

    def _start(self, route: Route, ask: Ask, episode: Episode, request: Request) -> Generation:
        try:
            plan = self._plan(route, ask, episode, request)
            generation = Generation(plan, self._engine, self._format, episode, request, self._pace, on_end=self._on_end)
        except BaseException:
            episode.abandon(request)
            raise
        self._running[request] = generation
        return generation

    def _plan(self, route: Route, ask: Ask, episode: Episode, request: Request) -> Plan:
        opening = self._open(ask, episode)
        ids = opening.ids if isinstance(opening, Opening) else opening
        room = self._context - ids.size
        if room < 1:
            place = "messages" if ask.prompt is None else "prompt"
            raise AskError(
                f"the prompt is {ids.size} tokens long and the context {self._context}: nothing is left to sample; "
                "send less",
                place,
            )
        created_s = time.time()
        id = route.id_prefix + secrets.token_hex(12)
        prompt = Prompt(
            ids=ids,
            max_tokens=episode.reserve(request, min(ask.max_tokens or room, room)),
            sampling=ask.sampling,
            stop_ids=self._format.stop_ids if ask.prompt is None else self._raw_stop_ids,
            stop_texts=ask.stop_texts,
            seed=None if ask.seed is None else ask.seed & _SEED_MASK,
            num_samples=ask.num_samples,
            timeout_s=time_limit(episode, self._config.call_timeout_s),
        )
        stream = route.dialect.stream(ask, id, int(created_s)) if ask.is_streamed else None
        if self._config.logs_text:
            _log.info("request %s of %s: %r", id, episode.id, self._format.tokenizer.decode(ids.tolist()))
        return Plan(id, ask, opening, prompt, route.call_prefix, stream, int(created_s))

    def _open(self, ask: Ask, episode: Episode) -> Opening | IntArray:
        if ask.prompt is None:
            return episode.open(ask.messages, offered(ask))
        tokenizer = self._format.tokenizer
        ids = tokenizer.encode(ask.prompt) if isinstance(ask.prompt, str) else ask.prompt
        if max(ids, default=0) >= tokenizer.vocab_size:
            raise AskError(f"prompt: expected ids below {tokenizer.vocab_size}, received {max(ids)}", "prompt")
        return raw_ids(ids)

    async def _follow(self, route: Route, generation: Generation, receive: Receive, send: Send) -> Outcome:
        watch = _watch(generation, receive)
        try:
            if generation.plan.stream is None:
                await generation.end()
                if generation.reply is not None and not watch.done():
                    await self._tell(route, generation.plan.ask, generation.reply, send)
            else:
                data = await generation.more()
                if generation.is_begun and not watch.done():
                    await self._stream(generation, data, send)
            # Nothing is awaited in between: the end of a response wakes the watch as well.
            is_gone = watch.done()
        finally:
            watch.cancel()
        return _settle(generation, is_gone)

    async def _stream(self, generation: Generation, data: bytes, send: Send) -> None:
        id = (b"x-request-id", generation.plan.id.encode())
        await send({"type": "http.response.start", "status": 200, "headers": [*STREAM_HEADERS, id]})
        while not generation.is_over:
            await send({"type": "http.response.body", "body": data, "more_body": True})
            data = await generation.more(time.monotonic())
        await send({"type": "http.response.body", "body": data})

    async def _tell(self, route: Route, ask: Ask, reply: Reply, send: Send) -> None:
        body = route.dialect.answer(ask, reply.id, reply.created_s, reply.answers, reply.usage)
        await respond(send, 200, body, [(b"x-request-id", reply.id.encode())])

    def _on_end(self, generation: Generation) -> None:
        self._running.pop(generation.request, None)
        plan, opening = generation.plan, generation.plan.opening
        self._counts.note_sampled(generation.num_sampled, generation.first_chunk_s)
        if isinstance(opening, Opening):
            self._counts.note_prompt(opening.ids.size, opening.num_encoded, opening.divergence)
        else:
            self._counts.note_prompt(opening.size, opening.size, None)
        self._counts.num_aborted += generation.abort_reason is not None
        if self._config.logs_text and generation.reply is not None:
            _log.info("answer %s: %r", plan.id, [answer.completion for answer in generation.reply.answers])

    # -- a retry -------------------------------------------------------------------------------------------------------

    async def _wait(self, generation: Generation, receive: Receive) -> None:
        """Until it has ended. Raises Gone if the client does not wait so long."""
        watch = _watch(generation, receive)
        ended = asyncio.ensure_future(generation.end())
        try:
            await asyncio.wait((watch, ended), return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                raise Gone
        finally:
            watch.cancel()
            ended.cancel()

    async def _repeat(self, route: Route, ask: Ask, request: Request, reply: Reply, send: Send) -> Outcome:
        id = (b"x-request-id", reply.id.encode())
        try:
            if ask.is_streamed:
                data = play(route.dialect.stream(ask, reply.id, reply.created_s), reply)
                await respond_bytes(send, 200, data, (*STREAM_HEADERS, id))
            else:
                await self._tell(route, ask, reply, send)
        except BaseException:
            request.is_lost = True
            raise
        return Outcome.REPEATED


def digest_of(path: str, body: bytes) -> str:
    """What tells requests of an episode apart."""
    hashed = hashlib.sha256(b"%b " % path.encode())
    hashed.update(body)
    return hashed.hexdigest()[:_DIGEST_LENGTH]


def _watch(generation: Generation, receive: Receive) -> "asyncio.Task[None]":
    """Done when the client hangs up. While it is not, the generation has a listener."""

    async def until_gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    generation.join()
    watch = asyncio.get_running_loop().create_task(until_gone())
    watch.add_done_callback(lambda task: generation.leave())
    return watch


def _settle(generation: Generation, is_gone: bool) -> Outcome:
    """What became of a request whose answer was sent, or could not be."""
    if generation.reply is not None:
        generation.request.is_lost = is_gone
        return Outcome.HUNG_UP if is_gone else Outcome.ANSWERED
    if is_gone or generation.abort_reason is Abort.HUNG_UP:
        return Outcome.HUNG_UP
    if generation.is_begun and generation.plan.stream is not None:
        return Outcome.FAILED
    assert generation.failure is not None
    raise generation.failure
