"""Gateway counters, and their Prometheus text.

The text format is one line "name{label="value"} number" per metric, after the "# HELP" and "# TYPE" lines of its name
(https://prometheus.io/docs/instrumenting/exposition_formats/). No metric contains an episode id, a key or text.
"""

from collections import Counter
from collections.abc import Mapping
from enum import StrEnum

from m2forge.gateway.divergence import Divergence

TEXT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
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

    def to_text(self, num_episodes: int, num_running: int) -> str:
        requests = {
            f'{{dialect="{dialect}",outcome="{outcome}"}}': float(number)
            for (dialect, outcome), number in sorted(self._num_requests.items())
        }
        divergences = {f'{{reason="{reason}"}}': float(number) for reason, number in self._num_divergences.items()}
        first = {"_sum": self._first_chunk_s, "_count": float(self._num_first_chunks)}
        figures: list[tuple[str, str, str, Mapping[str, float]]] = [
            ("requests_total", "counter", "Requests for completions by what became of them.", requests),
            ("divergences_total", "counter", "Calls that did not simply go on, by the reason.", divergences),
            ("prompt_tokens_total", "counter", "Tokens of prompts.", {"": self.num_prompt}),
            ("encoded_tokens_total", "counter", "Of these, tokens made from text.", {"": self.num_encoded}),
            ("sampled_tokens_total", "counter", "Tokens that the engine sampled.", {"": self.num_sampled}),
            ("aborted_total", "counter", "Generations that were broken off.", {"": self.num_aborted}),
            ("rewards_total", "counter", "Rewards that were taken.", {"": self.num_rewards}),
            ("first_chunk_seconds", "summary", "From the engine being asked to its first chunk.", first),
            ("episodes", "gauge", "Episodes in memory.", {"": num_episodes}),
            ("running", "gauge", "Requests in flight.", {"": num_running}),
        ]
        return "".join(line for figure in figures for line in _lines(*figure))


def _lines(name: str, kind: str, description: str, values: Mapping[str, float]) -> list[str]:
    full_name = PREFIX + name
    head = [f"# HELP {full_name} {description}\n", f"# TYPE {full_name} {kind}\n"]
    return head + [f"{full_name}{suffix} {float(value)!r}\n" for suffix, value in values.items()]
