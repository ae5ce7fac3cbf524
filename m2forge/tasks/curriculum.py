"""The curriculum: batches of tasks, stage after stage, each with its domains at their ratios.

In: the configuration and the pass rate of every rewarded group. Out: batches. A batch holds every domain of its stage
at the counts of `tasks/mixture.py`, spread evenly, so that any stretch of the queue is mixed. Within a domain the
families alternate, and each draws from the levels that its pace has reached; a family keeps its levels from one stage
to the next, within the bounds of each. All tasks are from the train split.

The next batch depends on the seed, the configuration and the sequence of pass rates. `state()` is JSON; a curriculum
created from it continues exactly.

    curriculum = Curriculum(config)
    for assignment in await curriculum.draw_batch(runner.next_task):
        ...
        curriculum.record(assignment.task, pass_rate=0.25)
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from m2forge.errors import ConfigError, RecordError
from m2forge.records import Domain, JsonValue, Task
from m2forge.tasks.catalog import find_family
from m2forge.tasks.config import CurriculumConfig, FamilyConfig, StageConfig
from m2forge.tasks.family import family_name
from m2forge.tasks.mixture import Mixture
from m2forge.tasks.pace import Pace
from m2forge.tasks.task_set import Split


@dataclass(frozen=True, slots=True)
class Assignment:
    """A task with the settings of its stage."""

    task: Task
    context: int
    """Maximum context of a call in tokens, prompt plus completion."""
    stage: str


@dataclass(frozen=True, slots=True)
class _Choice:
    """The parameters of a task to draw."""

    family: str
    position: int
    """Position in the family's stream of training tasks."""
    lowest: int
    highest: int
    context: int
    stage: str


Draw: TypeAlias = Callable[[str, Split, int, int, int, int], Awaitable[Task]]
"""Maps family, split, seed, position, lowest and highest difficulty to a task."""


