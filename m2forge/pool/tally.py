"""Counts units by difficulty: submitted, trained, requeued, and dropped for each reason.

Counts are stored separately from the units, so that they outlive them.
"""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from sqlalchemy import Connection, select

from m2forge.pool.dialect import add_up
from m2forge.pool.schema import tally_table
from m2forge.pool.state import DropReason

SUBMITTED, TRAINED, REQUEUED = "submitted", "trained", "requeued"


def dropped(reason: DropReason) -> str:
    return f"dropped_{reason}"


@dataclass(frozen=True, slots=True)
class Tally:
    counts: dict[str, dict[float, int]]
    """Number of units by kind and by the midpoint of the difficulty bin."""

    def total(self, kind: str) -> int:
        return sum(self.counts.get(kind, {}).values())

    def mean_difficulty(self, kind: str) -> float | None:
        """Mean difficulty of a kind; compared with the submitted units it shows if easy or hard tasks were lost."""
        bins = self.counts.get(kind, {})
        total = sum(bins.values())
        return sum(middle * count for middle, count in bins.items()) / total if total else None


def count(connection: Connection, kind: str, difficulties: Iterable[float], width: float, by: int = 1) -> None:
    bins = Counter((math.floor(difficulty / width) + 0.5) * width for difficulty in difficulties)
    rows = [{"kind": kind, "difficulty": middle, "num_units": by * bins[middle]} for middle in sorted(bins)]
    add_up(connection, tally_table, rows, "num_units")


def read_tally(connection: Connection) -> Tally:
    counts: dict[str, dict[float, int]] = {}
    for kind, middle, number in connection.execute(select(tally_table).order_by(*tally_table.primary_key)):
        if number:
            counts.setdefault(kind, {})[middle] = number
    return Tally(counts)
