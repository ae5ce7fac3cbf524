"""The records of the double."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    key: str
    value: float
    timestamp: int
    step: int
