"""How far apart the sends of one stream are: at once while there is time, in larger pieces while there is not.

A send costs a system call and the work of HTTP around it, more than everything else that is done for a token. So the
gap between two sends of a stream grows with how late the event loop is: a loop that keeps up sends every token by
itself, one that does not sends several together and catches up. Then it also reads from the engine as seldom, since
what comes together is read together for less; but where nothing comes meanwhile, because the engine waits for its
reader, gaps would only slow it down. The first piece of a stream never waits, and while the loop keeps up its end does
not either.
"""

LEAST_GAP_S = 0.001
"""No model is sampled so fast for one client."""
MOST_GAP_S = 0.1
GAP_PER_LATENESS = 1.0
SHARE = 0.05
"""Of the newest lateness in the mean."""
WAITED_S = 0.0005
"""A chunk that took longer was not there already when it was asked for."""
AWAKE_CHUNKS = 16
"""That are waited for without a nap, after a nap in which nothing came."""


class Pace:
    """One for all streams of a loop."""

    def __init__(self) -> None:
        self._lateness_s = 0.0

    def note(self, lateness_s: float) -> None:
        """How long it took until somebody who was woken ran."""
        self._lateness_s += SHARE * (lateness_s - self._lateness_s)

    @property
    def is_late(self) -> bool:
        """Whether the loop does not keep up."""
        return GAP_PER_LATENESS * self._lateness_s > LEAST_GAP_S

    @property
    def gap_s(self) -> float:
        return min(max(LEAST_GAP_S, GAP_PER_LATENESS * self._lateness_s), MOST_GAP_S)


class Naps:
    """How long the reader of one completion sleeps between chunks."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._has_napped, self._num_awake = False, 0

    def after(self, num_tokens: int, waited_s: float) -> float:
        """Seconds to sleep after a chunk of so many tokens, for which the engine was waited so long."""
        had_napped, self._has_napped = self._has_napped, False
        if waited_s < WAITED_S:
            return 0.0  # there may be more
        if had_napped and num_tokens <= 1:
            self._num_awake = AWAKE_CHUNKS
        if self._num_awake:
            self._num_awake -= 1
            return 0.0
        self._has_napped = self._pace.is_late
        return self._pace.gap_s if self._has_napped else 0.0
