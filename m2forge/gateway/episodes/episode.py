"""One attempt at a task as the gateway sees it: its key, budget, history, token tree, requests and rewards.

    request, is_retry = episode.admit(digest, …)     refused if the episode is closed or its budget spent
    opening = episode.open(messages, tools)          tokenize the prompt
    limit = episode.reserve(request, max_tokens)     reserve tokens to sample
    episode.commit(request, opening, …)              write to the journal, then add to history and tree
    episode.abandon(request, opening)                or give the request up

Requests of one episode may run concurrently. `commit` writes to the journal before it returns, so a response may be
completed after it and not before; if the journal cannot be written, nothing is recorded and the request fails. The
token tree contains the calls in the order of their commits.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from m2forge.errors import ExistsError, M2ForgeError, RecordError
from m2forge.gateway.episodes.journal import Answered, Closed, Created, Entry, Journal, Rewarded, make_sample
from m2forge.gateway.history.history import Divergence, History, Opening
from m2forge.gateway.history.turn import Turn
from m2forge.records import Call, FinishReason, IntArray, JsonValue
from m2forge.text.format import ChatFormat
from m2forge.text.message import Message, Tool
from m2forge.text.parser import Completion
from m2forge.tree.token_tree import ExpertArray, TokenTree, checked_experts

_MAX_UNANSWERED = 256


class BudgetError(M2ForgeError, RuntimeError):
    """The call exceeds the episode's budget."""


class ReservedError(BudgetError):
    """The call fits the budget, but calls in flight have reserved the tokens it needs; it can run once they end."""


class ClosedError(M2ForgeError, RuntimeError):
    """The episode is closed and takes no more calls."""


# -- requests and their retries ----------------------------------------------------------------------------------------


class RequestState(StrEnum):
    RUNNING = "running"
    ANSWERED = "answered"
    """The response is recorded and may be sent."""
    FAILED = "failed"
    """Nothing was recorded."""


class AdmittedRequest:
    """One client request, from its admission on."""

    def __init__(self, digest: str, retry_token: str = "", num_samples: int = 1) -> None:
        self.digest, self.retry_token, self.num_samples = digest, retry_token, num_samples
        self.state = RequestState.RUNNING
        self.answer: Answered | None = None
        """The recorded response without the prompt."""
        self.first_call = 0
        """Index of its first sample among the episode's calls, once answered."""
        self.num_waiting = 0
        """Number of connections that wait for its response or are receiving it."""
        self.is_delivered = False
        """Whether a connection received the complete response."""
        self.num_attempts = 0
        """Number of retries matched to this request."""
        self.num_reserved = 0
        """Number of tokens that it may still sample."""

    @property
    def is_lost(self) -> bool:
        """Whether there is a response that no client received."""
        return self.state is RequestState.ANSWERED and not self.is_delivered and not self.num_waiting


class Requests:
    """Requests of an episode, by which a retry finds the original: it gets that response, never a second sample.

    The digest identifies a body. The same body again is a retry if the client says so (an attempt number above 0, or
    the idempotency key of the first attempt), or if a response to it was not delivered. Otherwise it is another sample
    of the same prompt. After a restart it is unknown what was delivered, so each restored response can be claimed once.

    Requests with the same body may run concurrently, and a retry does not say which of them it repeats. It gets an
    undelivered response. Otherwise, if one of them ended without a response, it counts as a retry of that one.
    Otherwise it gets one not delivered yet, then the one with the fewest retries, so that no sample is used twice while
    another is unused.

    Requests that are running or answered.
    """

    def __init__(self) -> None:
        self._by_digest: dict[str, list[AdmittedRequest]] = {}
        self._by_id: dict[str, AdmittedRequest] = {}
        self._unanswered: deque[str] = deque(maxlen=_MAX_UNANSWERED)
        """Digests of requests that ended without a response, until the same body arrives again."""

    def find(self, digest: str, *, attempt: int = 0, retry_token: str = "") -> AdmittedRequest | None:
        """Return the request that this one retries. The caller counts its connections (`num_waiting`)."""
        same = self._by_digest.get(digest, ())
        if retry_token:
            candidates = [request for request in same if request.retry_token == retry_token]
        else:
            candidates = [request for request in same if request.is_lost]
            if attempt and not candidates and digest not in self._unanswered:
                candidates = list(same)
        if not candidates:
            return None
        request = min(reversed(candidates), key=lambda request: (request.is_delivered, request.num_attempts))
        request.num_attempts += 1
        return request

    def add(self, request: AdmittedRequest) -> None:
        if request.digest in self._unanswered:
            self._unanswered.remove(request.digest)
        self._by_digest.setdefault(request.digest, []).append(request)

    def remove(self, request: AdmittedRequest) -> None:
        """Remove a request that ended without a response to send: a retry is a new request."""
        same = self._by_digest[request.digest]
        same.remove(request)
        if not same:
            del self._by_digest[request.digest]
        self._unanswered.append(request.digest)

    def name(self, request: AdmittedRequest, id: str) -> None:
        """Register an answered request under the response id that its client knows."""
        self._by_id[id] = request

    def named(self, id: str) -> AdmittedRequest | None:
        return self._by_id.get(id)


