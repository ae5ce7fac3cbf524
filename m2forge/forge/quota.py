"""How many units of each domain the batch of a step holds.

Batches of one size have theirs by `tasks/mixture.py`: a function of the configuration and the step alone. The size of a
batch that a number of tokens bounds is not known before it is taken, so for every size m there are quotas:

    c_d(m) ∈ {⌊m·ratio_d⌋, ⌈m·ratio_d⌉},    Σ_d c_d(m) = m

Who is rounded up is decided by what is due: first comes the domain that the batches so far have left furthest behind
its ratio. The sizes of those batches say all, so a trainer that starts again reads them in the pool.
"""

from collections.abc import Iterable, Iterator
from fractions import Fraction
from math import floor

from m2forge.tasks.config import CurriculumConfig
from m2forge.tasks.mixture import Mixture


def batch_quotas(config: CurriculumConfig) -> Iterator[dict[str, int]]:
    """Of the first step, the second, and so on, for ever."""
    for stage in config.stages:
        mixture = Mixture(stage.ratios(), config.batch_groups)
        while mixture.num_batches != stage.num_batches:
            yield {str(domain): num for domain, num in mixture.next().items()}


class SizedQuotas:
    """Quotas of the next batch, whatever its size. A stage lasts as many units as its batches of `batch_groups`."""

    def __init__(self, config: CurriculumConfig, sizes: Iterable[int] = ()) -> None:
        """`sizes`: of the batches so far."""
        self._config = config
        self._enter(0)
        for num_units in sizes:
            self.note(num_units)

    def quotas(self, num_units: int) -> dict[str, int]:
        exact = {domain: ratio * num_units for domain, ratio in self._ratios.items()}
        counts = {domain: floor(due) for domain, due in exact.items()}
        rounded = [domain for domain, due in exact.items() if due != counts[domain]]
        rounded.sort(key=lambda domain: counts[domain] - exact[domain] - self._due[domain])
        for domain in rounded[: num_units - sum(counts.values())]:
            counts[domain] += 1
        return counts

    def note(self, num_units: int) -> None:
        """A batch of so many units was taken."""
        given = self.quotas(num_units)
        for domain, ratio in self._ratios.items():
            self._due[domain] += ratio * num_units - given[domain]
        self._num_units += num_units
        stage = self._config.stages[self._stage]
        if stage.num_batches is not None and self._num_units >= stage.num_batches * self._config.batch_groups:
            self._enter(self._stage + 1)

    def _enter(self, stage: int) -> None:
        self._stage: int = stage
        self._ratios = {str(domain): ratio for domain, ratio in self._config.stages[stage].ratios().items()}
        self._due: dict[str, Fraction] = dict.fromkeys(self._ratios, Fraction(0))
        """What each domain has got too little in this stage; below 0, too much."""
        self._num_units: int = 0
        """Taken in this stage."""
