"""The curriculum: batches of tasks, stage after stage, each with its domains at their ratios.

In: the configuration and the pass rate of every rewarded group. Out: batches. A batch holds every domain of its stage
at the counts of `tasks/curriculum.py`, spread evenly, so that any stretch of the queue is mixed. Within a domain the
families alternate, and each draws from the levels that its pace has reached; a family keeps its levels from one stage
to the next, within the bounds of each. All tasks are from the train split.

The next batch depends on the seed, the configuration and the sequence of pass rates. `state()` is JSON; a curriculum
created from it continues exactly.

    curriculum = Curriculum(config)
    for assignment in await curriculum.draw_batch(runner.next_task):
        ...
        curriculum.record(assignment.task, pass_rate=0.25)

Families without levels are drawn from by the measured pass rates p of their tasks (`PassRates`):

    p ← p + (pass rate − p) / min(n, WINDOW)          after the n-th group of attempts at the task
    weight = max(MIN_WEIGHT, 4·p·(1 − p))             1 before the first group

A group whose attempts all pass, or all fail, has no advantages, so a task is drawn in proportion to the variance of an
attempt's success, which is what a group can learn from. `MIN_WEIGHT` lets tasks return that were too hard, or have been
forgotten. The next task depends on the sequence of pass rates and on the generator; the state is JSON.
"""

import random
from collections import deque
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor
from typing import Generic, Protocol, TypeAlias, TypeVar

from m2forge.errors import ConfigError, RecordError
from m2forge.records import Domain, JsonValue, Task
from m2forge.tasks.catalog import find_family
from m2forge.tasks.config import CurriculumConfig, FamilyConfig, PaceConfig, StageConfig
from m2forge.tasks.family import family_key_of
from m2forge.tasks.task_set import FamilyInfo, Split, describe

WINDOW = 4
"""Number of groups over which the mean of pass rates extends."""
MIN_WEIGHT = 0.05


class PassRates:
    def __init__(self, ids: Sequence[str]) -> None:
        self._ids = tuple(ids)
        self._rates: dict[str, tuple[int, float]] = {}
        """Number of groups and mean pass rate, by task."""

    def choose(self, rng: random.Random) -> str:
        return rng.choices(self._ids, [self.weight(id) for id in self._ids])[0]

    def weight(self, id: str) -> float:
        if id not in self._rates:
            return 1.0
        _, rate = self._rates[id]
        return max(MIN_WEIGHT, 4 * rate * (1 - rate))

    def record(self, id: str, pass_rate: float) -> None:
        if not 0 <= pass_rate <= 1:
            raise RecordError(f"pass rate of task {id}: expected a number from 0 to 1, received {pass_rate!r}")
        num, rate = self._rates.get(id, (0, 0.0))
        self._rates[id] = (num + 1, rate + (pass_rate - rate) / min(num + 1, WINDOW))

    def state(self) -> dict[str, JsonValue]:
        return {id: [num, rate] for id, (num, rate) in self._rates.items()}

    def restore(self, state: Mapping[str, JsonValue]) -> None:
        """Resume from a `state()`; tasks that are no longer there are forgotten."""
        known = set(self._ids)
        for id, value in state.items():
            match value:
                case [int(num), float(rate) | int(rate)] if id in known:
                    self._rates[id] = (num, float(rate))


MAX_DOMAINS = 4
Name = TypeVar("Name", bound=str)
Families: TypeAlias = Mapping[str, FamilyInfo]
"""What is known of each family, by its key."""


class Draw(Protocol):
    """Maps a family's key, split, seed, position, lowest and highest difficulty to a task; `id` names a task of a fixed
    list."""

    def __call__(
        self, family: str, split: Split, seed: int, position: int, lowest: int, highest: int, id: str = "", /
    ) -> Awaitable[Task]: ...


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
    id: str = ""
    """The task, in a family whose difficulty is measured by pass rates."""


