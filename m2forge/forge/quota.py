"""Quotas: how many units of each domain the batch of a step holds. Labels are those of the pool: STAGE/DOMAIN.

Quotas of fixed-size batches come from `tasks/mixture.py`: a function of the configuration and the step alone, the same
that the curriculum draws by. So step t trains units that were drawn for batch t's stage, and a stage ends for both
after `num_batches` batches. The size of a token-limited batch is unknown until it is claimed, so every size m has
quotas:

    c_d(m) ∈ {⌊m·ratio_d⌋, ⌈m·ratio_d⌉},    Σ_d c_d(m) = m

The domains furthest behind their ratio over the batches so far are rounded up first. No batch crosses the end of its
stage, and none takes more of a domain than the curriculum drew for the stage, so the last batches of a stage may depart
from the rounding above. The sizes of the batches so far determine all of this; a restarted trainer reads them from the
pool.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from fractions import Fraction
from math import floor

from m2forge.pool.stored import make_label
from m2forge.tasks.config import CurriculumConfig, StageConfig
from m2forge.tasks.mixture import Mixture


def batch_quotas(config: CurriculumConfig, units_per_group: int = 1) -> Iterator[dict[str, int]]:
    """Yield the quotas of each step, without end."""
    for stage in config.stages:
        mixture = Mixture(stage.ratios(), config.batch_groups)
        while mixture.num_batches != stage.num_batches:
            counts = mixture.next()
            yield {make_label(stage.name, domain): num * units_per_group for domain, num in counts.items()}


class SizedQuotas:
    """Quotas of the next batch at any size. A stage has as many units as its `num_batches` batches of `batch_groups`
    groups."""

    def __init__(self, config: CurriculumConfig, sizes: Iterable[int] = (), units_per_group: int = 1) -> None:
        """`sizes`: number of units of each batch so far."""
        self._config, self._units_per_group = config, units_per_group
        self._left: dict[str, int] | None = None
        """Units of the stage not yet claimed, by label; None in the last stage, which has no end."""
        self._enter(0)
        for num_units in sizes:
            self.note(num_units)

    @property
    def max_units(self) -> int:
        """Units of the largest batch: `batch_groups` groups, or the rest of the stage if smaller."""
        whole = self._config.batch_groups * self._units_per_group
        return whole if self._left is None else min(whole, sum(self._left.values()))

    def quotas(self, num_units: int) -> dict[str, int]:
        exact = {label: ratio * num_units for label, ratio in self._ratios.items()}
        limits = dict.fromkeys(exact, num_units) if self._left is None else self._left
        counts = {label: min(floor(due), limits[label]) for label, due in exact.items()}
        rounded = [label for label, due in exact.items() if counts[label] < due and counts[label] < limits[label]]
        rounded.sort(key=lambda label: counts[label] - exact[label] - self._due[label])
        for label in rounded[: num_units - sum(counts.values())]:
            counts[label] += 1
        while sum(counts.values()) < num_units:
            # Near its end the stage has too few units left of some domain.
            some = [label for label in counts if counts[label] < limits[label]]
            counts[max(some, key=lambda label: exact[label] + self._due[label] - counts[label])] += 1
        return counts

    def note(self, num_units: int) -> None:
        """Record that a batch of `num_units` units was claimed."""
        given = self.quotas(num_units)
        for label, ratio in self._ratios.items():
            self._due[label] += ratio * num_units - given[label]
        if self._left is not None:
            self._left = {label: num - given[label] for label, num in self._left.items()}
            if not any(self._left.values()):
                self._enter(self._stage + 1)

    def _enter(self, index: int) -> None:
        self._stage: int = index
        stage = self._config.stages[index]
        self._ratios = {make_label(stage.name, domain): ratio for domain, ratio in stage.ratios().items()}
        self._due: dict[str, Fraction] = dict.fromkeys(self._ratios, Fraction(0))
        """Units that each domain lacks to its ratio in this stage; negative if it had too many."""
        self._left = self._drawn(stage)

    def _drawn(self, stage: StageConfig) -> dict[str, int] | None:
        if stage.num_batches is None:
            return None
        mixture, drawn = Mixture(stage.ratios(), self._config.batch_groups), Counter[str]()
        for _ in range(stage.num_batches):
            for domain, num in mixture.next().items():
                drawn[make_label(stage.name, domain)] += num * self._units_per_group
        return dict(drawn)
