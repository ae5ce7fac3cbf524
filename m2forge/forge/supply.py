"""Keeps the queue filled: the curriculum's batches in, units of the pool out.

It draws a batch whenever the queue has room for one. A group that is dropped before training (no signal, too many
failed attempts, too stale, too slow) is replaced by another task of the same stage and domain. So training takes
exactly the number of units that were drawn for a stage, and both change the stage after the same batch. The
curriculum's state is stored in one transaction with the tasks that it drew, so that none is skipped or drawn twice.
"""

import logging
from collections.abc import Callable

from m2forge.forge.config import ForgeConfig
from m2forge.pool.pool import Pool
from m2forge.pool.state import StateError
from m2forge.pool.stored import Queued
from m2forge.pool.writer import PoolWriter
from m2forge.records import Task
from m2forge.tasks.curriculum import Curriculum, Draw

_log = logging.getLogger(__name__)


class Supply:
    def __init__(
        self,
        config: ForgeConfig,
        pool: Pool,
        writer: PoolWriter,
        curriculum: Curriculum,
        draw: Draw,
        note: Callable[[], str],
    ) -> None:
        """`draw`: draws a task, like `TaskRunner.next_task`. `note`: returns the state to store with the tasks,
        including the curriculum's."""
        self._config, self._pool, self._writer, self._note = config, pool, writer, note
        self.curriculum, self._draw = curriculum, draw

    async def fill(self) -> bool:
        """Replace dropped groups and queue the batches that fit; returns whether a batch or replacement was queued."""
        is_filled = await self._replace()
        while await self._writer.run(self._pool.room) >= self._config.batch_units:
            before = self.curriculum.state()
            given = await self.curriculum.draw_batch(self._draw)
            tasks = [Queued(item.task, self._config.group_size, item.context) for item in given]
            try:
                await self._writer.run(self._pool.put, tasks, self._note(), given[0].stage)
            except StateError:
                # A trainer that resumed from a checkpoint returned units meanwhile: the batch is drawn again later.
                self.curriculum.restore(before)
                break
            is_filled = True
        return is_filled

    async def _replace(self) -> bool:
        owed = await self._writer.run(self._pool.owed)
        if not owed:
            return False
        before = self.curriculum.state()
        is_whole = self._config.pool.window.unit == "group"
        given: list[tuple[Task, int]] = []
        for debt in owed:
            drawn = await self.curriculum.draw_task(debt.stage, debt.domain, self._draw)
            given.append((drawn.task, self._config.group_size if is_whole else debt.num_units))
        pairs = zip(owed, given, strict=True)
        try:
            await self._writer.run(self._pool.replace, [(debt, *item) for debt, item in pairs], self._note())
        except StateError as error:
            # The trainer may drop units while tasks are drawn; then the replacements are drawn again.
            _log.info("what is owed has changed, so its replacements are drawn again: %s", error)
            self.curriculum.restore(before)
            return False
        return True
