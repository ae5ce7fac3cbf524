"""Where the time of a run went, read from what it left: the trainer's metrics and the busy logs of both processes.

The engine has work while one of its steps runs: from choosing the batch to having read the tokens on the host. The
trainer has work from the first pack of an optimizer step to having read its figures. Host time inside either counts as
work; reading the pool, building trees, writing and loading weights, and all that agents, gateway and loop do does not.
Measured from the end of the first optimizer step to the end of the last.
"""

from dataclasses import dataclass
from pathlib import Path

from forge_watch import Watched
from report import print_table

from m2forge.observe.busy import Interval, busy_s, read_busy
from m2forge.observe.metrics import FILE_NAME, read_metrics


@dataclass(frozen=True)
class DeviceSplit:
    """Seconds."""

    whole_s: float
    rollout_s: float
    training_s: float
    either_s: float
    kernels: float | None
    """Share of the time in which the GPU ran a kernel, by nvidia-smi."""

    @property
    def idle_share(self) -> float:
        return 1 - self.either_s / self.whole_s

    @property
    def both_s(self) -> float:
        return self.rollout_s + self.training_s - self.either_s


def device_split(watched: Watched) -> DeviceSplit | None:
    """None before the second step."""
    folder = watched.run_dir / "busy"
    rollout, training = read_busy(folder, "engine"), read_busy(folder, "trainer")
    if len(training) < 2:
        return None
    from_s, to_s = training[0][1], training[-1][1]
    return DeviceSplit(
        whole_s=to_s - from_s,
        rollout_s=busy_s(rollout, from_s, to_s),
        training_s=busy_s(training, from_s, to_s),
        either_s=busy_s([*rollout, *training], from_s, to_s),
        kernels=_mean_within(watched.utilisation, (from_s, to_s)),
    )


def _mean_within(samples: list[tuple[float, float]], interval: Interval) -> float | None:
    values = [value for at_s, value in samples if interval[0] <= at_s <= interval[1]]
    return sum(values) / len(values) if values else None


def print_device_split(split: DeviceSplit) -> None:
    parts = {
        "rollout alone": split.rollout_s - split.both_s,
        "training alone": split.training_s - split.both_s,
        "both": split.both_s,
        "neither": split.whole_s - split.either_s,
    }
    print_table(
        "The device, from the end of the first batch to the end of the last",
        ("has work for", "seconds", "share"),
        [(name, f"{seconds:.1f}", f"{seconds / split.whole_s:.1%}") for name, seconds in parts.items()],
    )
    if split.kernels is not None:
        print(f"nvidia-smi saw a kernel running {split.kernels:.1%} of that time")


def print_trainer_split(run_dir: Path) -> None:
    path = run_dir / FILE_NAME
    steps = read_metrics(path) if path.exists() else []
    if not steps:
        print("the trainer made no step")
        return
    parts = {
        "waited for a batch": "waited_s",
        "claimed it": "claimed_s",
        "trained": "trained_s",
        "published": "published_s",
    }
    sums = {name: sum(step.values[key] for step in steps[1:]) for name, key in parts.items()}
    whole_s = steps[-1].time_s - steps[0].time_s
    sums["everything else"] = whole_s - sum(sums.values())
    print_table(
        f"The trainer, {len(steps)} steps, the first left out",
        ("", "seconds", "share"),
        [(name, f"{seconds:.1f}", f"{seconds / max(whole_s, 1e-9):.1%}") for name, seconds in sums.items()],
    )
    last = steps[len(steps) // 2 :]
    for key in ("reward", "perf", "staleness", "tokens_computed", "token_ratio", "grad_norm"):
        values = [step.values[key] for step in last if key in step.values]
        if values:
            print(f"  {key}: {sum(values) / len(values):.4g} in the mean of the last {len(values)} steps")
