"""Configuration of the curriculum: stages, the domains of each with their ratios, and how difficulty follows success.

    [curriculum]
    batch_groups = 16
    pace = { num_groups = 32, raise_above = 0.8, lower_below = 0.3, width = 2 }

    [[curriculum.stages]]
    name = "early"
    num_batches = 40

    [curriculum.stages.domains.reasoning]
    ratio = 0.75
    context = 512
    families = [{ name = "counters", difficulty = [1, 4] }]

    [curriculum.stages.domains.agent]
    ratio = 0.25
    context = 1024
    families = [{ name = "chain", difficulty = [1, 3] }, { name = "gather", difficulty = [1, 3] }]

    [[curriculum.stages]]
    name = "late"

    [curriculum.stages.domains.agent]
    ratio = 1.0
    context = 2048
    families = [{ name = "chain", difficulty = [2, 8], start = 3 }]

Ratios are relative to each other: 3 and 1 are 0.75 and 0.25. The default values are ours: none has been published.
"""

from fractions import Fraction
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from m2forge.config import Config
from m2forge.records import Domain

Count = Annotated[int, Field(gt=0)]
Level = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
OnRaise = Literal["verifier_error", "wrong"]

GYM_PREFIX = "reasoning-gym:"
"""Prefix of the names of families whose tasks and scorers come from the library."""


class PaceConfig(Config):
    """When difficulty changes. It rises by a level once the mean pass rate of the last `num_groups` groups exceeds
    `raise_above` and falls by a level once it is below `lower_below`; a change resets the counted groups."""

    num_groups: Count = 16
    raise_above: Share = 0.75
    lower_below: Share = 0.25
    width: Count = 2
    """Number of adjacent levels from which tasks are drawn at a time."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.lower_below >= self.raise_above:
            raise ValueError(f"raise_above ({self.raise_above}) must exceed lower_below ({self.lower_below})")
        return self


class FamilyConfig(Config):
    name: str = Field(min_length=1)
    """Name of the family in `tasks/catalog.py`."""
    difficulty: tuple[Level, Level]
    """The lowest and the highest level that the stage allows."""
    start: Level | None = None
    """Initial lowest level if no earlier stage used the family; None: the lowest allowed level."""
    on_raise: OnRaise = "verifier_error"
    """How to treat a reasoning-gym scorer that raises. verifier_error: as for every verifier (`tasks/runner.py`).
    wrong: the answer is wrong, for scorers that are known to raise at ordinary wrong answers."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.on_raise == "wrong" and not self.name.startswith(GYM_PREFIX):
            raise ValueError(f"on_raise = 'wrong' is for families {GYM_PREFIX}…, received {self.name!r}; leave it out")
        lowest, highest = self.difficulty
        if lowest > highest:
            raise ValueError(f"difficulty: the lowest level comes first, received [{lowest}, {highest}]")
        if self.start is not None and not lowest <= self.start <= highest:
            raise ValueError(f"start ({self.start}) must lie within difficulty [{lowest}, {highest}]")
        return self


class DomainConfig(Config):
    ratio: float = Field(gt=0, le=1e6)
    """The domain's share of a batch, relative to the other domains."""
    context: Count
    """Maximum context of a call in tokens, prompt plus completion."""
    families: tuple[FamilyConfig, ...] = Field(min_length=1)
    """Families of the domain, used round-robin."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [family.name for family in self.families]
        if len(set(names)) < len(names):
            raise ValueError(f"families: expected each once, received {names}")
        return self


class StageConfig(Config):
    name: str = Field(min_length=1)
    num_batches: Count | None = None
    """Number of batches in the stage; leave it out for the last stage, which does not end."""
    domains: dict[Domain, DomainConfig] = Field(min_length=1)

    def ratios(self) -> dict[Domain, Fraction]:
        """Exact shares that add up to 1, from the decimal notation: 0.1 is a tenth."""
        ratios = {domain: Fraction(str(self.domains[domain].ratio)) for domain in sorted(self.domains)}
        total = sum(ratios.values())
        return {domain: ratio / total for domain, ratio in ratios.items()}


class VerifyConfig(Config):
    """The worker processes that run families' code: `draw`, `tools`, `call` and `verify` (`tasks/runner.py`)."""

    num_workers: Count = 1
    timeout_s: Annotated[float, Field(gt=0)] = 1.5
    """Limit of CPU time plus sleep (`tasks/time_limit.py`) for one verdict or one tool call; equal to wall-clock time
    on a machine with idle CPUs. A slower verdict is perf 0 with reason `limit`."""
    draw_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """The same limit for drawing a task and for loading its verifier's data; exceeding it ends the run."""
    max_memory_bytes: Annotated[int, Field(ge=256 << 20)] = 512 << 20
    """Limit of a worker's address space; a verdict that exceeds it is perf 0 with reason `limit`."""
    max_error_share: Share = 0.05
    """The run ends when more than this share of the last 200 verdicts are `verifier_error`."""


class CurriculumConfig(Config):
    seed: int = Field(default=0, ge=0)
    batch_groups: Count
    """Groups per batch; every domain of a stage gets at least one."""
    pace: PaceConfig = PaceConfig()
    stages: tuple[StageConfig, ...] = Field(min_length=1)

    @property
    def family_names(self) -> list[str]:
        """Distinct names of the families of all stages."""
        domains = [domain for stage in self.stages for domain in stage.domains.values()]
        return list(dict.fromkeys(family.name for domain in domains for family in domain.families))

    @property
    def wrong_on_raise(self) -> frozenset[str]:
        """Names of the families with `on_raise = "wrong"`."""
        return frozenset(
            family.name
            for stage in self.stages
            for domain in stage.domains.values()
            for family in domain.families
            if family.on_raise == "wrong"
        )

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [stage.name for stage in self.stages]
        if len(set(names)) < len(names):
            raise ValueError(f"stages: expected a different name for each, received {names}")
        for name in self.family_names:
            domains = [domain for stage in self.stages for domain in stage.domains.values()]
            if len({family.on_raise for domain in domains for family in domain.families if family.name == name}) > 1:
                raise ValueError(f"stages: {name}: expected the same on_raise in every stage")
        for stage in self.stages[:-1]:
            if stage.num_batches is None:
                raise ValueError(
                    f"stages: {stage.name}: num_batches is missing; set it, because only the last stage has no end"
                )
        if self.stages[-1].num_batches is not None:
            raise ValueError(f"stages: {names[-1]}: the last stage has no end; leave num_batches out")
        for stage in self.stages:
            for domain, ratio in stage.ratios().items():
                if ratio * self.batch_groups < 1:
                    raise ValueError(
                        f"stages: {stage.name}: a batch of {self.batch_groups} groups cannot hold {domain} at "
                        f"{float(ratio):.3g} of it; raise batch_groups or its ratio"
                    )
        return self
