"""How many groups of each domain the batch of a step holds: a function of the configuration and the step alone."""

from collections.abc import Iterator

from m2forge.tasks.config import CurriculumConfig
from m2forge.tasks.mixture import Mixture


def batch_quotas(config: CurriculumConfig) -> Iterator[dict[str, int]]:
    """Of the first step, the second, and so on, for ever."""
    for stage in config.stages:
        mixture = Mixture(stage.ratios(), config.batch_groups)
        while mixture.num_batches != stage.num_batches:
            yield {str(domain): num for domain, num in mixture.next().items()}