class Curriculum:
    def __init__(self, config: CurriculumConfig, *, state: Mapping[str, JsonValue] | None = None) -> None:
        """`state`: state of an earlier curriculum to resume from."""
        self._config = config
        for stage in config.stages:
            _check(stage)
        self._positions = dict.fromkeys(sorted(config.family_names), 0)
        """Number of tasks drawn from each family."""
        self._paces: dict[str, Pace] = {}
        self._turns = dict.fromkeys(Domain, 0)
        self._enter(0)
        if state is not None:
            self.restore(state)

    @property
    def stage(self) -> StageConfig:
        return self._config.stages[self._stage]

    def levels(self) -> dict[str, tuple[int, int]]:
        """The current difficulty range of each family of the stage."""
        names = [family.name for domain in self.stage.domains.values() for family in domain.families]
        return {name: self._paces[name].levels for name in names}

    def pass_rates(self) -> dict[str, float | None]:
        """Pass rate of each family of the stage at these difficulties; None before the first counted group."""
        return {name: self._paces[name].pass_rate for name in self.levels()}

    async def draw_batch(self, draw: Draw) -> list[Assignment]:
        """Draw the next batch with `draw`, such as `TaskRunner.next_task`. Its content is chosen before the first
        await, so pass rates recorded meanwhile affect only the next batch."""
        return [await self._draw(choice, draw) for choice in self._choose_batch()]

    async def draw_task(self, stage: str, domain: Domain, draw: Draw) -> Assignment:
        """Draw a replacement for a task of that stage and domain that was not trained; the stage may be over. It does
        not count towards a batch."""
        found = next((known for known in self._config.stages if known.name == stage and domain in known.domains), None)
        if found is None:
            raise RecordError(f"curriculum: no stage {stage!r} with the domain {domain}; use another pool")
        return await self._draw(self._choose(found, domain), draw)

    async def _draw(self, choice: _Choice, draw: Draw) -> Assignment:
        seed, levels = self._config.seed, (choice.lowest, choice.highest)
        task = await draw(choice.family, "train", seed, choice.position, *levels)
        return Assignment(task, choice.context, choice.stage)

    def _choose_batch(self) -> list[_Choice]:
        if self._mixture.num_batches == self.stage.num_batches:
            self._enter(self._stage + 1)
        counts = self._mixture.next()
        # Unit k of n has position (k + ½) / n in the batch.
        places = [((unit + 0.5) / num, domain) for domain, num in counts.items() for unit in range(num)]
        return [self._choose(self.stage, domain) for _, domain in sorted(places)]

    def record(self, task: Task, pass_rate: float) -> None:
        """Record the pass rate of a rewarded group. Groups that are not trained because all attempts passed, or none,
        count too."""
        pace = self._paces.get(family_name(task))
        if pace is not None:
            pace.record(task.difficulty, pass_rate)

    def state(self) -> dict[str, JsonValue]:
        """State for a checkpoint, as JSON values."""
        return {
            "stage": self.stage.name,
            "num_batches": self._mixture.num_batches,
            "extras": {str(domain): num for domain, num in self._mixture.extras.items()},
            "turns": {str(domain): num for domain, num in self._turns.items()},
            "positions": dict(self._positions),
            "paces": {name: pace.state() for name, pace in self._paces.items()},
        }

    def _choose(self, stage: StageConfig, domain: Domain) -> _Choice:
        settings = stage.domains[domain]
        family = settings.families[self._turns[domain] % len(settings.families)]
        self._turns[domain] += 1
        self._positions[family.name] += 1
        # Clamp levels that another stage has moved to the bounds of this one.
        lowest, highest = (
            min(max(level, family.difficulty[0]), family.difficulty[1]) for level in self._paces[family.name].levels
        )
        return _Choice(family.name, self._positions[family.name] - 1, lowest, highest, settings.context, stage.name)

    def _enter(self, stage: int) -> None:
        self._stage = stage
        self._mixture = Mixture(self.stage.ratios(), self._config.batch_groups)
        for domain in self.stage.domains.values():
            for family in domain.families:
                self._bound(family)

    def _bound(self, family: FamilyConfig) -> None:
        if family.name in self._paces:
            self._paces[family.name].bound(family.difficulty)
        else:
            self._paces[family.name] = Pace(self._config.pace, family.difficulty, family.start)

    def restore(self, state: Mapping[str, JsonValue]) -> None:
        """Resume from a `state()`. Pass rates recorded since are lost."""
        names = [stage.name for stage in self._config.stages]
        if state.get("stage") not in names:
            raise RecordError(f"curriculum: state: stage: expected one of {names}, received {state.get('stage')!r}")
        for stage in range(names.index(str(state["stage"])) + 1):
            self._enter(stage)
        extras, num_batches = _counts(state, "extras"), state.get("num_batches")
        if not isinstance(num_batches, int):
            raise RecordError(f"curriculum: state: num_batches: expected an integer, received {num_batches!r}")
        self._mixture = Mixture(self.stage.ratios(), self._config.batch_groups, extras, num_batches)
        turns, positions = _counts(state, "turns"), _counts(state, "positions")
        self._turns = {domain: turns.get(domain, 0) for domain in Domain}
        self._positions = {name: positions.get(name, 0) for name in self._positions}
        paces = state.get("paces")
        for name, pace in paces.items() if isinstance(paces, Mapping) else ():
            if name in self._paces and isinstance(pace, Mapping):
                self._paces[name].restore(pace)


def _check(stage: StageConfig) -> None:
    """Refuse families of another domain, or without the configured difficulties."""
    for domain, settings in stage.domains.items():
        for wanted in settings.families:
            family = find_family(wanted.name)
            place = f"stages: {stage.name}: domains: {domain}: {wanted.name}"
            if family.domain != domain:
                raise ConfigError(f"{place}: its tasks belong to the domain {family.domain}; name it there")
            for level in wanted.difficulty:
                if level not in family.levels:
                    lowest, highest = family.levels[0], family.levels[-1]
                    raise ConfigError(f"{place}: difficulty: expected {lowest} to {highest}, received {level}")


def _counts(state: Mapping[str, JsonValue], key: str) -> dict[str, int]:
    value = state.get(key)
    if not isinstance(value, Mapping):
        raise RecordError(f"curriculum: state: {key}: expected an object, received {value!r}")
    return {name: num for name, num in value.items() if isinstance(num, int)}
