"""The RL stage: a model folder and a configuration in, a trained model folder out; opens or resumes the run."""

import asyncio
from pathlib import Path

from m2forge.errors import NotFoundError
from m2forge.forge.check import Check, read_checks
from m2forge.forge.config import ForgeConfig
from m2forge.forge.layout import Layout
from m2forge.forge.lineage import read_lineage
from m2forge.forge.loop import Loop
from m2forge.train.checkpoint import begun_phase
from m2forge.train.run_dir import hold_run, open_run


def run_forge(config: ForgeConfig, runs: Path) -> tuple[Path, list[Check]]:
    """Start or resume the run that `config` describes; returns the finished model's folder and its evaluations."""
    if not Path(config.model).is_dir():
        raise NotFoundError(f"model {config.model!r} is no folder; give one that `m2forge sft` or `import` wrote")
    run_dir = runs / config.name
    layout = Layout(run_dir)
    with hold_run(run_dir):
        open_run(run_dir, config, begun_phase(layout.checkpoints))
        if not is_complete(layout, config):
            asyncio.run(Loop(layout, config).run())
    return layout.model, read_checks(layout.checks)


def is_complete(layout: Layout, config: ForgeConfig) -> bool:
    """Whether the finished model is written and evaluated; an evaluation of a lost version of the last step does not
    count."""
    lineage, step = read_lineage(layout.lineage), config.num_steps
    is_checked = any(found.step == step and lineage.holds(step, found.branch) for found in read_checks(layout.checks))
    return layout.model.is_dir() and (is_checked or not config.check.num_tasks)
