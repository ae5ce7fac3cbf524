"""What training the prediction module along with the policy keeps: how often its drafts are accepted, before and after.

A policy that follows links, by a tool or in a copy, is trained twice: once with the module following the policy
(`mtp_weight` as configured), once with the module left as it was. Acceptance is that of the engine, one draft in every
step, on held-out tasks of the run's difficulty, which each policy attempts by itself at temperature 1: the share of
drafts that stand by the rule of rollout/speculation/verify.py, which is what the two distributions share on average.
"""

import math
from dataclasses import dataclass
from pathlib import Path

from forge_probe import CONTEXT, Probe
from learning_policy import Policy
from report import Bar, print_table

from examples.demo import Lesson
from m2forge.records import PolicyVersion, Task
from m2forge.rollout.config import RolloutConfig
from m2forge.rollout.core import Core
from m2forge.rollout.speculation.adaptive_depth import FixedDepth

CONFIG = "copies-demo.toml"
LESSON = Lesson("copies", (0, 0), num_bare=1000, num_whole=440)
MAX_LOST = 0.03
NUM_TASKS, NUM_QUICK_TASKS = 400, 8


@dataclass(frozen=True)
class Drafted:
    success: float
    num_drafts: int
    accepted: float

    @property
    def margin(self) -> float:
        """Half of the 95% interval, as if drafts were independent."""
        return 1.96 * math.sqrt(self.accepted * (1 - self.accepted) / max(1, self.num_drafts))


class DraftProbe(Probe):
    """Attempts tasks in this process, with one draft in every step."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        config = RolloutConfig(
            num_blocks=4096, step_tokens=8192, max_running=128, max_context=CONTEXT, seed=0, speculation=1
        )
        self._core = Core(self._core.model, config, PolicyVersion("probe", 0), depth=FixedDepth(1))

    def drafted(self, tasks: list[Task]) -> Drafted:
        success = self.success(tasks)[LESSON.family]
        metrics = self._core.metrics()
        num_drafts = int(metrics["total_drafted_1"])
        return Drafted(success, num_drafts, metrics["total_accepted_1"] / max(1, num_drafts))


def measure_mtp(folder: Path, seed: int, *, is_quick: bool) -> list[Bar]:
    policy = Policy(folder, LESSON, CONFIG, seed, is_quick=is_quick)
    weight, num_steps = policy.config().policy.mtp_weight, policy.config().num_steps
    before, along, left = "before", *(f"after {num_steps} steps, mtp_weight {value:g}" for value in (weight, 0.0))
    models = {before: policy.model, along: policy.trained("along")}
    if not is_quick:  # after a few steps there is no difference to see
        models[left] = policy.trained("left", policy__mtp_weight=0.0)
    tasks = policy.held_out(NUM_QUICK_TASKS if is_quick else NUM_TASKS)
    found = {name: DraftProbe(model).drafted(tasks) for name, model in models.items()}
    print_table(
        f"Drafts of the prediction module on {len(tasks)} held-out tasks of {LESSON.family}, sampled by each policy",
        ("policy", "success", "drafts", "accepted", "±"),
        [
            (name, f"{each.success:.1%}", f"{each.num_drafts:,}", f"{each.accepted:.2%}", f"{each.margin:.2%}")
            for name, each in found.items()
        ],
    )
    if is_quick:
        # Too few drafts, of a network that has learnt too little, to say how many of them stand.
        return [Bar.at_least("mtp: fewest drafts that were judged", min(each.num_drafts for each in found.values()), 1)]
    lost = {name: found[before].accepted - each.accepted for name, each in found.items()}
    margin = math.hypot(found[along].margin, found[left].margin)
    return [
        Bar.at_most("mtp: acceptance lost over the run, the module trained along", lost[along], MAX_LOST),
        Bar.at_least("mtp: what is lost besides where it is left as it was", lost[left] - lost[along], margin),
    ]
