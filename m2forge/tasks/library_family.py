"""Families of two libraries: datasets of reasoning-gym and environments of verifiers.

`reasoning-gym:chain_sum` and a hundred others: a task is an item of one of the library's datasets, identified by level
and seed; the verifier is the library's scorer. Many scorers give partial credit to any answer that contains the right
one, such as 0.8 to 11589 for 1589, which a policy would learn to exploit: by default only full credit counts.

If a dataset has a curriculum, the difficulty sets each of its attributes to that level, or to its highest; otherwise
every task has difficulty 0. The library generates items from a seed, so a task can be verified wherever the same
version is installed; an item that another version generates differently is refused. Some scorers evaluate the answer as
Python, which is unsafe with a policy's output, so their datasets are refused.

`verifiers:ENV`: the environment's tasks in, its rubric's verdicts out. The environment drives its own rollout: a task's
metadata names the command (`ROLLOUT_KEY`) that runs instead of the agent (`tasks/verifiers_rollout.py`), against the
same gateway and with the attempt's own key. Its reward, the weighted sum of the rubric, is perf, clamped to 0 to 1;
parts and metrics are evidence. A rollout that failed for a reason other than the policy (provider, sandbox, tunnel,
interception) gives no verdict: the attempt is retried. An endless task set is cut to `MAX_TASKS` tasks.
"""

import importlib
import itertools
import json
import math
import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from types import ModuleType
from typing import Literal, Protocol, TypeAlias, cast

from m2forge.errors import ConfigError, DataError, NotFoundError, RecordError, suggest
from m2forge.records import ROLLOUT_KEY, Domain, JsonValue, Submission, Task, Verdict
from m2forge.tasks.family import FAMILY_KEY, Family, UnavailableError, make_task, read_int, shown, task_random
from m2forge.tasks.source import GYM_PREFIX, VERIFIERS_PREFIX
from m2forge.text.message import Message

# -- reasoning-gym ----------------------------------------------------------------------------------------------------

NUM_SEEDS = 1 << 31
NUM_CACHED = 1024
"""Number of cached datasets; a task is verified once per attempt."""
MAX_ANSWER = 65_536
"""Maximum characters passed to a scorer; a longer answer is wrong."""
EVALUATING = frozenset(
    (
        "binary_matrix",
        "countdown",
        "intermediate_integration",
        "n_queens",
        "polynomial_multiplication",
        "puzzle24",
        "simple_integration",
        "spiral_matrix",
        "string_insertion",
    )
)
"""Datasets whose scorer evaluates the answer as Python."""
_ERRORS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""Exceptions that the library's generators and scorers raise at invalid input."""


Entry: TypeAlias = dict[str, object]
"""An item: its question, its answer, and the scorer's data."""


class Dataset(Protocol):
    """The part of the library's dataset interface that is used here."""

    def __getitem__(self, index: int) -> Entry: ...

    def score_answer(self, answer: str | None, entry: Entry) -> float: ...


