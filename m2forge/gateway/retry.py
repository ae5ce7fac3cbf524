"""Requests of an episode, by which a retry finds the original: it gets that response, never a second sample.

The digest identifies a body. The same body again is a retry if the client says so (an attempt number above 0, or the
idempotency key of the first attempt), or if a response to it was not delivered. Otherwise it is another sample of the
same prompt. After a restart it is unknown what was delivered, so each restored response can be claimed once.

Requests with the same body may run concurrently, and a retry does not say which of them it repeats. It gets an
undelivered response. Otherwise, if one of them ended without a response, it counts as a retry of that one. Otherwise it
gets one not delivered yet, then the one with the fewest retries, so that no sample is used twice while another is
unused.
"""

from collections import deque
from enum import StrEnum

from m2forge.gateway.entry import Answered

_MAX_GONE = 256


class RequestState(StrEnum):
    RUNNING = "running"
    ANSWERED = "answered"
    """The response is recorded and may be sent."""
    FAILED = "failed"
    """Nothing was recorded."""


class Request:
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
    """Requests that are running or answered."""

    def __init__(self) -> None:
        self._by_digest: dict[str, list[Request]] = {}
        self._by_id: dict[str, Request] = {}
        self._gone: deque[str] = deque(maxlen=_MAX_GONE)
        """Digests of requests that ended without a response, until the same body arrives again."""

    def find(self, digest: str, *, attempt: int = 0, retry_token: str = "") -> Request | None:
        """Return the request that this one retries. The caller counts its connections (`num_waiting`)."""
        same = self._by_digest.get(digest, ())
        if retry_token:
            found = [request for request in same if request.retry_token == retry_token]
        else:
            found = [request for request in same if request.is_lost]
            if attempt and not found and digest not in self._gone:
                found = list(same)
        if not found:
            return None
        request = min(reversed(found), key=lambda request: (request.is_delivered, request.num_attempts))
        request.num_attempts += 1
        return request

    def add(self, request: Request) -> None:
        if request.digest in self._gone:
            self._gone.remove(request.digest)
        self._by_digest.setdefault(request.digest, []).append(request)

    def remove(self, request: Request) -> None:
        """Remove a request that ended without a response to send: a retry is a new request."""
        same = self._by_digest[request.digest]
        same.remove(request)
        if not same:
            del self._by_digest[request.digest]
        self._gone.append(request.digest)

    def name(self, request: Request, id: str) -> None:
        """Register an answered request under the response id that its client knows."""
        self._by_id[id] = request

    def named(self, id: str) -> Request | None:
        return self._by_id.get(id)
