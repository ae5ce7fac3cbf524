"""Windowed FIFO: units queued in submission order in, the units to train next out.

    T0 … T(N−1) queued, head i = the first unit not yet consumed
    takeable    = finished units at positions i … i+W−1; nothing beyond, even if finished
    the window moves only as its head is consumed: taken, dropped or requeued

A unit is a group of episodes, or one episode. The oldest takeable unit is taken first, so W = 1 is strict FIFO and
W ≥ N takes the oldest finished unit at any position. The lag of a unit is the number of units taken between its
submission and its own claim: at most N−1 that were ahead of it and W−1 that overtook it, N+W−2 in all. N = 8, W = 4:
three may overtake, the largest lag is 10.

A batch is taken completely or not at all. It is a number of units, or as many as fit into a token limit. Quotas are met
exactly: if the window holds no unit of a required label, it extends to the oldest queued unit of that label, and if
none is queued, the batch waits until one is submitted. So a label whose units were dropped delays a batch and never
changes its ratios. A group is given up completely: where its episodes are separate units, all that are still queued are
removed. This file has no clock and no storage; the pool and the simulation both use it.
"""

import itertools
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass

from m2forge.errors import RecordError


@dataclass(slots=True)
class Unit:
    position: int
    """Queue position, consecutive in submission order."""
    group: str
    """Name of the group; its units are given up together."""
    label: str = ""
    """The label that quotas count, such as the domain."""
    is_finished: bool = False
    """Whether all of its episodes have ended and are rewarded."""
    oldest_step: int | None = None
    """Step of the policy that sampled its oldest token; None while nothing was sampled."""
    num_taken_before: int = 0
    """Number of units taken before it was submitted."""
    num_tokens: int = 0
    """Number of tokens of a finished unit; set only for token-limited batches."""