@dataclass(frozen=True, slots=True)
class GymFamily(Family):
    dataset: str
    """Name of the dataset in the library."""
    domain: Domain = Domain.REASONING
    credit: Literal["whole", "part"] = "whole"
    """Whether a score below 1 counts as 0 (whole) or as itself (part); the evidence holds the score either way."""
    on_raise: Literal["verifier_error", "wrong"] = "verifier_error"
    """How to treat a scorer that raises: by the rule of every verifier (`tasks/runner.py`), or as a wrong answer."""
    name: str = field(init=False)
    levels: range = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", f"{GYM_PREFIX}{self.dataset}")
        object.__setattr__(self, "levels", range(_num_levels(self.dataset)))

    def draw(self, difficulty: int, seed: int) -> Task:
        item = task_random(self, difficulty, seed).randrange(NUM_SEEDS)
        _, entry = _open(self.dataset, difficulty, item)
        return make_task(self, difficulty, str(entry["question"]), {"level": difficulty, "seed": item})

    def prepare(self, task: Task) -> None:
        """Build the dataset, which may take longer than a verdict."""
        self._open(task)

    def verify(self, task: Task, submission: Submission) -> Verdict:
        """Raises what the scorer raises, unless `on_raise` is "wrong". The worker that this runs in kills a scorer that
        exceeds its time or memory limit (`tasks/runner.py`)."""
        dataset, entry = self._open(task)
        answer = submission.answer
        evidence: dict[str, JsonValue] = {"expected": shown(str(entry["answer"])), "received": shown(answer)}
        if len(answer) > MAX_ANSWER:
            return Verdict(0.0, evidence | {"error": f"{len(answer)} characters, at most {MAX_ANSWER}"})
        try:
            score = min(1.0, max(0.0, float(dataset.score_answer(answer.strip(), entry))))
        except _ERRORS as error:
            if self.on_raise != "wrong":
                raise
            return Verdict(0.0, evidence | {"error": shown(f"{type(error).__name__}: {error}")})
        return Verdict(score if self.credit == "part" else float(score == 1), evidence | {"score": score})

    def demonstrate(self, task: Task, rng: random.Random) -> list[Message]:
        """The answer only: the library gives no solution steps."""
        answer = self._open(task)[1]["answer"]
        if not isinstance(answer, str):
            raise DataError(f"{self.name}: its tasks have no answer; take demonstrations from another family")
        return [Message("user", task.instruction), Message("assistant", answer)]

    def _open(self, task: Task) -> tuple[Dataset, Entry]:
        dataset, entry = _open(self.dataset, read_int(task, "level"), read_int(task, "seed"))
        if str(entry["question"]) != task.instruction:
            raise DataError(
                f"Task {task.id}: the installed reasoning-gym generates another question; "
                "install the version that generated the task"
            )
        return dataset, entry


def _library() -> ModuleType:
    try:
        return importlib.import_module("reasoning_gym.factory")
    except ImportError as error:
        raise ConfigError(
            f"task families {GYM_PREFIX}… need reasoning-gym, which is missing: pip install 'm2forge[tasks]'"
        ) from error


@cache
def _num_levels(name: str) -> int:
    # Importing the package registers its datasets.
    factory = _library()
    importlib.import_module("reasoning_gym")
    if name not in factory.DATASETS:
        raise NotFoundError(f"reasoning-gym has no dataset {name!r}; {suggest(name, factory.DATASETS)}")
    if name in EVALUATING:
        raise ConfigError(f"{GYM_PREFIX}{name}: its scorer evaluates answers as Python; choose another dataset")
    if not factory.has_curriculum(name):
        return 1
    attributes = factory.create_curriculum(name).attributes.values()
    return max((len(attribute.levels) for attribute in attributes), default=1)


@lru_cache(NUM_CACHED)
def _open(name: str, level: int, seed: int) -> tuple[Dataset, Entry]:
    """Build a dataset of one item, since some generate all items at once; returns it and the item."""
    num_levels, factory = _num_levels(name), _library()
    if not 0 <= level < num_levels:
        raise DataError(f"{GYM_PREFIX}{name}: level: expected 0 to {num_levels - 1}, received {level}")
    settings = {"seed": seed, "size": 1}
    try:
        if factory.has_curriculum(name):
            curriculum = factory.create_curriculum(name)
            curriculum.set_global_level(level)
            dataset = cast(Dataset, factory.DATASETS[name][0](config=curriculum.generate_configuration(settings)))
        else:
            dataset = cast(Dataset, factory.create_dataset(name, **settings))
        return dataset, dataset[0]
    except _ERRORS as error:
        # At the highest levels some of the library's curricula exceed what its datasets allow.
        raise DataError(
            f"{GYM_PREFIX}{name}: the library generates no task of level {level} ({error}); choose other levels"
        ) from error


# -- verifiers --------------------------------------------------------------------------------------------------------

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
