"""Requests of an episode, so that a retry finds the one it repeats: it gets that answer, never a second sample.

Bodies are told apart by their digest. The same body again is a retry if the client says so (an attempt after the first,
or the token that it gave the first time), or if there is an answer to it that reached nobody. Otherwise it is another
sample of the same prompt. After a restart nobody knows what was delivered, so each answer that was restored may be
claimed once.

Requests with the same body may run at once, and an attempt does not say of which it is the next. It is given an answer
that reached nobody. Else, if one of them ended without an answer, it is taken for that one's. Else it is given one that
is not delivered yet, then the one that fewest attempts were given: so that no sample is used twice while another is
used by nobody.
"""

from collections import deque
from enum import StrEnum

from m2forge.gateway.entry import Answered

_MAX_GONE = 256


class RequestState(StrEnum):
    RUNNING = "running"
    ANSWERED = "answered"
    """Recorded; its answer may be told."""
    FAILED = "failed"
    """Nothing was recorded."""


class Request:
    """One request of a client, from its admission on."""

    def __init__(self, digest: str, retry_token: str = "", num_samples: int = 1) -> None:
        self.digest, self.retry_token, self.num_samples = digest, retry_token, num_samples
        self.state = RequestState.RUNNING
        self.answer: Answered | None = None
        """What was recorded, less the prompt."""
        self.first_call = 0
        """Index of its first sample among the episode's calls, once it is answered."""
        self.num_waiting = 0
        """Connections that wait for its answer, or are being told it."""
        self.is_delivered = False
        """Whether one of them was told it to the end."""
        self.num_attempts = 0
        """Later ones that were given it."""
        self.num_reserved = 0
        """Tokens that it may yet sample."""

    @property
    def is_lost(self) -> bool:
        """Whether there is an answer that reached nobody."""
        return self.state is RequestState.ANSWERED and not self.is_delivered and not self.num_waiting


class Requests:
    """Those that run or were answered."""

    def __init__(self) -> None:
        self._by_digest: dict[str, list[Request]] = {}
        self._by_id: dict[str, Request] = {}
        self._gone: deque[str] = deque(maxlen=_MAX_GONE)
        """Digests of those that ended without an answer, until the same is asked again."""

    def find(self, digest: str, *, attempt: int = 0, retry_token: str = "") -> Request | None:
        """The request that this one repeats. Its connections are counted by whoever serves them (`num_waiting`)."""
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
        """It ended without an answer that may be told: the next attempt is a request of its own."""
        same = self._by_digest[request.digest]
        same.remove(request)
        if not same:
            del self._by_digest[request.digest]
        self._gone.append(request.digest)

    def name(self, request: Request, id: str) -> None:
        """Give an answered request the id that its client knows."""
        self._by_id[id] = request

    def named(self, id: str) -> Request | None:
        return self._by_id.get(id)
