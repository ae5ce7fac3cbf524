"""The terminal's progress view of a run: steps, queue and window, tokens/s, rewards, staleness, trainer utilization."""

import asyncio
import json
import os
import time
from pathlib import Path

from m2forge.agents.workspace import SandboxCounts
from m2forge.files import write_atomic
from m2forge.observe.metrics import FILE_NAME, StepMetrics
from m2forge.observe.progress import progress
from m2forge.pool.pool import Pool, PoolWriter
from m2forge.pool.state import UnitState
from m2forge.rl.attempts import AttemptCounts
from m2forge.rl.config import RLConfig
from m2forge.rl.layout import Layout

EVERY_S = 1.0
TAIL_BYTES = 1 << 18
"""Bytes read from the end of the metrics file; many times the size of one step's metrics."""


class View:
    def __init__(
        self, layout: Layout, config: RLConfig, pool: Pool, counts: AttemptCounts, sandboxes: SandboxCounts
    ) -> None:
        self._layout, self._config, self._pool, self._counts = layout, config, pool, counts
        self._sandboxes, self._written = sandboxes, ""
        self._window_size = config.pool.window.size

    async def show(self, writer: PoolWriter) -> None:
        with progress(self._config.num_steps, self._config.name) as bar:
            shown, num_tokens, at_s = 0, self._counts.num_tokens, time.monotonic()
            while True:
                await asyncio.sleep(EVERY_S)
                last = read_last_step(self._layout.run_dir / FILE_NAME)
                fields = await self._queue_fields(writer)
                if self._config.agent.sandbox.backend != "process":
                    fields |= {"sandboxes": f"{self._sandboxes.num_alive}"}
                    await asyncio.to_thread(self._write_sandboxes)
                passed_s, at_s = time.monotonic() - at_s, time.monotonic()
                fields["tokens/s"] = f"{(self._counts.num_tokens - num_tokens) / passed_s:,.0f}"
                num_tokens = self._counts.num_tokens
                for domain, perfs in self._counts.perfs.items():
                    if perfs:
                        fields[domain] = f"{sum(perfs) / len(perfs):.0%}"
                        del perfs[:-256]
                fields |= _failure_fields(self._counts)
                if last is not None:
                    fields |= _step_fields(last)
                done = 0 if last is None else last.step
                bar.advance(max(0, done - shown), fields)
                shown = max(shown, done)

    def _write_sandboxes(self) -> None:
        """Write the numbers for the run page, if they have changed."""
        counts = self._sandboxes
        nums = {"num_alive": counts.num_alive, "num_forked": counts.num_started, "num_failed": counts.num_failed}
        text = json.dumps({"backend": self._config.agent.sandbox.backend, **nums})
        if text != self._written:
            write_atomic(self._layout.sandboxes, text)
            self._written = text

    async def _queue_fields(self, writer: PoolWriter) -> dict[str, float | str]:
        positions = await writer.run(self._pool.queue_positions, self._config.pool.window.queue)
        inside = [state for position, state in positions if position < positions[0][0] + self._window_size]
        num_ready = sum(state == UnitState.READY for state in inside)
        return {"queue": f"{len(positions)}", "window": f"{num_ready}/{len(inside)} ready"}


def read_last_step(path: Path) -> StepMetrics | None:
    """Read the last step from the end of the metrics file; None if missing or unreadable."""
    if not path.exists():
        return None
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        lines = file.read().split(b"\n")[:-1]
    try:
        record = json.loads(lines[-1])
    except (IndexError, ValueError):
        return None
    step, time_s = int(record.pop("step")), float(record.pop("time_s"))
    return StepMetrics(step, time_s, {name: float(value) for name, value in record.items()})


def _failure_fields(counts: AttemptCounts) -> dict[str, float | str]:
    """Numbers of attempts since the start that failed, by what became of them, and of those whose states were rebuilt;
    those above 0."""
    nums = {
        "timeouts": counts.num_timeouts,
        "errors": counts.num_errors,
        "broken": counts.num_broken,
        "retried": counts.num_interrupted,
        "rebuilt": counts.num_rebuilt,
        "unequal": counts.num_unequal,
    }
    return {name: f"{num}" for name, num in nums.items() if num}


def _step_fields(last: StepMetrics) -> dict[str, float | str]:
    values = last.values
    busy_s = values.get("trained_s", 0.0) + values.get("published_s", 0.0)
    waited_s = values.get("waited_s", 0.0)
    return {
        "reward": values.get("reward", 0.0),
        "staleness": f"{values.get('staleness', 0.0):.0f}",
        "trainer busy": f"{busy_s / max(busy_s + waited_s, 1e-9):.0%}",
    }
