"""Requests of an episode, so that a retry finds the one it repeats: it gets that answer, never a second sample.

Bodies are told apart by their digest. The same body again is a retry if the client says so (an attempt after the first,
or the token that it gave the first time), or if the connection of the first was lost before its answer was delivered.
Otherwise it is another sample of the same prompt. After a restart nobody knows what was delivered, so each answer that
was restored may be claimed once.
"""

from collections.abc import Callable
from enum import StrEnum

from m2forge.gateway.entry import Answered


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
        self.is_lost = False
        """Whether its connection broke before the answer was delivered."""
        self.num_reserved = 0
        """Tokens that it may yet sample."""
        self._listeners: list[Callable[[], None]] = []

    def on_end(self, listener: Callable[[], None]) -> None:
        """Call `listener` when the request is answered or has failed; at once if it is."""
        if self.state is RequestState.RUNNING:
            self._listeners.append(listener)
        else:
            listener()

    def end(self, state: RequestState) -> None:
        self.state = state
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener()


class Requests:
    """Those that run or were answered."""

    def __init__(self) -> None:
        self._by_digest: dict[str, list[Request]] = {}
        self._by_id: dict[str, Request] = {}

    def find(self, digest: str, *, attempt: int = 0, retry_token: str = "") -> Request | None:
        """The request that this one repeats. One whose connection was lost is claimed by it."""
        same = self._by_digest.get(digest, ())
        if retry_token:
            found = [request for request in same if request.retry_token == retry_token]
        else:
            found = [request for request in same if request.is_lost] or list(same if attempt else ())
        if not found:
            return None
        found[-1].is_lost = False
        return found[-1]

    def add(self, request: Request) -> None:
        self._by_digest.setdefault(request.digest, []).append(request)

    def remove(self, request: Request) -> None:
        same = self._by_digest[request.digest]
        same.remove(request)
        if not same:
            del self._by_digest[request.digest]

    def name(self, request: Request, id: str) -> None:
        """Give an answered request the id that its client knows."""
        self._by_id[id] = request

    def named(self, id: str) -> Request | None:
        return self._by_id.get(id)
