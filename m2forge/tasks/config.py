"""What is trained on, and when: stages, the domains of each at their ratios, and how difficulty follows success.

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

Ratios count against each other: 3 and 1 are 0.75 and 0.25. The figures that are defaults here are ours: none has been
published.
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
"""Names of families begin with it whose tasks and scorers are the library's."""


class PaceConfig(Config):
    """When difficulty moves. It goes up a level once the mean pass rate of the last `num_groups` groups exceeds
    `raise_above`, down a level once it is below `lower_below`; then those groups are forgotten."""

    num_groups: Count = 16
    raise_above: Share = 0.75
    lower_below: Share = 0.25
    width: Count = 2
    """Neighbouring levels that tasks are drawn from at a time."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.lower_below >= self.raise_above:
            raise ValueError(f"raise_above ({self.raise_above}) must exceed lower_below ({self.lower_below})")
        return self


class FamilyConfig(Config):
    name: str = Field(min_length=1)
    """As `tasks/catalog.py` knows it."""
    difficulty: tuple[Level, Level]
    """The lowest and the highest level that the stage allows."""
    start: Level | None = None
    """The lowest level drawn where nothing is known from an earlier stage; None: the lowest that is allowed."""
    on_raise: OnRaise = "verifier_error"
    """What it means that a scorer of reasoning-gym raises. verifier_error: what it means of every verifier
    (`tasks/runner.py`). wrong: the answer is wrong, for scorers that are known to raise at ordinary wrong answers."""

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
    """The share of a batch, relative to the other domains'."""
    context: Count
    """The longest context, in tokens, that an agent may send or receive."""
    families: tuple[FamilyConfig, ...] = Field(min_length=1)
    """They take turns."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [family.name for family in self.families]
        if len(set(names)) < len(names):
            raise ValueError(f"families: expected each once, received {names}")
        return self


class StageConfig(Config):
    name: str = Field(min_length=1)
    num_batches: Count | None = None
    """How long it lasts; the last stage does not end, and says nothing here."""
    domains: dict[Domain, DomainConfig] = Field(min_length=1)

    def ratios(self) -> dict[Domain, Fraction]:
        """Shares that add up to 1, exactly as they are written: 0.1 is a tenth."""
        ratios = {domain: Fraction(str(self.domains[domain].ratio)) for domain in sorted(self.domains)}
        total = sum(ratios.values())
        return {domain: ratio / total for domain, ratio in ratios.items()}


class VerifyConfig(Config):
    """The worker processes that run families' code: `draw`, `tools`, `call` and `verify` (`tasks/runner.py`)."""

    num_workers: Count = 1
    timeout_s: Annotated[float, Field(gt=0)] = 1.5
    """Time on a processor and asleep (`tasks/use.py`) of one verdict, or of one call of a tool. On a machine with
    processors to spare it is the wall clock. A slower verdict is perf 0 with reason `limit`."""
    draw_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """The same of drawing a task, and of loading what it is verified with; longer ends the run."""
    max_memory_bytes: Annotated[int, Field(ge=256 << 20)] = 512 << 20
    """Address space of a worker. More is perf 0 with reason `limit`."""
    max_error_share: Share = 0.05
    """When more of the last 200 verdicts than this are `verifier_error`, the run ends."""


class CurriculumConfig(Config):
    seed: int = Field(default=0, ge=0)
    batch_groups: Count
    """Groups of a batch; every domain of a stage gets at least one."""
    pace: PaceConfig = PaceConfig()
    stages: tuple[StageConfig, ...] = Field(min_length=1)

    @property
    def family_names(self) -> list[str]:
        """Those of all stages, each once."""
        domains = [domain for stage in self.stages for domain in stage.domains.values()]
        return list(dict.fromkeys(family.name for domain in domains for family in domain.families))

    @property
    def wrong_on_raise(self) -> frozenset[str]:
        """Names of the families whose `on_raise` is wrong."""
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
                raise ValueError(f"stages: {stage.name}: num_batches is missing; only the last stage goes on for ever")
        if self.stages[-1].num_batches is not None:
            raise ValueError(f"stages: {names[-1]}: the last stage goes on for ever; leave num_batches out")
        for stage in self.stages:
            for domain, ratio in stage.ratios().items():
                if ratio * self.batch_groups < 1:
                    raise ValueError(
                        f"stages: {stage.name}: a batch of {self.batch_groups} groups has no room for {domain} at "
                        f"{float(ratio):.3g} of it; raise batch_groups or its ratio"
                    )
        return self
