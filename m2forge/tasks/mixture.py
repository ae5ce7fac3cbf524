"""Number of units of each domain in a batch, such that ratios hold in every batch and in the long run.

    w_d = ratio_d · n                   exact share of domain d in a batch of n units
    c_d(t) ∈ {⌊w_d⌋, ⌈w_d⌉}            number of units in batch t, Σ_d c_d(t) = n
    |t·w_d − Σ_{s≤t} c_d(s)| < 1        after any number of batches

Every batch gives each domain ⌊w_d⌋. The remaining m = Σ_d f_d units, f_d = w_d − ⌊w_d⌋, go one each to the domains with
the earliest deadline of the next extra unit: the k-th extra unit of d is due by batch ⌈k / f_d⌉, and not before batch
⌊(k − 1) / f_d⌋ + 1. The largest-remainder method with carried-over rounding is simpler, but with four domains it can be
off by more than a unit. These are fair schedules (Baruah et al., 1996): earliest deadline first keeps every bound while
at most two units remain; if three remain, it chooses the one domain to leave out, which is the same problem. So there
are at most four domains.
"""

from collections.abc import Mapping
from fractions import Fraction
from math import ceil, floor
from typing import Generic, TypeVar

from m2forge.errors import ConfigError, RecordError

MAX_DOMAINS = 4

Name = TypeVar("Name", bound=str)


class Mixture(Generic[Name]):
    """Generates the counts of consecutive batches. Its state is the number of extra units of each domain and the number
    of batches."""

    def __init__(
        self,
        ratios: Mapping[Name, Fraction],
        num_units: int,
        state: Mapping[str, int] | None = None,
        num_batches: int = 0,
    ) -> None:
        """`state` and `num_batches`: extras and batches of an earlier mixture of the same ratios to resume from."""
        if not 0 < len(ratios) <= MAX_DOMAINS or any(ratio < 0 for ratio in ratios.values()):
            raise ConfigError(f"mixture: expected 1 to {MAX_DOMAINS} ratios of at least 0, received {dict(ratios)}")
        if sum(ratios.values()) != 1:
            raise ConfigError(f"mixture: expected ratios that add up to 1, received {dict(ratios)}")
        due = {name: ratio * num_units for name, ratio in ratios.items()}
        self._base = {name: floor(units) for name, units in due.items()}
        self._part = {name: units - floor(units) for name, units in due.items()}
        self._num_extra = int(sum(self._part.values()))
        self.num_batches = num_batches
        self.extras = {name: (state or {}).get(name, 0) for name in ratios}
        for name, num in self.extras.items():
            if not abs(self._part[name] * num_batches - num) < 1:
                raise RecordError(f"mixture: state: {name}: {num} extra units in {num_batches} batches are not its own")

    def next(self) -> dict[Name, int]:
        """Number of units of each domain in the next batch."""
        self.num_batches += 1
        chosen = self._chosen()
        for name in chosen:
            self.extras[name] += 1
        return {name: base + (name in chosen) for name, base in self._base.items()}

    def _chosen(self) -> set[Name]:
        """The domains that get one unit more than their floor in batch `num_batches`."""
        some = [name for name, part in self._part.items() if part]
        if self._num_extra <= len(some) // 2:
            return set(_first_due(some, self._part, self.extras, self.num_batches, self._num_extra))
        # Choose the domains to leave out by the same rule: the complement of a fair schedule is fair.
        rest = {name: 1 - self._part[name] for name in some}
        left_out = {name: self.num_batches - 1 - self.extras[name] for name in some}
        num_left_out = len(some) - self._num_extra
        return set(some) - set(_first_due(some, rest, left_out, self.num_batches, num_left_out))


def _first_due(
    names: list[Name], part: Mapping[Name, Fraction], given: Mapping[Name, int], batch: int, num: int
) -> list[Name]:
    """The `num` eligible domains with the earliest deadlines in this batch."""
    open_ = [name for name in names if floor(given[name] / part[name]) + 1 <= batch]
    return sorted(open_, key=lambda name: (ceil((given[name] + 1) / part[name]), name))[:num]