class Curriculum:
    def __init__(
        self,
        config: CurriculumConfig,
        *,
        families: Families | None = None,
        state: Mapping[str, JsonValue] | None = None,
    ) -> None:
        """`families`: as `tasks/survey.py` finds them; None: all are embedded. `state`: state of an earlier curriculum
        to resume from."""
        self._config = config
        known = {key: describe(find_family(key)) for key in config.family_keys} if families is None else families
        require_known(config, known)
        self._families = known
        self._by_stage = {stage.name: list(stage.families()) for stage in config.stages}
        self._positions = dict.fromkeys(sorted(config.family_keys), 0)
        """Number of tasks drawn from each family."""
        self._paces: dict[str, Pace] = {}
        self._rates = {key: PassRates(info.measured) for key, info in known.items() if info.measured is not None}
        """Pass rates of the tasks without levels, by family."""
        self._turns = dict.fromkeys(Domain, 0)
        self._enter(0)
        if state is not None:
            self.restore(state)

    @property
    def stage(self) -> StageConfig:
        return self._config.stages[self._stage]

    def levels(self) -> dict[str, tuple[int, int]]:
        """The current difficulty range of each family of the stage."""
        return {key: self._paces[key].levels for key, _, _ in self._by_stage[self.stage.name]}

    async def draw_batch(self, draw: Draw) -> list[Assignment]:
        """Draw the next batch with `draw`, such as `TaskRunner.next_task`. Its content is chosen before the first
        await, so pass rates recorded meanwhile affect only the next batch."""
        return [await self._draw(choice, draw) for choice in self._choose_batch()]

    async def draw_task(self, stage: str, domain: Domain, draw: Draw) -> Assignment:
        """Draw a replacement for a task of that stage and domain that was not trained; the stage may be over. It does
        not count towards a batch."""
        config = next((known for known in self._config.stages if known.name == stage and domain in known.domains), None)
        if config is None:
            raise RecordError(f"curriculum: no stage {stage!r} with the domain {domain}; use another pool")
        return await self._draw(self._choose(config, domain), draw)

    async def _draw(self, choice: _Choice, draw: Draw) -> Assignment:
        seed, levels = self._config.seed, (choice.lowest, choice.highest)
        if choice.id:
            task = await draw(choice.family, "train", seed, choice.position, *levels, choice.id)
        else:
            task = await draw(choice.family, "train", seed, choice.position, *levels)
        return Assignment(task, choice.context, choice.stage)

    def _choose_batch(self) -> list[_Choice]:
        if self._mixture.num_batches == self.stage.num_batches:
            self._enter(self._stage + 1)
        counts = self._mixture.next()
        # Unit k of n has position (k + ½) / n in the batch.
        slots = [((unit + 0.5) / num, domain) for domain, num in counts.items() for unit in range(num)]
        return [self._choose(self.stage, domain) for _, domain in sorted(slots)]

    def record(self, task: Task, pass_rate: float) -> None:
        """Record the pass rate of a rewarded group. Groups that are not trained because all attempts passed, or none,
        count too."""
        key = family_key_of(task)
        if key in self._rates:
            self._rates[key].record(task.id, pass_rate)
        elif key in self._paces:
            self._paces[key].record(task.difficulty, pass_rate)

    def state(self) -> dict[str, JsonValue]:
        """State for a checkpoint, as JSON values."""
        rates: dict[str, JsonValue] = {key: rates.state() for key, rates in self._rates.items()}
        state: dict[str, JsonValue] = {
            "stage": self.stage.name,
            "num_batches": self._mixture.num_batches,
            "extras": {str(domain): num for domain, num in self._mixture.extras.items()},
            "turns": {str(domain): num for domain, num in self._turns.items()},
            "positions": dict(self._positions),
            "paces": {name: pace.state() for name, pace in self._paces.items()},
        }
        return state | {"rates": rates} if rates else state

    def _choose(self, stage: StageConfig, domain: Domain) -> _Choice:
        families = [(key, family) for key, found, family in self._by_stage[stage.name] if found == domain]
        key, family = families[self._turns[domain] % len(families)]
        self._turns[domain] += 1
        self._positions[key] += 1
        position, id = self._positions[key] - 1, ""
        if key in self._rates:
            id = self._rates[key].choose(random.Random(f"{self._config.seed}/{key}/{position}"))
        # Clamp levels that another stage has moved to the bounds of this one.
        bounds = level_bounds(family, self._families[key])
        lowest, highest = (min(max(level, bounds[0]), bounds[1]) for level in self._paces[key].levels)
        return _Choice(key, position, lowest, highest, stage.domains[domain].context, stage.name, id)

    def _enter(self, stage: int) -> None:
        self._stage = stage
        self._mixture = Mixture(self.stage.ratios(), self._config.batch_groups)
        for key, _, family in self.stage.families():
            bounds = level_bounds(family, self._families[key])
            if key in self._paces:
                self._paces[key].bound(bounds)
            else:
                self._paces[key] = Pace(self._config.pace, bounds, family.start)

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
        rates = state.get("rates")
        for key, measured in rates.items() if isinstance(rates, Mapping) else ():
            if key in self._rates and isinstance(measured, Mapping):
                self._rates[key].restore(measured)


