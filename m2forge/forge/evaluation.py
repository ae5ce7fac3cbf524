"""Schedules evaluations on held-out tasks: before the first step, every `check.every_steps`, and after the last.

Evaluations between the first and the last run beside training, on their share of the slots. By default weight updates
continue meanwhile, and the evaluation reports the share of its tokens that each policy version sampled. With
`check.pin` weight updates wait until it ends, so that it samples from one version; training rollouts then sample from
that version too and lag behind the trainer by the steps it makes meanwhile. An evaluation that dies with its loop wrote
nothing to `checks.jsonl`, so it runs again; so does one of a version that the trainer lost (`forge/lineage.py`).
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from m2forge.forge.attempts import Agents
from m2forge.forge.check import Check, check, held_out_tasks, note_check, read_checks, terms_of
from m2forge.forge.config import ForgeConfig
from m2forge.forge.kept import Kept, write_kept
from m2forge.forge.layout import Layout
from m2forge.forge.lineage import read_lineage
from m2forge.forge.slots import Slots
from m2forge.records import PolicyVersion

POLL_S = 0.02
MAX_REPEATS = 3
"""Maximum runs of a pinned evaluation, which is repeated if it sampled from several versions."""

_log = logging.getLogger(__name__)


class Evaluations:
    def __init__(self, config: ForgeConfig, layout: Layout, slots: Slots, served: Sequence[PolicyVersion]) -> None:
        """`served`: the versions that the sampler has served, in order; the caller appends to it."""
        self._config, self._layout, self._slots, self._served = config, layout, slots, served
        self.pin = asyncio.Lock()
        """Held by a pinned evaluation and by each weight update, so that they exclude each other."""
        self._running = asyncio.Lock()
        self._is_over = False
        self._made = read_checks(layout.checks)

    async def first(self, agents: Agents) -> None:
        """Evaluate before training, unless an earlier loop already did."""
        if self._last_step() is None:
            await self._evaluate(agents)

    async def keep(self, agents: Agents) -> None:
        """Evaluate whenever it is due, beside training."""
        seen = None
        while not self._is_over:
            if self._served and self._served[-1] != seen:
                seen = self._served[-1]
                if self._is_due(seen):
                    await self._evaluate(agents)
            await asyncio.sleep(POLL_S)

    def _is_due(self, served: PolicyVersion) -> bool:
        """False for a version that the trainer has lost but the sampler still serves."""
        every, last = self._config.check.every_steps, self._last_step()
        if not every or not read_lineage(self._layout.lineage).holds(served.step, served.branch):
            return False
        return last is None or served.step // every > last // every

    def _last_step(self) -> int | None:
        """Step of the last evaluated version that the current weights descend from."""
        lineage = read_lineage(self._layout.lineage)
        return max((found.step for found in self._made if lineage.holds(found.step, found.branch)), default=None)

    async def last(self, agents: Agents, is_newest: Callable[[], bool]) -> None:
        """Evaluate after training and after any running evaluation. `is_newest`: whether the sampler serves the last
        weights."""
        self._is_over = True
        async with self._running:
            pass
        while not is_newest():
            await asyncio.sleep(POLL_S)
        last = self._last_step()
        if last is None or last < self._config.num_steps:
            await self._evaluate(agents)

    async def _evaluate(self, agents: Agents) -> None:
        if not self._config.check.num_tasks:
            return
        async with self._running:
            while not self._served:
                await asyncio.sleep(POLL_S)
            with self._slots.evaluation():
                found, kept = await self._attempt_all(agents)
            await asyncio.to_thread(self._write, found, kept)
            self._made.append(found)
        _log.info("step %d: %.1f%% of %d held-out tasks", found.step, 100 * found.success, found.num_tasks)
        if len(found.names) > 1:
            _log.info("step %d: the evaluation sampled from versions %s", found.step, ", ".join(found.names))

    def _write(self, found: Check, kept: list[Kept]) -> None:
        write_kept(self._layout.kept, found.step, kept)
        note_check(self._layout.checks, found)

    async def _attempt_all(self, agents: Agents) -> tuple[Check, list[Kept]]:
        config = self._config.check
        for repeat in range(MAX_REPEATS):
            async with self.pin if config.pin else contextlib.nullcontext():
                first = len(self._served) - 1
                tasks = await held_out_tasks(self._config, agents.runner)
                terms = partial(terms_of, self._config)
                found, kept = await check(agents, tasks, self._served[first], self._slots, terms)
                found = replace(found, branches=_branches(found, self._served[first:]))
            if not config.pin or len(found.names) <= 1:
                break
            # A restarted sampler loads the newest weights.
            again = "it is repeated" if repeat + 1 < MAX_REPEATS else "it is reported as it is"
            _log.warning("a pinned evaluation sampled from versions %s; %s", ", ".join(found.names), again)
        return found, kept


def _branches(found: Check, served: Sequence[PolicyVersion]) -> dict[str, list[str]]:
    """The distinct branches among the `served` versions of each step that sampled."""
    return {
        step: list(dict.fromkeys(version.branch for version in served if str(version.step) == step and version.branch))
        for step in found.versions
    }
