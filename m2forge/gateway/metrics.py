"""Gateway counters, and their Prometheus text. No metric contains an episode id, a key or text."""

from collections import Counter
from collections.abc import Iterator, Sequence
from enum import StrEnum

from m2forge.gateway.history.history import Divergence
from m2forge.observe.prometheus import Metric, counter, gauge, labels, metrics_text, summary
from m2forge.protocols import ReplicaState

PREFIX = "m2forge_gateway_"


class Outcome(StrEnum):
    """Outcome of a completion request."""

    ANSWERED = "answered"
    REPEATED = "repeated"
    """A retry that received the recorded response."""
    REFUSED = "refused"
    """The client made a mistake, or its budget is spent."""
    HUNG_UP = "hung_up"
    FAILED = "failed"


class GatewayCounts:
    def __init__(self) -> None:
        self._num_requests: Counter[tuple[str, Outcome]] = Counter()
        self._num_divergences: Counter[Divergence] = Counter(dict.fromkeys(Divergence, 0))
        self.num_sampled = self.num_prompt = self.num_encoded = self.num_aborted = self.num_rewards = 0
        self._num_first_chunks, self._first_chunk_s = 0, 0.0

    def note_request(self, dialect: str, outcome: Outcome) -> None:
        self._num_requests[dialect, outcome] += 1

    def note_prompt(self, num_tokens: int, num_encoded: int, divergence: Divergence | None) -> None:
        self.num_prompt += num_tokens
        self.num_encoded += num_encoded
        if divergence is not None:
            self._num_divergences[divergence] += 1

    def note_sampled(self, num_sampled: int, first_chunk_s: float | None) -> None:
        self.num_sampled += num_sampled
        if first_chunk_s is not None:
            self._num_first_chunks += 1
            self._first_chunk_s += first_chunk_s

    def to_text(self, num_episodes: int, num_running: int, replicas: Sequence[ReplicaState] = ()) -> str:
        requests = {
            labels(dialect=dialect, outcome=outcome): number
            for (dialect, outcome), number in sorted(self._num_requests.items())
        }
        divergences = {labels(reason=reason): number for reason, number in self._num_divergences.items()}
        metrics = [
            Metric("requests_total", "counter", "Completion requests by outcome.", requests),
            Metric("divergences_total", "counter", "Calls that diverged from the history, by reason.", divergences),
            counter("prompt_tokens_total", "Prompt tokens.", self.num_prompt),
            counter("encoded_tokens_total", "Prompt tokens that were tokenized from text.", self.num_encoded),
            counter("sampled_tokens_total", "Tokens that the engine sampled.", self.num_sampled),
            counter("aborted_total", "Aborted generations.", self.num_aborted),
            counter("rewards_total", "Accepted rewards.", self.num_rewards),
            summary(
                "first_chunk_seconds",
                "Time from the request to the engine until its first chunk.",
                total=self._first_chunk_s,
                count=self._num_first_chunks,
            ),
            gauge("episodes", "Episodes in memory.", num_episodes),
            gauge("running", "Requests in flight.", num_running),
            *_replica_metrics(replicas),
        ]
        return metrics_text(metrics, prefix=PREFIX)


def _replica_metrics(replicas: Sequence[ReplicaState]) -> Iterator[Metric]:
    if not replicas:
        return
    by_name = {labels(replica=replica.name): replica for replica in replicas}
    up = {name: float(replica.is_up) for name, replica in by_name.items()}
    yield Metric("replica_up", "gauge", "Whether a sampler answers.", up)
    running = {name: replica.num_running for name, replica in by_name.items()}
    yield Metric("replica_running", "gauge", "Completions in flight at a sampler.", running)
    requests = {name: replica.num_requests for name, replica in by_name.items()}
    yield Metric("replica_requests_total", "counter", "Completion requests sent to a sampler.", requests)
