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
    families = [{ source = "counters", difficulty = [1, 4] }]

    [curriculum.stages.domains.agent]
    ratio = 0.25
    context = 1024
    families = [{ source = "chain", difficulty = [1, 3] }, { source = "gather", difficulty = [1, 3] }]

    [[curriculum.stages]]
    name = "late"

    [curriculum.stages.domains.agent]
    ratio = 1.0
    context = 2048
    families = [{ source = "chain", difficulty = [2, 8], start = 3 }]

Ratios are relative to each other: 3 and 1 are 0.75 and 0.25. The default values are ours: none has been published.
A family of your own is `{ source = "my_tasks.py:Stack" }`; without `difficulty` a stage draws from all its levels.
"""

from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from m2forge.config import Config
from m2forge.errors import ConfigError
from m2forge.records import Domain
from m2forge.tasks.source import GYM_PREFIX, SourceKind, family_key, parse_source

Count = Annotated[int, Field(gt=0)]
Level = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]


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
    renamed_keys: ClassVar[Mapping[str, str]] = {"name": "source"}

    source: str = Field(min_length=1)
    """Where the family comes from (`tasks/source.py`): the name of an embedded one, FILE.py:NAME, PACKAGE.MODULE:NAME,
    FILE.jsonl, reasoning-gym:NAME, verifiers:ENV or folders:PATH. Relative paths count from the working directory."""
    difficulty: tuple[Level, Level] | None = None
    """The lowest and the highest level that the stage allows; None: all levels of the family."""
    start: Level | None = None
    """Initial lowest level if no earlier stage used the family; None: the lowest allowed level."""
    on_raise: Literal["verifier_error", "wrong"] = "verifier_error"
    """How to treat a reasoning-gym scorer that raises. verifier_error: as for every verifier (`tasks/runner.py`).
    wrong: the answer is wrong, for scorers that are known to raise at ordinary wrong answers."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        try:
            kind = parse_source(self.source).kind
        except ConfigError as error:
            raise ValueError(str(error)) from error
        if self.on_raise == "wrong" and kind is not SourceKind.GYM:
            raise ValueError(
                f"on_raise = 'wrong' is for families {GYM_PREFIX}…, received {self.source!r}; leave it out"
            )
        lowest, highest = self.difficulty or (0, self.start or 0)
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
        sources = [family.source for family in self.families]
        if len(set(sources)) < len(sources):
            raise ValueError(f"families: expected each once, received {sources}")
        return self


class StageConfig(Config):
    name: str = Field(min_length=1)
    num_batches: Count | None = None
    """Number of batches in the stage; leave it out for the last stage, which does not end."""
    domains: dict[Domain, DomainConfig] = Field(min_length=1)

    def families(self) -> Iterator[tuple[str, Domain, FamilyConfig]]:
        """Key, domain and configuration of every family."""
        for domain, settings in self.domains.items():
            for family in settings.families:
                yield family_key(family.source, domain), domain, family

    def ratios(self) -> dict[Domain, Fraction]:
        """Exact shares that add up to 1, from the decimal notation: 0.1 is a tenth."""
        ratios = {domain: Fraction(str(self.domains[domain].ratio)) for domain in sorted(self.domains)}
        total = sum(ratios.values())
        return {domain: ratio / total for domain, ratio in ratios.items()}


class JudgeConfig(Config):
    """The model that judges the criteria of `judge` verifiers, at any endpoint with OpenAI's chat completions."""

    url: str = Field(pattern=r"^https?://")
    """Base URL, such as http://127.0.0.1:8400/v1."""
    model: str = Field(min_length=1)
    key_env: str | None = None
    """Environment variable that holds the API key; None: no key is sent."""
    timeout_s: Annotated[float, Field(gt=0)] = 120.0
    """Timeout of one request, and with `max_retries` of a verdict."""
    max_retries: Annotated[int, Field(ge=0)] = 3
    """Retries of a request that failed; then the attempt is retried, without a verdict."""
    max_tokens: Count = 2048
    """Maximum tokens of the judge's response."""


class VerifyConfig(Config):
    """The worker processes that run families' code: `draw`, `tools`, `call` and `verify` (`tasks/runner.py`)."""

    num_workers: Count = 1
    timeout_s: Annotated[float, Field(gt=0)] = 1.5
    """Limit of CPU time plus sleep (`tasks/time_limit.py`) for one verdict or one tool call; equal to wall-clock time
    on a machine with idle CPUs. A slower verdict is perf 0 with reason `limit`."""
    command_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """Wall-clock limit of a verifier that runs a command."""
    judge: JudgeConfig | None = None
    draw_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """The same limit for drawing a task and for loading its verifier's data; exceeding it ends the run."""
    max_memory_bytes: Annotated[int, Field(ge=256 << 20)] = 512 << 20
    """Limit of a worker's address space; a verdict that exceeds it is perf 0 with reason `limit`."""
    base_image: str | None = None
    """Image that stands for the base image of a task folder that is not among those of `m2forge image list`, such as
    `host`; None: such a folder ends the run."""
    max_error_share: Share = 0.05
    """The run ends when more than this share of the last 200 verdicts are `verifier_error`."""


class CurriculumConfig(Config):
    seed: int = Field(default=0, ge=0)
    batch_groups: Count
    """Groups per batch; every domain of a stage gets at least one."""
    pace: PaceConfig = PaceConfig()
    stages: tuple[StageConfig, ...] = Field(min_length=1)

    @property
    def family_keys(self) -> list[str]:
        """Distinct keys of the families of all stages."""
        return list(dict.fromkeys(key for stage in self.stages for key, _, _ in stage.families()))

    @property
    def wrong_on_raise(self) -> frozenset[str]:
        """Keys of the families with `on_raise = "wrong"`."""
        return frozenset(
            key for stage in self.stages for key, _, family in stage.families() if family.on_raise == "wrong"
        )

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [stage.name for stage in self.stages]
        if len(set(names)) < len(names):
            raise ValueError(f"stages: expected a different name for each, received {names}")
        families = [(key, family) for stage in self.stages for key, _, family in stage.families()]
        for wanted in self.family_keys:
            if len({family.on_raise for key, family in families if key == wanted}) > 1:
                raise ValueError(f"stages: {wanted}: expected the same on_raise in every stage")
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
