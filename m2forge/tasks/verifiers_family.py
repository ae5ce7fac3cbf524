"""A family from an environment of the library verifiers: `verifiers:ENV` in, its tasks and its rubric's verdicts out.

The environment drives its own rollout: a task's metadata names the command (`ROLLOUT_KEY`) that runs instead of the
agent (`tasks/verifiers_rollout.py`), against the same gateway and with the attempt's own key. Its reward, the weighted
sum of the rubric, is perf, clamped to 0 to 1; parts and metrics are evidence.

A rollout that failed for a reason other than the policy (provider, sandbox, tunnel, interception) gives no verdict: the
attempt is retried. An endless task set is cut to `MAX_TASKS` tasks.
"""

import importlib
import itertools
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, cast

from m2forge.errors import ConfigError, NotFoundError, RecordError
from m2forge.records import ROLLOUT_KEY, Domain, JsonValue, Submission, Task, Verdict
from m2forge.tasks.family import FAMILY_KEY, Family, UnavailableError, shown
from m2forge.tasks.source import VERIFIERS_PREFIX

MAX_TASKS = 10_000
INFRA_ERRORS = ("ProviderError", "SandboxError", "TunnelError", "InterceptionError")
"""Types of the library's errors that the policy did not cause, unless a request was refused."""
PROGRAM = Path(__file__).parent / "verifiers_rollout.py"


class EnvTaskData(Protocol):
    idx: int | None
    prompt_text: str


class EnvTask(Protocol):
    """What is read of the library's tasks."""

    data: EnvTaskData
    key: str


class VerifiersFamily(Family):
    name: str
    domain: Domain
    levels: range
    has_levels = False

    def __init__(self, env_id: str, domain: Domain | None = None) -> None:
        self.name, self.domain, self.levels = f"{VERIFIERS_PREFIX}{env_id}", domain or Domain.AGENT, range(1)
        self.tasks = tuple(self._task(env_id, task) for task in _load_tasks(env_id))
        if not self.tasks:
            raise ConfigError(f"{self.name}: its task set is empty; choose another environment")

    def _task(self, env_id: str, task: EnvTask) -> Task:
        command: list[JsonValue] = [sys.executable, "-P", str(PROGRAM), env_id, str(task.data.idx)]
        metadata: dict[str, JsonValue] = {FAMILY_KEY: self.name, ROLLOUT_KEY: command}
        instruction = task.data.prompt_text or f"Task {task.data.idx} of {env_id}."
        return Task(f"{self.name}-{task.key[:16]}", self.domain, instruction, 0.0, metadata)

    def draw(self, difficulty: int, seed: int) -> Task:
        return self.tasks[seed % len(self.tasks)]

    def verify(self, task: Task, submission: Submission) -> Verdict:
        return rollout_verdict(submission.answer, self.name)


def rollout_verdict(output: str, name: str) -> Verdict:
    """The verdict from the output of `tasks/verifiers_rollout.py`; `name` names the family in errors."""
    result = _read_result(output)
    errors = [error for error in cast("list[JsonValue]", result.get("errors") or []) if isinstance(error, Mapping)]
    if result.get("ok") is not True:
        for error in errors:
            status = error.get("status")
            is_refused = isinstance(status, int) and 400 <= status < 500
            if error.get("type") in INFRA_ERRORS and not is_refused:
                raise UnavailableError(f"{name}: {error.get('type')}: {shown(error.get('message'))}")
    reward = result.get("reward")
    if not isinstance(reward, int | float) or not math.isfinite(reward):
        raise RecordError(f"{name}: reward: expected a finite number, received {reward!r}")
    evidence: dict[str, JsonValue] = {name: result.get(name) for name in ("reward", "rewards", "metrics")}
    return Verdict(min(1.0, max(0.0, float(reward))), evidence | {"errors": list(errors)})


def _load_tasks(env_id: str) -> list[EnvTask]:
    try:
        loaders = importlib.import_module("verifiers.v1.utils.loaders")
    except ImportError as error:
        raise ConfigError(
            f"sources {VERIFIERS_PREFIX}… need the library verifiers, 0.4 or newer, which is missing: "
            "pip install 'm2forge[verifiers]'"
        ) from error
    try:
        config = loaders.resolve_env_config({"taskset": {"id": env_id}})
        return list(itertools.islice(loaders.load_taskset(config.taskset), MAX_TASKS))
    except ModuleNotFoundError as error:
        raise NotFoundError(f"{VERIFIERS_PREFIX}{env_id}: {error}") from error
    except Exception as error:
        raise ConfigError(f"{VERIFIERS_PREFIX}{env_id}: {type(error).__name__}: {error}") from error


def _read_result(output: str) -> Mapping[str, JsonValue]:
    """The JSON object in the last line of the rollout's output."""
    lines = output.strip().splitlines()
    try:
        result = json.loads(lines[-1])
    except (ValueError, IndexError):
        result = None
    if not isinstance(result, dict):
        raise RecordError(f"the rollout printed no result; its output ends with {shown(output[-150:])!r}")
    return result
