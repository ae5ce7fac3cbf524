"""Headline figures of a run in the list: a few numbers that say how it went, by stage."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from m2forge.corpus.manifest import Kind, Manifest
from m2forge.evaluate.report.report import EvalReport
from m2forge.page.latest import HELD_OUT_LOSS, Latest
from m2forge.records import JsonValue


@dataclass(frozen=True, slots=True)
class Figure:
    label: str
    value: float
    format: Literal["number", "count", "percent"] = "number"
    first: float | None = None
    """The value that the run started from, where the change is the result."""

    def to_json(self) -> dict[str, JsonValue]:
        return asdict(self)


def run_figures(stage: str, latest: Latest, checks: Sequence[JsonValue]) -> tuple[Figure, ...]:
    return tuple(_run_figures(stage, latest, checks))


def _run_figures(stage: str, latest: Latest, checks: Sequence[JsonValue]) -> Iterator[Figure]:
    values = latest.values
    rates = [check["success"] for check in checks if isinstance(check, Mapping)]
    successes = [rate for rate in rates if isinstance(rate, float)]
    if successes:
        yield Figure("held-out success", successes[-1], "percent", successes[0] if len(successes) > 1 else None)
    if HELD_OUT_LOSS in values:
        yield Figure("held-out loss", values[HELD_OUT_LOSS])
    if "reward" in values:
        yield Figure("reward", values["reward"])
    if "perf" in values:
        yield Figure("pass rate", values["perf"], "percent")
    if "loss" in values and stage != "rl":
        # The policy loss of RL is near zero by construction and says nothing about the result.
        yield Figure("loss", values["loss"])
    if "tokens_per_s" in values:
        yield Figure("tokens/s", values["tokens_per_s"], "count")
    elif "tokens_computed" in values and latest.step_s:
        yield Figure("tokens/s", values["tokens_computed"] / latest.step_s, "count")
    if "num_tokens" in values:
        yield Figure("tokens", values["num_tokens"], "count")


def eval_figures(report: EvalReport) -> tuple[Figure, ...]:
    """Held-out loss over all domains, and the score of each suite; a value that is not finite is left out."""
    figures = []
    if report.losses:
        whole = report.losses[0]
        figures.append(Figure("held-out loss", whole.nats_per_token))
        if whole.bits_per_byte is not None:
            figures.append(Figure("bits/byte", whole.bits_per_byte))
    figures += [Figure(suite, report.score(suite), "percent") for suite in report.suites]
    return tuple(figure for figure in figures if math.isfinite(figure.value))


def corpus_figures(manifest: Manifest) -> tuple[Figure, ...]:
    """Documents of long samples are in the plain sets too, so only those are counted."""
    plain = [one for one in manifest.sets if one.kind is Kind.PLAIN]
    return (
        Figure("tokens", sum(one.num_tokens for one in plain), "count"),
        Figure("documents", sum(one.num_documents for one in plain), "count"),
        Figure("domains", len({one.domain for one in plain}), "count"),
    )