# -- the episode -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """A completion to be recorded.

    One completion, as the engine sampled it and as parsed for the client.
    """

    call: Call
    completion: Completion
    experts: ExpertArray | None = None
    """Routed experts of the first tokens of prompt plus completion, in the token tree's format."""

    def check_experts(self, shape: tuple[int, ...] | None) -> None:
        """`shape`: layers and experts per layer of earlier samples; None if this is the first."""
        if self.experts is None:
            return
        checked_experts(self.experts)
        if shape not in (None, self.experts.shape[1:]):
            raise RecordError(f"expected {shape} experts per token, received {self.experts.shape[1:]}")


@dataclass(frozen=True, slots=True, eq=False)
class RecordedCall:
    id: str
    """Response id that the client knows; samples of one request share it."""
    answer: Turn | None
    """Its answer in the history; None for a raw prompt's."""
    divergence: Divergence | None


class Episode:
    def __init__(
        self,
        created: Created,
        format: ChatFormat,
        *,
        restores_thinking: bool = True,
        vocab_size: int | None = None,
        journal: Journal | None = None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        on_close: "Callable[[Episode], None]" = lambda episode: None,
    ) -> None:
        """`vocab_size`: the network's, if it is larger than the tokenizer's."""
        self.id, self.task_id, self.group = created.id, created.task_id, created.group
        self.key_hash, self.budget, self.created_s = created.key_hash, created.budget, created.created_s
        self.sampling = created.sampling
        """Overrides the sampling parameters of requests; None lets each request use its own."""
        self.context = created.context
        """Maximum tokens of prompt plus completion; None: the model's limit."""
        self.history = History(format, restores_thinking=restores_thinking)
        self._tree = TokenTree(vocab_size or format.tokenizer.vocab_size)
        self._untreed: deque[tuple[str, Sampled]] = deque()
        """Names and samples of calls that are not in the tree yet. Insertion compares whole paths, so it happens when
        the tree is read: no response waits for it, which matters most in long conversations."""
        self._experts_shape: tuple[int, ...] | None = None
        """Layers and experts per layer of recorded routing; None while no call has any."""
        self.requests = Requests()
        self.completions: list[Completion] = []
        """Parsed completion of each recorded call."""
        self.recorded: list[RecordedCall] = []
        """Where each recorded call stands in the history."""
        self.rewards: dict[str, Rewarded] = {}
        """Rewards by id, in order of arrival."""
        self.num_divergences: dict[Divergence, int] = dict.fromkeys(Divergence, 0)
        """Number of recorded calls per divergence."""
        self.num_sampled = 0
        """Number of sampled tokens."""
        self.task, self.num_tool_calls = created.task, 0
        self.num_failed = 0
        """Number of requests that failed in the engine or the gateway, and of completions that were aborted, since this
        process started."""
        self._num_paid_calls = self._num_paid_tokens = 0
        """Number of calls and sampled tokens charged to the budget."""
        self.closed: Closed | None = None
        self.is_compacted = False
        """Whether it was read from a compacted journal, which holds no texts of prompts."""
        self.journal, self._clock, self._on_close = journal, clock, on_close
        self._monotonic, self._since_s, self._elapsed_s = monotonic, monotonic(), 0.0
        """Monotonic time when this process loaded the episode, and seconds spent before: changes of the wall clock do
        not affect the budget."""
        self._active_s = self._on_monotonic(created.created_s)
        self._running: set[AdmittedRequest] = set()
        self._waiting: list[asyncio.Future[None]] = []
        """Futures that wait for a request in flight to end."""
        self._counted: Opening | None = None
        self.reading = asyncio.Lock()
        """Held while a worker reads a large body of one of the episode's requests."""

    def __del__(self) -> None:
        # A busy gateway drops many episodes, and its cyclic garbage collection is rare.
        if hasattr(self, "history"):
            self.history.dissolve()

    # -- the path of a request -----------------------------------------------------------------------------------------

    def admit(
        self, digest: str, *, num_samples: int = 1, max_tokens: int = 1, attempt: int = 0, retry_token: str = ""
    ) -> tuple[AdmittedRequest, bool]:
        """Return the request for a body with this digest, and whether it is an earlier one, running or answered, that
        this one retries. A retry is not charged. `max_tokens`: what each sample may need. Raises ReservedError if
        requests in flight have reserved what it needs."""
        self._active_s = self._monotonic()
        earlier = self.requests.find(digest, attempt=attempt, retry_token=retry_token)
        if earlier is not None:
            return earlier, True
        self._require_open()
        self._check_budget(num_samples, max_tokens)
        request = AdmittedRequest(digest, retry_token, num_samples)
        self.requests.add(request)
        self._running.add(request)
        return request, False

    def open(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Opening:
        return self.history.open(messages, tools)

    def count(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> int:
        """Return the number of prompt tokens for these messages."""
        self._require_open()
        opening = self.history.open(messages, tools)
        # Keeps the last opening, because the counted prompt is often the next request.
        if self._counted is not None:
            self.history.release(self._counted)
        self._counted = opening
        return opening.ids.size

    def context_within(self, context: int) -> int:
        """Return the maximum tokens of prompt plus completion, given the model's limit `context`."""
        return context if self.context is None else min(self.context, context)

    def reserve(self, request: AdmittedRequest, num_tokens: int) -> int:
        """Return and reserve the maximum tokens of each sample: `num_tokens`, or what the budget leaves."""
        left = self.tokens_left
        if left is not None:
            num_tokens = min(num_tokens, left // request.num_samples)
            if num_tokens < 1:
                raise BudgetError(
                    f"episode {self.id}: {left} of {self.budget.max_tokens} sampled tokens are left, too few for "
                    f"{request.num_samples} samples; its budget is spent"
                )
        request.num_reserved = num_tokens * request.num_samples
        return num_tokens

    def commit(
        self,
        request: AdmittedRequest,
        prompt: Opening | IntArray,
        samples: Sequence[Sampled],
        *,
        id: str,
        reply: Mapping[str, JsonValue] | None = None,
        is_delivered: bool = True,
        is_charged: bool = True,
    ) -> None:
        """Record the engine's output. `prompt` is the opening, or the ids of a raw prompt; `id` and `reply` are needed
        to resend the response. `is_delivered`: whether the client gets the complete response; if not, a retry is a new
        request. `is_charged`: whether the request counts against the budget."""
        if request not in self._running:
            raise RecordError(f"request {id}: expected a running request, received one that is {request.state}")
        entry = replace(
            self._entry(request, prompt, samples, id, reply or {}),
            is_charged=is_charged,
            elapsed_s=round(self.elapsed_s, 3),
        )
        if not is_delivered:
            # No body has an empty digest, so no retry finds this entry, not even after a restart.
            entry = replace(entry, digest="", retry_token="")
        if self.journal is not None:
            self.journal.append(entry)
        self._enter(request, entry, prompt if isinstance(prompt, Opening) else None, samples)
        self.num_failed += any(sample.call.finish_reason is FinishReason.ABORT for sample in samples)
        if not is_delivered:
            self.requests.remove(request)
        self._end(request, prompt, RequestState.ANSWERED)

    def abandon(self, request: AdmittedRequest, prompt: Opening | IntArray | None = None) -> None:
        """Drop a request without a result: a retry is a new request. `prompt`: what was opened for it."""
        if request in self._running:
            self.requests.remove(request)
            self._end(request, prompt, RequestState.FAILED)

    async def wait_for_end(self) -> None:
        """Wait until one of the requests in flight has ended."""
        ended = asyncio.get_running_loop().create_future()
        self._waiting.append(ended)
        await ended

    def _end(self, request: AdmittedRequest, prompt: Opening | IntArray | None, state: RequestState) -> None:
        self._running.discard(request)
        request.state = state
        if isinstance(prompt, Opening):
            self.history.release(prompt)
        waiting, self._waiting = self._waiting, []
        for ended in waiting:
            if not ended.done():
                ended.set_result(None)

    def _require_open(self) -> None:
        if self.closed is not None:
            reason = "" if self.closed.failure is None else f" ({self.closed.failure})"
            raise ClosedError(f"episode {self.id} is closed{reason}; create another")

    # -- budget --------------------------------------------------------------------------------------------------------

    @property
    def num_calls(self) -> int:
        return len(self.completions)

    @property
    def num_running(self) -> int:
        """Number of requests in flight."""
        return len(self._running)

    @property
    def tokens_left(self) -> int | None:
        """Number of tokens that are neither spent nor reserved; None without a limit."""
        if self.budget.max_tokens is None:
            return None
        return self.budget.max_tokens - self._num_paid_tokens - sum(request.num_reserved for request in self._running)

    @property
    def seconds_left(self) -> float:
        """Seconds left of the time budget; infinite without a limit."""
        if self.budget.max_s is None:
            return math.inf
        return self.budget.max_s - self.elapsed_s

    @property
    def elapsed_s(self) -> float:
        """Seconds since creation, gateway downtime excluded; after a restart it resumes from the last response."""
        return self._elapsed_s + self._monotonic() - self._since_s

    @property
    def idle_s(self) -> float:
        """Seconds since the last request or response."""
        return self._monotonic() - self._active_s

    def _on_monotonic(self, wall_s: float) -> float:
        """Convert a past wall clock time to the monotonic clock."""
        return self._monotonic() - max(0.0, self._clock() - wall_s)

    def _check_budget(self, num_samples: int, max_tokens: int) -> None:
        budget = self.budget
        num_calls = self._num_paid_calls + sum(request.num_samples for request in self._running)
        if budget.max_calls is not None and num_calls + num_samples > budget.max_calls:
            raise BudgetError(
                f"episode {self.id}: {num_calls} of {budget.max_calls} calls are spent, {num_samples} were requested"
            )
        if self.seconds_left <= 0:
            raise BudgetError(f"episode {self.id}: its time budget of {budget.max_s} s is exhausted")
        left = self.tokens_left
        if budget.max_tokens is None or left is None:
            return
        unspent = budget.max_tokens - self._num_paid_tokens
        if unspent < num_samples:
            raise BudgetError(
                f"episode {self.id}: {self._num_paid_tokens} of {budget.max_tokens} sampled tokens are spent, at least "
                f"{num_samples} were requested"
            )
        if left < min(num_samples * max_tokens, unspent):
            raise ReservedError(
                f"episode {self.id}: of {budget.max_tokens} sampled tokens {unspent - left} are reserved by calls in "
                "flight; retry when they have ended"
            )

    # -- rewards and closing -------------------------------------------------------------------------------------------

    def reward(self, reward: Rewarded) -> bool:
        """Add a reward; False if it is a duplicate. A different reward with the same id is refused."""
        if not reward.id or not math.isfinite(reward.value):
            raise RecordError(f"reward: expected an id and a finite number, received {reward.id!r}, {reward.value!r}")
        if reward.call is not None and not 0 <= reward.call < self.num_calls:
            raise RecordError(f"reward {reward.id}: call: expected 0 to {self.num_calls - 1}, received {reward.call}")
        if reward.id in self.rewards:
            if self.rewards[reward.id] != reward:
                raise ExistsError(
                    f"reward {reward.id} is {self.rewards[reward.id].value}; use another id for another reward"
                )
            return False
        self._write(reward)
        self.rewards[reward.id] = reward
        return True

    def close(self, failure: str | None = None) -> None:
        """Refuse further calls; requests in flight may still commit, and rewards may arrive. Idempotent."""
        if self.closed is None:
            closed = Closed(self._clock(), failure)
            self._write(closed)
            self.closed = closed
            self._on_close(self)

    @property
    def tree(self) -> TokenTree:
        while self._untreed:
            name, sampled = self._untreed[0]
            self._tree.add(sampled.call, name, episode=self.id, experts=sampled.experts)
            self._untreed.popleft()
        return self._tree

    def answer_of(self, response_id: str) -> Completion | None:
        """Return the completion of a response by its id; None if this episode has no such response."""
        request = self.requests.named(response_id)
        return None if request is None or request.answer is None else request.answer.samples[0].completion

    def calls(self) -> tuple[Call, ...]:
        tree = self.tree
        return tuple(tree.call(index) for index in range(self.num_calls))

    # -- recording -----------------------------------------------------------------------------------------------------

    def apply(self, entry: Entry) -> None:
        """Apply an entry read from the journal."""
        match entry:
            case Created():
                raise RecordError(f"episode {entry.id}: created twice in one journal")
            case Rewarded():
                self.rewards[entry.id] = entry
            case Closed():
                self.closed = entry
            case Answered():
                opening = None if entry.path is None else self.history.restore(entry.path, entry.prompt_ids)
                prompt_ids = entry.prompt_ids if opening is None else opening.ids
                request = AdmittedRequest(entry.digest, entry.retry_token, len(entry.samples))
                self.requests.add(request)
                samples = [
                    Sampled(entry.call(sample, prompt_ids), sample.completion, sample.experts)
                    for sample in entry.samples
                ]
                ended_s = max((sample.finished_s for sample in entry.samples), default=self.created_s)
                elapsed_s = ended_s - self.created_s if entry.elapsed_s is None else entry.elapsed_s
                self._elapsed_s, self._since_s = max(self._elapsed_s, elapsed_s), self._monotonic()
                self._enter(request, entry, opening, samples)
                request.state = RequestState.ANSWERED

    def _entry(
        self,
        request: AdmittedRequest,
        prompt: Opening | IntArray,
        samples: Sequence[Sampled],
        id: str,
        reply: Mapping[str, JsonValue],
    ) -> Answered:
        path, prompt_ids = self.history.path(prompt) if isinstance(prompt, Opening) else (None, prompt)
        self._check(samples, () if isinstance(prompt, Opening) else (prompt,))
        return Answered(
            id=id,
            digest=request.digest,
            retry_token=request.retry_token,
            path=path,
            prompt_ids=prompt_ids,
            divergence=prompt.divergence if isinstance(prompt, Opening) else None,
            sampling=samples[0].call.sampling,
            requested=samples[0].call.requested,
            notices=samples[0].call.notices,
            samples=tuple(make_sample(sample.call, sample.completion, sample.experts) for sample in samples),
            reply=reply,
        )

    def _check(self, samples: Sequence[Sampled], raw_prompts: Sequence[IntArray]) -> None:
        """Refuse before writing what the tree would refuse. Prompts from the history are always valid."""
        if not samples:
            raise RecordError("a request is answered by one completion or more, received none")
        for ids in (*raw_prompts, *(sample.call.response_ids for sample in samples)):
            if ids.size and int(ids.max()) >= self._tree.vocab_size:
                raise RecordError(f"expected ids below {self._tree.vocab_size}, received {int(ids.max())}")
        for sample in samples:
            sample.check_experts(self._experts_shape)

    def _enter(
        self, request: AdmittedRequest, entry: Answered, opening: Opening | None, samples: Sequence[Sampled]
    ) -> None:
        # Drops the prompt, which the history holds; a view would keep its memory alive.
        recorded = tuple(
            sample if sample.experts is None else replace(sample, experts=None) for sample in entry.samples
        )
        request.answer = replace(entry, path=None, prompt_ids=np.empty(0, np.int32), samples=recorded)
        request.first_call, request.num_reserved = self.num_calls, 0
        self.requests.name(request, entry.id)
        for sample, written in zip(samples, entry.samples, strict=True):
            self._untreed.append((f"{self.id}/{self.num_calls}", sample))
            answer = None
            if opening is not None:
                answer = self.history.record(opening, sample.call.response_ids, sample.completion)
            self.recorded.append(RecordedCall(entry.id, answer, entry.divergence))
            self.completions.append(written.completion)
            if sample.experts is not None:
                self._experts_shape = sample.experts.shape[1:]
            self.num_sampled += sample.call.response_ids.size
            self._active_s = max(self._active_s, self._on_monotonic(written.finished_s))
            if entry.is_charged:
                self._num_paid_calls += 1
                self._num_paid_tokens += sample.call.response_ids.size
        if entry.divergence is not None:
            self.num_divergences[entry.divergence] += 1

    def _write(self, entry: Entry) -> None:
        if self.journal is not None:
            self.journal.append(entry)
