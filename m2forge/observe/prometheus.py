"""The Prometheus text format: metrics in, the body of a `/metrics` response out.

A metric is its "# HELP" and "# TYPE" lines and one line "name{label="value"} number" per value
(https://prometheus.io/docs/instrumenting/exposition_formats/).
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

TEXT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""The content type of the response."""

_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
_HELP_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n"})


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    """Characters that Prometheus forbids in a name are written as underscores."""
    kind: Literal["counter", "gauge", "summary"]
    help: str
    values: Mapping[str, float]
    """By what follows the name: nothing, `labels(...)`, or "_sum" and "_count" of a summary."""

    def to_text(self, prefix: str) -> str:
        name = prefix + re.sub(r"[^a-zA-Z0-9_]", "_", self.name)
        head = f"# HELP {name} {self.help.translate(_HELP_ESCAPES)}\n# TYPE {name} {self.kind}\n"
        return head + "".join(f"{name}{suffix} {_number(value)}\n" for suffix, value in self.values.items())


def counter(name: str, help: str, value: float) -> Metric:
    return Metric(name, "counter", help, {"": value})


def gauge(name: str, help: str, value: float) -> Metric:
    return Metric(name, "gauge", help, {"": value})


def summary(name: str, help: str, *, total: float, count: int) -> Metric:
    """A summary without quantiles: the sum and the number of observations."""
    return Metric(name, "summary", help, {"_sum": total, "_count": count})


def labels(**values: str) -> str:
    """The labels of one value of a metric, `{name="value"}`."""
    pairs = ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in values.items())
    return f"{{{pairs}}}"


def metrics_text(metrics: Iterable[Metric], *, prefix: str) -> str:
    """The whole text; `prefix` begins the name of every metric."""
    return "".join(metric.to_text(prefix) for metric in metrics)


def _number(value: float) -> str:
    text = repr(float(value))
    return {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}.get(text, text)
