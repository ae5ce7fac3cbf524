"""The server's counters, and their text for Prometheus.

The text format has one line "name{label="value"} number" per figure, after the lines "# HELP" and "# TYPE" of its name
(https://prometheus.io/docs/instrumenting/exposition_formats/).
"""

import re
from collections import Counter
from collections.abc import Mapping
from enum import StrEnum

from m2forge.protocols import Chunk, EngineState

TEXT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
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
        by_outcome = {f'{{outcome="{outcome}"}}': float(number) for outcome, number in self._num_requests.items()}
        first = {"_sum": self._first_chunk_s, "_count": float(self._num_first_chunks)}
        lines = [
            *_figure("requests_total", "counter", "Requests by what became of them.", by_outcome),
            *_figure("sampled_tokens_total", "counter", "Tokens sent.", {"": self._num_sampled_tokens}),
            *_figure("first_chunk_seconds", "summary", "From a request to its first chunk.", first),
            *_figure("running", "gauge", "Completions under way.", {"": state.num_running}),
            *_figure("waiting", "gauge", "Completions that wait for room.", {"": state.num_waiting}),
            *_figure("policy_step", "gauge", "Step of the policy that samples.", {"": state.version.step}),
        ]
        for name, value in sorted(engine_metrics.items()):
            # An engine's counters are "total_…" in its metrics and "…_total" in Prometheus.
            counted = name.removeprefix("total_")
            kind, shown = ("gauge", name) if counted == name else ("counter", f"{counted}_total")
            lines += _figure(f"engine_{shown}", kind, "A figure of the engine's own.", {"": value})
        return "".join(f"{line}\n" for line in lines)


def _figure(name: str, kind: str, description: str, values: Mapping[str, float]) -> list[str]:
    """The lines of one metric; `values` by the suffix or labels after its name."""
    full_name = PREFIX + re.sub(r"[^a-zA-Z0-9_]", "_", name)
    head = [f"# HELP {full_name} {description}", f"# TYPE {full_name} {kind}"]
    return head + [f"{full_name}{suffix} {_number(value)}" for suffix, value in values.items()]


def _number(value: float) -> str:
    text = repr(float(value))
    return {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}.get(text, text)