def require_known(config: CurriculumConfig, families: Families) -> None:
    """Refuse families of another domain, without the configured difficulties, or without tasks to train on."""
    for stage in config.stages:
        for key, domain, wanted in stage.families():
            family = families[key]
            location = f"stages: {stage.name}: domains: {domain}: {wanted.source}"
            if family.domain != domain:
                raise ConfigError(f"{location}: its tasks belong to the domain {family.domain}; name it there")
            if family.measured is not None and (wanted.difficulty or wanted.start):
                raise ConfigError(f"{location}: its tasks have no levels; leave difficulty and start out")
            for name, level in (*(("difficulty", level) for level in wanted.difficulty or ()), ("start", wanted.start)):
                if level is not None and not family.lowest <= level <= family.highest:
                    raise ConfigError(
                        f"{location}: {name}: expected {family.lowest} to {family.highest}, received {level}"
                    )
            if family.num_listed("train", *level_bounds(wanted, family)) == 0:
                raise ConfigError(f"{location}: none of its tasks is in the split 'train'; add tasks")


def level_bounds(family: FamilyConfig, info: FamilyInfo) -> tuple[int, int]:
    """The lowest and the highest level that a stage allows."""
    return family.difficulty or (info.lowest, info.highest)


def _counts(state: Mapping[str, JsonValue], key: str) -> dict[str, int]:
    value = state.get(key)
    if not isinstance(value, Mapping):
        raise RecordError(f"curriculum: state: {key}: expected an object, received {value!r}")
    return {name: num for name, num in value.items() if isinstance(num, int)}


# -- the domains of a batch --------------------------------------------------------------------------------------------


class Mixture(Generic[Name]):
    """Number of units of each domain in a batch, such that ratios hold in every batch and in the long run.

        w_d = ratio_d · n                   exact share of domain d in a batch of n units
        c_d(t) ∈ {⌊w_d⌋, ⌈w_d⌉}            number of units in batch t, Σ_d c_d(t) = n
        |t·w_d − Σ_{s≤t} c_d(s)| < 1        after any number of batches

    Every batch gives each domain ⌊w_d⌋. The remaining m = Σ_d f_d units, f_d = w_d − ⌊w_d⌋, go one each to the domains
    with the earliest deadline of the next extra unit: the k-th extra unit of d is due by batch ⌈k / f_d⌉, and not
    before batch ⌊(k − 1) / f_d⌋ + 1. The largest-remainder method with carried-over rounding is simpler, but with four
    domains it can be off by more than a unit. These are fair schedules (Baruah et al., 1996): earliest deadline first
    keeps every bound while at most two units remain; if three remain, it chooses the one domain to leave out, which is
    the same problem. So there are at most four domains.

    Generates the counts of consecutive batches. Its state is the number of extra units of each domain and the number of
    batches.
    """

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
        exact = {name: ratio * num_units for name, ratio in ratios.items()}
        self._base = {name: floor(units) for name, units in exact.items()}
        self._fraction = {name: units - floor(units) for name, units in exact.items()}
        self._num_extra = int(sum(self._fraction.values()))
        self.num_batches = num_batches
        self.extras = {name: (state or {}).get(name, 0) for name in ratios}
        for name, num in self.extras.items():
            if not abs(self._fraction[name] * num_batches - num) < 1:
                raise RecordError(
                    f"mixture: state: {name}: {num} extra units in {num_batches} batches do not match its ratio; "
                    "resume with the ratios of the stored state"
                )

    def next(self) -> dict[Name, int]:
        """Number of units of each domain in the next batch."""
        self.num_batches += 1
        chosen = self._chosen()
        for name in chosen:
            self.extras[name] += 1
        return {name: base + (name in chosen) for name, base in self._base.items()}

    def _chosen(self) -> set[Name]:
        """The domains that get one unit more than their floor in batch `num_batches`."""
        some = [name for name, fraction in self._fraction.items() if fraction]
        if self._num_extra <= len(some) // 2:
            return set(_earliest_deadlines(some, self._fraction, self.extras, self.num_batches, self._num_extra))
        # Choose the domains to leave out by the same rule: the complement of a fair schedule is fair.
        complement = {name: 1 - self._fraction[name] for name in some}
        left_out = {name: self.num_batches - 1 - self.extras[name] for name in some}
        num_left_out = len(some) - self._num_extra
        return set(some) - set(_earliest_deadlines(some, complement, left_out, self.num_batches, num_left_out))


