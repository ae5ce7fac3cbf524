"""Spaces the sends of one stream: immediate while the event loop keeps up, in larger pieces while it does not.

A send costs a system call and HTTP framing, more than all other work per token. So the gap between two sends of a
stream grows with the lateness of the event loop: a loop that keeps up sends every token separately, a late one sends
several together and catches up. A late loop also reads from the engine less often, since chunks read together cost
less; but if nothing arrives meanwhile, because the engine waits for its reader, gaps would only slow it down. The first
piece of a stream is never delayed, and neither is its end while the loop keeps up.
"""

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


class Pace:
    """Measures lateness; shared by all streams of an event loop."""

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
