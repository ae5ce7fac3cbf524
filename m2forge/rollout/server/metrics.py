"""The server's counters, and their Prometheus text."""

from collections import Counter
from collections.abc import Mapping
from enum import StrEnum

from m2forge.observe.prometheus import Metric, counter, gauge, labels, metrics_text, summary
from m2forge.protocols import Chunk, EngineState

PREFIX = "m2forge_rollout_"


class Outcome(StrEnum):
    """How a request ended."""

    ANSWERED = "answered"
    REFUSED = "refused"
    HUNG_UP = "hung_up"
    FAILED = "failed"


class ServerCounts:
    def __init__(self) -> None:
        self._num_requests = Counter(dict.fromkeys(Outcome, 0))
        self._num_sampled_tokens = 0
        self._num_first_chunks, self._first_chunk_s = 0, 0.0

    def note_request(self, outcome: Outcome) -> None:
        self._num_requests[outcome] += 1

    def note_chunk(self, chunk: Chunk) -> None:
        self._num_sampled_tokens += chunk.ids.size

    def note_first_chunk(self, duration_s: float) -> None:
        self._num_first_chunks += 1
        self._first_chunk_s += duration_s

    def to_text(self, state: EngineState, engine_metrics: Mapping[str, float]) -> str:
        by_outcome = {labels(outcome=outcome): number for outcome, number in self._num_requests.items()}
        metrics = [
            Metric("requests_total", "counter", "Requests by outcome.", by_outcome),
            counter("sampled_tokens_total", "Tokens sent.", self._num_sampled_tokens),
            summary(
                "first_chunk_seconds",
                "Time from a request until its first chunk.",
                total=self._first_chunk_s,
                count=self._num_first_chunks,
            ),
            gauge("running", "Running completions.", state.num_running),
            gauge("waiting", "Queued completions.", state.num_waiting),
            gauge("policy_step", "Step of the policy version that samples.", state.version.step),
        ]
        for name, value in sorted(engine_metrics.items()):
            # An engine's counters are "total_…" in its metrics and "…_total" in Prometheus.
            counted = name.removeprefix("total_")
            if counted == name:
                metrics.append(gauge(f"engine_{name}", "A gauge of the engine.", value))
            else:
                metrics.append(counter(f"engine_{counted}_total", "A counter of the engine.", value))
        return metrics_text(metrics, prefix=PREFIX)
