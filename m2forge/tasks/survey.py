"""Looks at the families of a configuration before a run begins: sources in, what is known of each family out.

Embedded families are opened here; all others in a worker process, which dies with the survey, because their modules are
users' code. The survey also draws a train task and the held-out tasks of an evaluation, so that a source that cannot be
opened, a family that raises, or a set of tasks too small for its held-out share is refused while nothing is written.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from m2forge.errors import ConfigError
from m2forge.tasks.catalog import find_family
from m2forge.tasks.config import CurriculumConfig, StageConfig, VerifyConfig
from m2forge.tasks.curriculum import Families, level_bounds, require_known
from m2forge.tasks.runner import TaskRunner
from m2forge.tasks.source import SourceKind, parse_source
from m2forge.tasks.task_set import HELD_OUT_EVERY, FamilyInfo, describe

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HeldOut:
    """How many held-out tasks an evaluation takes from a family."""

    key: str
    num: int
    lowest: int
    highest: int


def share_held_out(stage: StageConfig, families: Families, num_tasks: int) -> list[HeldOut]:
    """Spread an evaluation's tasks evenly over the families of a stage."""
    wanted = list(stage.families())
    shares = []
    for index, (key, _, family) in enumerate(wanted):
        num = num_tasks // len(wanted) + (index < num_tasks % len(wanted))
        shares.append(HeldOut(key, num, *level_bounds(family, families[key])))
    return shares


def needs_worker(config: CurriculumConfig, reward: str | None = None) -> bool:
    """Whether the families' code, or the reward function's, may only run in worker processes."""
    return reward is not None or any(parse_source(key).kind is not SourceKind.EMBEDDED for key in config.family_keys)


async def survey(
    config: CurriculumConfig, verify: VerifyConfig, num_held_out: int, seed: int, reward: str | None = None
) -> dict[str, FamilyInfo]:
    """What is known of each family, by key. `num_held_out`, `seed`: of the evaluations of the run. `reward`: the
    function of `reward.function`."""
    if not needs_worker(config, reward):
        known = {key: describe(find_family(key)) for key in config.family_keys}
        require_known(config, known)
        return known
    verify = verify.model_copy(update={"num_workers": 1})
    with TemporaryDirectory() as folder:
        async with TaskRunner(verify, Path(folder), reward=reward) as runner:
            known = {key: await runner.describe(key) for key in config.family_keys}
            for key, info in known.items():
                report_rejected(key, info)
            require_known(config, known)
            await _draw(config, known, runner, num_held_out, seed)
    return known


def report_rejected(key: str, info: FamilyInfo) -> None:
    """Warn of tasks that the family leaves out."""
    for problem in info.rejected:
        _log.warning("%s: a task is left out: %s", key, problem)
    if info.num_rejected > len(info.rejected):
        _log.warning("%s: %d more tasks are left out", key, info.num_rejected - len(info.rejected))


async def _draw(config: CurriculumConfig, known: Families, runner: TaskRunner, num_held_out: int, seed: int) -> None:
    for key, _, family in (family for stage in config.stages for family in stage.families()):
        if parse_source(key).kind is not SourceKind.EMBEDDED:
            await runner.next_task(key, "train", config.seed, 0, *level_bounds(family, known[key]))
    for share in share_held_out(config.stages[-1], known, num_held_out):
        listed = known[share.key].num_listed("held_out", share.lowest, share.highest)
        if listed is not None and listed < share.num:
            raise ConfigError(
                f"{share.key}: {listed} of its tasks are held out, and an evaluation needs {share.num}; add tasks (one "
                f'instruction in {HELD_OUT_EVERY} is held out), set "split": "held_out" in more lines, or lower '
                "eval.num_tasks"
            )
        if listed is None and parse_source(share.key).kind is not SourceKind.EMBEDDED:
            await runner.distinct(share.key, "held_out", seed, share.num, share.lowest, share.highest)
