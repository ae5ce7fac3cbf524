"""The RL stage: a model folder and a configuration in, a trained model folder out; opens or resumes the run."""

import asyncio
import json
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TypeAlias

from m2forge.config import build, load
from m2forge.errors import NotFoundError
from m2forge.forge.check import Check, read_checks
from m2forge.forge.config import ForgeConfig
from m2forge.forge.layout import Layout
from m2forge.forge.lineage import read_lineage
from m2forge.forge.loop import Loop
from m2forge.loop_thread import LoopThread
from m2forge.train.checkpoint import begun_phase
from m2forge.train.run_dir import hold_run, open_run

Setting: TypeAlias = str | int | float | bool | Sequence["Setting"] | Mapping[str, "Setting"]
"""The value of a config key; a mapping sets the keys of a table."""


def train_rl(
    config: str | PathLike[str] | Mapping[str, Setting] | ForgeConfig,
    *,
    runs: str | PathLike[str] = "runs",
    **overrides: Setting,
) -> tuple[Path, list[Check]]:
    """Run `m2forge rl` from Python: `train_rl("rl.toml", num_steps=20, policy={"pack_tokens": 4096})`.

    `config`: a TOML file, its content as a mapping, or a `ForgeConfig`. `overrides`: config keys, as with `--set`; a
    mapping overrides keys inside a table. Returns the finished model's folder and the evaluations; a run that already
    exists in `runs` is resumed. Ctrl-C stops the run; the same call resumes it."""
    settings = list(_set_options(overrides))
    if isinstance(config, ForgeConfig):
        given = config.model_dump(mode="json", exclude_unset=True, exclude_none=True)
        resolved = build(ForgeConfig, given, settings, origin="train_rl")
    elif isinstance(config, Mapping):
        resolved = build(ForgeConfig, {}, [*_set_options(config), *settings], origin="train_rl")
    else:
        resolved = load(ForgeConfig, Path(config), settings)
    return run_forge(resolved, Path(runs))


def run_forge(config: ForgeConfig, runs: Path) -> tuple[Path, list[Check]]:
    """Start or resume the run that `config` describes; returns the finished model's folder and its evaluations."""
    if not Path(config.model).is_dir():
        raise NotFoundError(f"model {config.model!r} is no folder; give one that `m2forge sft` or `import` wrote")
    run_dir = runs / config.name
    layout = Layout(run_dir)
    with hold_run(run_dir):
        open_run(run_dir, config, begun_phase(layout.checkpoints))
        if not is_complete(layout, config):
            _run(Loop(layout, config).run())
    return layout.model, read_checks(layout.checks)


def is_complete(layout: Layout, config: ForgeConfig) -> bool:
    """Whether the finished model is written and evaluated; an evaluation of a lost version of the last step does not
    count."""
    lineage, step = read_lineage(layout.lineage), config.num_steps
    is_checked = any(found.step == step and lineage.holds(step, found.branch) for found in read_checks(layout.checks))
    return layout.model.is_dir() and (is_checked or not config.check.num_tasks)


def _run(work: Coroutine[object, object, None]) -> None:
    """Run a coroutine to its end, also where an event loop already runs in this thread, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(work)
        return
    with LoopThread("m2forge-rl") as thread:
        thread.run(work)


def _set_options(settings: Mapping[str, Setting], table: str = "") -> Iterator[str]:
    """The settings as `--set` takes them: a dotted key and a TOML value each."""
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _set_options(value, f"{table}{key}.")
        else:
            yield f"{table}{key}={_to_toml(value)}"


def _to_toml(value: Setting) -> str:
    """A TOML value in one line. JSON's strings, numbers and booleans are TOML's too."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(key)} = {_to_toml(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ", ".join(map(_to_toml, value)) + "]"
    return json.dumps(value, default=str)