def _earliest_deadlines(
    names: list[Name], fraction: Mapping[Name, Fraction], extras: Mapping[Name, int], batch: int, num: int
) -> list[Name]:
    """The `num` eligible domains with the earliest deadlines in this batch."""
    open_ = [name for name in names if floor(extras[name] / fraction[name]) + 1 <= batch]
    return sorted(open_, key=lambda name: (ceil((extras[name] + 1) / fraction[name]), name))[:num]


# -- levels ------------------------------------------------------------------------------------------------------------


class Pace:
    """Adapts difficulty to success: pass rates of groups in, a range of levels out.

    The range is `width` adjacent levels within the bounds of the stage. Only groups whose task is inside the range
    count, since a group drawn before the last change may be of another level. Every change resets the counted groups.
    The levels depend only on the sequence of pass rates.
    """

    def __init__(self, config: PaceConfig, bounds: tuple[int, int], start: int | None = None) -> None:
        self._config = config
        self._bounds = bounds
        self._lowest = bounds[0] if start is None else start
        self._rates: deque[float] = deque(maxlen=config.num_groups)
        self.bound(bounds)

    @property
    def levels(self) -> tuple[int, int]:
        """The lowest and highest level to draw from."""
        return self._lowest, min(self._lowest + self._config.width - 1, self._bounds[1])

    def bound(self, bounds: tuple[int, int]) -> None:
        """Set the bounds and clamp the current range to them."""
        self._bounds = bounds
        self._go_to(self._lowest)

    def record(self, difficulty: float, pass_rate: float) -> None:
        """Count one group: the share of its attempts that passed."""
        if not 0 <= pass_rate <= 1:
            raise RecordError(f"pace: pass_rate: expected a number from 0 to 1, received {pass_rate!r}")
        lowest, highest = self.levels
        if not lowest <= difficulty <= highest:
            return
        self._rates.append(pass_rate)
        if len(self._rates) < self._config.num_groups:
            return
        mean = sum(self._rates) / len(self._rates)
        if mean > self._config.raise_above:
            self._go_to(lowest + 1)
        elif mean < self._config.lower_below:
            self._go_to(lowest - 1)

    def state(self) -> dict[str, JsonValue]:
        return {"lowest": self._lowest, "rates": list(self._rates)}

    def restore(self, state: Mapping[str, JsonValue]) -> None:
        """Resume from a `state()`. If `num_groups` is now smaller, the oldest pass rates are dropped."""
        lowest, rates = state.get("lowest"), state.get("rates")
        if not isinstance(lowest, int) or not isinstance(rates, list):
            raise RecordError(f"pace: state: expected lowest and rates, received {dict(state)!r}")
        self._go_to(lowest)
        self._rates.clear()
        self._rates.extend(float(rate) for rate in rates)

    def _go_to(self, lowest: int) -> None:
        """Move the range to `lowest`, clamped so that its full width fits into the bounds if possible."""
        highest_start = max(self._bounds[0], self._bounds[1] - self._config.width + 1)
        lowest = min(max(lowest, self._bounds[0]), highest_start)
        if lowest != self._lowest:
            self._rates.clear()
        self._lowest = lowest