class Window:
    def __init__(self, size: int, units: Iterable[Unit] = (), num_taken: int = 0) -> None:
        """`units`: the queued units in order; the end of the queue may be left out, which only hides those units."""
        if size < 1:
            raise RecordError(f"Window: size: expected 1 or more, received {size}")
        self.size = size
        self.num_taken = num_taken
        self._units: dict[int, Unit] = {}
        """Units by position, in order, because positions only increase."""
        for unit in units:
            self._insert(unit)

    @property
    def head(self) -> Unit | None:
        """The first unit not yet consumed."""
        return next(iter(self._units.values()), None)

    def __len__(self) -> int:
        return len(self._units)

    def __iter__(self) -> Iterator[Unit]:
        return iter(self._units.values())

    def submit(self, unit: Unit) -> None:
        """Queue a unit behind all others."""
        unit.num_taken_before = self.num_taken
        self._insert(unit)

    def finish(self, position: int) -> None:
        """Mark a unit as finished; ignored if it was given up meanwhile."""
        if position in self._units:
            self._units[position].is_finished = True

    def visible(self) -> list[Unit]:
        """Units inside the window, finished or not."""
        return self._reached(())

    def choose(self, num_units: int, quotas: Mapping[str, int] | None = None) -> list[Unit]:
        """The units that `take` would take; empty if there are too few."""
        if num_units < 1 or (quotas is not None and sum(quotas.values()) != num_units):
            raise RecordError(f"a batch: expected 1 unit or more and quotas that add up to it, received {num_units}")
        return self._oldest(num_units) if quotas is None else self._by_quota(quotas)

    def take(self, num_units: int, quotas: Mapping[str, int] | None = None) -> list[Unit]:
        """Consume a batch of finished units, oldest first, or nothing if there are too few.

        `quotas`: units per label, met exactly. A label with no unit inside the window takes its oldest queued unit
        beyond it.
        """
        return self._consume(self.choose(num_units, quotas))

    def take_within(
        self, max_tokens: int, max_units: int, quotas: Callable[[int], Mapping[str, int]] | None = None
    ) -> list[Unit]:
        """Consume as many units as fit into `max_tokens`, at least one, whatever its size, and at most `max_units`; or
        nothing while it is unknown whether one more would fit.

        `quotas`: maps a batch size to the units per label. The batch of each size is the one that `take` would take;
        the batch with one unit more than the result exceeds `max_tokens`.
        """
        return self._consume(self._choose_within(max_tokens, max_units, quotas))

    def lag(self, unit: Unit) -> int:
        """Number of units taken since its submission, excluding itself, if it was the last one taken."""
        return self.num_taken - 1 - unit.num_taken_before

    def give_up(self, position: int) -> list[Unit]:
        """Consume the unit and all other queued units of its group without training. The caller drops them or submits
        the group again."""
        unit = self._units.get(position)
        if unit is None:
            raise RecordError(f"queue position {position}: expected a queued unit")
        removed = [other for other in self if other.group == unit.group]
        for other in removed:
            del self._units[other.position]
        return removed

    def give_up_stale(self, oldest_step: int) -> list[Unit]:
        """Give up the groups of finished units with tokens from before `oldest_step`."""
        removed: list[Unit] = []
        for unit in list(self):
            is_stale = unit.is_finished and unit.oldest_step is not None and unit.oldest_step < oldest_step
            if is_stale and unit.position in self._units:
                removed += self.give_up(unit.position)
        return removed

    def _consume(self, units: list[Unit]) -> list[Unit]:
        for unit in units:
            del self._units[unit.position]
        self.num_taken += len(units)
        return units

    def _choose_within(
        self, max_tokens: int, max_units: int, quotas: Callable[[int], Mapping[str, int]] | None
    ) -> list[Unit]:
        """Binary search between `fitting`, a batch that fits, and `too_many`, a batch size that does not fit or is not
        available yet. A batch with more units may have fewer tokens, so another size could fit too."""

        def choose(num_units: int) -> list[Unit]:
            return self.choose(num_units, None if quotas is None else quotas(num_units))

        fitting, beyond = choose(1), choose(max_units)
        if max_units == 1 or (beyond and _num_tokens(beyond) <= max_tokens):
            return beyond
        too_many = max_units
        while too_many - len(fitting) > 1:
            middle = (len(fitting) + too_many) // 2
            chosen = choose(middle)
            if chosen and _num_tokens(chosen) <= max_tokens:
                fitting = chosen
            else:
                too_many, beyond = middle, chosen
        is_known = bool(beyond) or _num_tokens(fitting) >= max_tokens
        return fitting if is_known else []

    def _insert(self, unit: Unit) -> None:
        last = next(reversed(self._units), None)
        if last is not None and unit.position <= last:
            raise RecordError(f"Unit: position: expected one after {last}, received {unit.position}")
        self._units[unit.position] = unit

    def _oldest(self, num_units: int) -> list[Unit]:
        """The oldest finished units. All units before the first unfinished one are taken first, so the window starts
        at that unit."""
        chosen: list[Unit] = []
        end: int | None = None
        for unit in self._units.values():
            if end is not None and unit.position >= end:
                break
            if unit.is_finished:
                chosen.append(unit)
                if len(chosen) == num_units:
                    return chosen
            elif end is None:
                end = unit.position + self.size
        return []

    def _by_quota(self, quotas: Mapping[str, int]) -> list[Unit]:
        remaining = {label: num for label, num in quotas.items() if num > 0}
        chosen: dict[int, Unit] = {}
        while remaining:
            unit = next((unit for unit in self._candidates(chosen, remaining) if unit.is_finished), None)
            if unit is None:
                return []
            chosen[unit.position] = unit
            remaining[unit.label] -= 1
            if not remaining[unit.label]:
                del remaining[unit.label]
        return sorted(chosen.values(), key=lambda unit: unit.position)

    def _candidates(self, chosen: Container[int], labels: Collection[str]) -> Iterator[Unit]:
        """Units of `labels` inside the window, then the oldest beyond it of each label that has none inside."""
        reached = self._reached(chosen)
        yield from (unit for unit in reached if unit.label in labels)
        missing = set(labels).difference(unit.label for unit in reached)
        if not missing:
            return
        for unit in self._units.values():
            if unit.position not in chosen and unit.label in missing:
                missing.discard(unit.label)
                yield unit

    def _reached(self, chosen: Container[int]) -> list[Unit]:
        """Units inside the window after the chosen ones are consumed."""
        unchosen = (unit for unit in self._units.values() if unit.position not in chosen)
        head = next(unchosen, None)
        if head is None:
            return []
        return [head, *itertools.takewhile(lambda unit: unit.position < head.position + self.size, unchosen)]


def _num_tokens(units: Iterable[Unit]) -> int:
    return sum(unit.num_tokens for unit in units)
