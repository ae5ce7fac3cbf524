"""What paying for speed teaches: a family whose calls may be made together, trained with β = 0 and with β > 0.

A policy is made from demonstrations of `gather`, most of which make one call a turn; each turn with calls takes a
second in tools, however many they are. From there the loop of configs/rl/gather-demo.toml runs twice, with the same
tasks in the same order and the same number of steps; only β differs. Where all attempts of a group succeed, as nearly
all do, β = 0 has nothing to tell them apart by. Then the models attempt held-out tasks, at temperature 1 as in
training. Wall clock per success is the time of all attempts over the number that succeeded.
"""

from pathlib import Path

from learning_attempts import Summary, time_attempts
from learning_policy import Policy
from report import Bar, print_table

from examples.demo import Lesson

CONFIG = "gather-demo.toml"
LESSON = Lesson("gather", (3, 3), num_bare=4000, num_whole=1600)
"""Three keys are more to copy than one: half as many demonstrations were enough with some seeds and not with others."""
MIN_SAVED = 0.30
NUM_TASKS, NUM_QUICK_TASKS = 200, 4
NUM_AT_ONCE = 12
"""Attempts of all models together: few, so that tools take most of the time, as they do in earnest."""


def measure_speed(folder: Path, seed: int, *, is_quick: bool) -> list[Bar]:
    policy = Policy(folder, LESSON, CONFIG, seed, is_quick=is_quick)
    beta = policy.config().reward.beta
    before, without, paid = "demonstrations alone", "trained, β = 0", f"trained, β = {beta:g}"
    models = {before: policy.model}
    if not is_quick:  # after a few steps there is no difference to see
        models[without] = policy.trained("beta-0", reward__beta=0.0)
    models[paid] = policy.trained("beta")
    tasks = policy.held_out(NUM_QUICK_TASKS if is_quick else NUM_TASKS)
    timed = time_attempts(models, policy.config(), tasks, NUM_AT_ONCE)
    found = {name: Summary.of(attempts) for name, attempts in timed.items()}
    print_table(
        f"{len(tasks)} held-out tasks of {LESSON.family}, {NUM_AT_ONCE} attempts at once, models in turns",
        ("policy", *Summary.TITLES),
        [(name, *each.cells()) for name, each in found.items()],
    )
    broken = sum(each.num_broken for each in found.values()) / (len(found) * len(tasks))
    bars = [Bar.at_most("speed: held-out attempts that broke", broken, 0.0)]
    if is_quick:
        return bars
    return [
        *bars,
        Bar.at_least(
            "speed: wall clock per success saved against β = 0",
            1 - found[paid].success_s / found[without].success_s,
            MIN_SAVED,
        ),
        Bar.at_least("speed: success less that with β = 0", found[paid].success - found[without].success, 0.0),
    ]
