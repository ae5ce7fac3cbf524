"""Record types shared by all packages: tasks, submissions and verdicts, completion calls,
episodes, groups, their rewards, and packs.

Records are frozen and hold no torch objects, so they can cross processes and outlive a run. An invalid field raises a
`RecordError` that names record and field, and never reaches a trainer. Token fields are read-only numpy arrays: int32
ids and versions, float32 logprobs. numpy is loaded with the first of them: a task's worker, which has none, starts in
half the time without it.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import TYPE_CHECKING, NoReturn, TypeAlias, TypeVar, cast

from m2forge.errors import RecordError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

JsonValue: TypeAlias = bool | int | float | str | Sequence["JsonValue"] | Mapping[str, "JsonValue"] | None
if TYPE_CHECKING:
    IntArray: TypeAlias = npt.NDArray[np.int32]
    FloatArray: TypeAlias = npt.NDArray[np.float32]
else:

    def __getattr__(name: str) -> object:
        """The types of arrays, for a module that imports them."""
        if name not in ("IntArray", "FloatArray"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        import numpy as np
        import numpy.typing as npt

        return npt.NDArray[np.int32 if name == "IntArray" else np.float32]


LOGPROB_SLACK = 1e-4
"""A logprob may exceed 0 by this much: the rounding of a float32 log-softmax over a large vocabulary."""
NO_TARGET = -1
"""In `Pack.targets`: no loss at this token."""
MAX_INT32 = 2**31 - 1
MAX_PENALTY = 1e4
"""Larger than any useful value, and its product with any count is far below the float32 maximum."""


class Domain(StrEnum):
    """What a task exercises; stages mix the domains at configured ratios."""

    REASONING = "reasoning"
    CODING = "coding"
    AGENT = "agent"
    GENERAL = "general"


class FinishReason(StrEnum):
    """Why the engine stopped a completion."""

    STOP = "stop"
    """A stop token or a stop string was sampled."""
    LENGTH = "length"
    """The token limit was reached."""
    ABORT = "abort"
    """The client disconnected or the engine aborted the request."""


class CallRole(StrEnum):
    """What a completion call is to its episode; `gateway/admin.py` specifies the rule."""

    MAIN = "main"
    SIDE = "side"
    """A single request without tools beside a conversation that has them: a title, a commit message, a probe."""
    SUB_AGENT = "sub_agent"
    """It belongs to another conversation than the main one."""


@dataclass(frozen=True, slots=True)
class PolicyVersion:
    """One state of the weights."""

    lineage: str
    """The run that trained these weights; steps of different lineages are not comparable."""
    step: int
    """Optimizer steps since the start of the lineage; 0 is its initial weights."""
    branch: str = ""
    """Id of the trainer process that produced these weights. A trainer that resumes from a checkpoint reaches the same
    step numbers again with different weights; the branch distinguishes them. Empty if no trainer publishes."""

    def to_dict(self) -> dict[str, JsonValue]:
        """As JSON; an empty branch is omitted."""
        named: dict[str, JsonValue] = {"lineage": self.lineage, "step": self.step}
        return named | {"branch": self.branch} if self.branch else named

    def __post_init__(self) -> None:
        _require_text("PolicyVersion", "lineage", self.lineage)
        if not 0 <= self.step <= MAX_INT32:
            _refuse("PolicyVersion", "step", self.step, f"expected 0 to {MAX_INT32}")


ROLLOUT_KEY = "rollout"
"""Metadata key of the command that attempts a task instead of the run's agent."""


@dataclass(frozen=True, slots=True)
class Task:
    """One task, before any attempt."""

    id: str
    domain: Domain
    instruction: str
    """The agent's instruction."""
    difficulty: float = 0.0
    """Larger is harder; the scale depends on the task family."""
    metadata: Mapping[str, JsonValue] = field(default_factory=dict)
    """Data for the verifier, and the task's origin. JSON values only."""

    def __post_init__(self) -> None:
        _require_text("Task", "id", self.id)
        _require_text(f"Task {self.id}", "instruction", self.instruction)
        _require_finite(f"Task {self.id}", "difficulty", self.difficulty)
        _require_json(f"Task {self.id}", "metadata", self.metadata)

    @classmethod
    def read(cls, fields: Mapping[str, JsonValue]) -> Task:
        """Build a task from the JSON of `asdict`."""
        try:
            return cls(**dict(fields) | {"domain": Domain(fields["domain"])})  # type: ignore[arg-type]  # checked there
        except (KeyError, TypeError, ValueError) as error:
            raise RecordError(f"Task: expected its fields, received {str(fields)[:200]} ({error})") from error


# -- submissions and verdicts -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Submission:
    """What an attempt hands to the task's verifier. JSON values only, because verifiers run in worker processes."""

    answer: str
    """The agent's final answer."""
    workspace: str | None = None
    """Absolute path of the workspace as the agent left it; None if the attempt had none."""
    messages: tuple[Mapping[str, JsonValue], ...] = ()
    """The main conversation as the gateway recorded it, in OpenAI's message form."""
    steps: tuple[Mapping[str, JsonValue], ...] = ()
    """One object per call that the gateway recorded, in order."""

    def __post_init__(self) -> None:
        if not isinstance(self.answer, str):
            _refuse("Submission", "answer", self.answer, "expected text")
        object.__setattr__(self, "messages", tuple(self.messages))
        object.__setattr__(self, "steps", tuple(self.steps))

    @classmethod
    def read(cls, fields: Mapping[str, JsonValue]) -> Submission:
        """Build a submission from the JSON of `asdict`."""
        try:
            return cls(**dict(fields))  # type: ignore[arg-type]  # checked there
        except TypeError as error:
            raise RecordError(f"Submission: expected its fields, received {str(fields)[:200]} ({error})") from error


class VerdictReason(StrEnum):
    """How a verdict was reached; `tasks/runner.py` specifies the rule. A lost worker gives no verdict."""

    JUDGED = "judged"
    LIMIT = "limit"
    """The verifier exceeded its time or memory limit: perf 0."""
    VERIFIER_ERROR = "verifier_error"
    """The verifier raised, twice: perf 0."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A verifier's result for a submission."""

    perf: float
    """Score from 0, wrong, to 1, right."""
    evidence: Mapping[str, JsonValue] = field(default_factory=dict)
    """What was received and what was expected, as JSON values."""
    reason: VerdictReason = VerdictReason.JUDGED
    criteria: Mapping[str, float] = field(default_factory=dict)
    """Score of each criterion by name, from 0 to 1; the verifier combines them into `perf`."""
    reward: float | tuple[float, ...] | None = None
    """What `reward.function` returned: the reward of the episode, or of each step; None without such a function."""

    def __post_init__(self) -> None:
        scores: dict[str, object] = {f"criteria: {name}": score for name, score in self.criteria.items()}
        for name, score in {"perf": self.perf, **scores}.items():
            if not isinstance(score, int | float) or not 0 <= score <= 1:
                _refuse("Verdict", name, score, "expected a number from 0 to 1")

    @classmethod
    def read(cls, fields: Mapping[str, JsonValue]) -> Verdict:
        """Build a verdict from the JSON of `asdict`."""
        try:
            reason = VerdictReason(str(fields.get("reason", VerdictReason.JUDGED)))
            reward = fields.get("reward")
            reward = tuple(reward) if isinstance(reward, list) else reward
            return cls(**dict(fields) | {"reason": reason, "reward": reward})  # type: ignore[arg-type]  # checked there
        except (TypeError, ValueError) as error:
            raise RecordError(f"Verdict: expected its fields, received {str(fields)[:200]} ({error})") from error


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters with which tokens were drawn from the model's logits."""

    temperature: float = 1.0
    """Divisor of the logits; 0: greedy."""
    top_p: float = 1.0
    """Nucleus sampling: only the likeliest tokens that together reach this probability; 1: off."""
    top_k: int = 0
    """Only this many of the likeliest tokens; 0: off."""
    min_p: float = 0.0
    """Only tokens with at least this share of the likeliest token's probability; 0: off."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of every token sampled before."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of a token once for each time it was sampled before."""
    repetition_penalty: float = 1.0
    """Divides the logit of every token of prompt and completion so far, or multiplies it if it is negative."""

    def __post_init__(self) -> None:
        _require_finite("Sampling", "temperature", self.temperature)
        if self.temperature < 0:
            _refuse("Sampling", "temperature", self.temperature, "expected 0 or more")
        if not 0 < self.top_p <= 1:
            _refuse("Sampling", "top_p", self.top_p, "expected a number above 0, at most 1")
        if not 0 <= self.top_k <= MAX_INT32 or self.top_k % 1:
            _refuse("Sampling", "top_k", self.top_k, f"expected an integer from 0 to {MAX_INT32}")
        if not 0 <= self.min_p <= 1:
            _refuse("Sampling", "min_p", self.min_p, "expected a number from 0 to 1")
        for name in ("presence_penalty", "frequency_penalty"):
            if not abs(getattr(self, name)) <= MAX_PENALTY:
                _refuse("Sampling", name, getattr(self, name), f"expected -{MAX_PENALTY:g} to {MAX_PENALTY:g}")
        if not 1 / MAX_PENALTY <= self.repetition_penalty <= MAX_PENALTY:
            expected = f"expected {1 / MAX_PENALTY:g} to {MAX_PENALTY:g}"
            _refuse("Sampling", "repetition_penalty", self.repetition_penalty, expected)

    @property
    def is_truncated(self) -> bool:
        """Whether the sampling distribution differs from the softmax of the tempered logits over the whole vocabulary:
        some tokens were excluded or penalised."""
        return self.temperature == 0 or self.top_p < 1 or self.top_k > 0 or self.min_p > 0 or self.is_penalised

    @property
    def is_penalised(self) -> bool:
        """Whether the logits depend on the tokens so far."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1


@dataclass(frozen=True, slots=True)
class RequestedSampling:
    """The requested sampling, where the run overrode it."""

    sampling: Sampling
    seed: int | None = None


@functools.cache
def plain_sampling() -> Sampling:
    """Temperature 1 over the whole vocabulary; one shared instance."""
    return Sampling()


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One completion call: the context as sent (the state) and the whole completion (the action)."""

    prompt_ids: IntArray
    response_ids: IntArray
    """Sampled tokens; empty for an empty action."""
    logprobs: FloatArray
    """Logprob of each response token under the distribution it was sampled from."""
    versions: IntArray
    """Policy version (step) that sampled each response token: a completion may span a weight update."""
    finish_reason: FinishReason
    started_s: float
    """Wall clock, seconds since the epoch."""
    finished_s: float
    sampling: Sampling = field(default_factory=plain_sampling)
    requested: RequestedSampling | None = None
    """The requested sampling, if `sampling` replaced it; None if it was used as requested."""
    notices: tuple[str, ...] = ()
    """What the gateway did not honour of the request, one short text each."""

    _path: IntArray | None = field(init=False, repr=False, default=None)
    """One array that prompt and response are views of, if they were copied on construction."""

    def __post_init__(self) -> None:
        path = _concat(self.prompt_ids, self.response_ids)
        object.__setattr__(self, "_path", path)
        if path is not None:
            num_prompt = self.prompt_ids.size
            object.__setattr__(self, "prompt_ids", path[:num_prompt])
            object.__setattr__(self, "response_ids", path[num_prompt:])
        else:
            object.__setattr__(self, "prompt_ids", _int_array("Call", "prompt_ids", self.prompt_ids))
            object.__setattr__(self, "response_ids", _int_array("Call", "response_ids", self.response_ids))
        object.__setattr__(self, "versions", _int_array("Call", "versions", self.versions))
        object.__setattr__(self, "logprobs", _logprob_array("Call", "logprobs", self.logprobs))
        if not self.prompt_ids.size:
            _refuse("Call", "prompt_ids", [], "expected at least one token, which predicts the first sampled one")
        for name in ("logprobs", "versions"):
            if getattr(self, name).size != self.response_ids.size:
                size = getattr(self, name).size
                _refuse("Call", name, f"{size} values", f"expected one per response token, {self.response_ids.size}")
        _require_finite("Call", "started_s", self.started_s)
        _require_finite("Call", "finished_s", self.finished_s)
        if self.finished_s < self.started_s:
            _refuse("Call", "finished_s", self.finished_s, f"expected at least started_s, {self.started_s}")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Call):
            return NotImplemented
        import numpy as np

        return (
            self.finish_reason == other.finish_reason
            and self.started_s == other.started_s
            and self.finished_s == other.finished_s
            and self.sampling == other.sampling
            and self.requested == other.requested
            and self.notices == other.notices
            and np.array_equal(self.prompt_ids, other.prompt_ids)
            and np.array_equal(self.response_ids, other.response_ids)
            and np.array_equal(self.logprobs, other.logprobs)
            and np.array_equal(self.versions, other.versions)
        )

    def __reduce__(self) -> tuple[type[Call], tuple[object, ...]]:
        # Through the constructor, because unpickled arrays would be writeable.
        return Call, tuple(getattr(self, item.name) for item in fields(self) if item.init)

    def path(self) -> IntArray:
        """Token ids of prompt and response, concatenated."""
        import numpy as np

        return np.concatenate((self.prompt_ids, self.response_ids)) if self._path is None else self._path


@dataclass(frozen=True, slots=True)
class Reward:
    """The reward of an episode: total = α·process + β·speed + perf, with the configured weights."""

    process: float
    """Penalties for malformed calls and language mixing, credit for well-structured steps."""
    speed: float
    """A decreasing function of the time taken relative to the task's baseline time."""
    perf: float
    """The score by the task's verifier."""
    total: float
    evidence: Mapping[str, JsonValue] = field(default_factory=dict)
    """Evidence of the verifier. JSON values only."""

    def __post_init__(self) -> None:
        for name in ("process", "speed", "perf", "total"):
            _require_finite("Reward", name, getattr(self, name))
        _require_json("Reward", "evidence", self.evidence)


@dataclass(frozen=True, slots=True)
class Episode:
    """One attempt at a task: all completion calls of one agent, including sub-agents, in the order they finished."""

    id: str
    task: Task
    calls: tuple[Call, ...]
    reward: Reward | None = None
    """None until known; feedback may arrive long after the last call."""
    failure: str | None = None
    """The error, if the attempt itself failed (a crash, a timeout); an unsolved task is not a failure."""

    def __post_init__(self) -> None:
        _require_text("Episode", "id", self.id)
        object.__setattr__(self, "calls", tuple(self.calls))
        if self.failure is not None:
            _require_text(f"Episode {self.id}", "failure", self.failure)


@dataclass(frozen=True, slots=True, eq=False)
class Pack:
    """Concatenated documents, the input of a model: each attends only to itself."""

    tokens: IntArray
    targets: IntArray
    """For each token the one it should predict, or NO_TARGET."""
    lengths: IntArray
    """Length of each document in tokens; they sum to the number of tokens."""
    tags: IntArray
    """Tag of each document in metrics, such as the index of its domain."""

    def __post_init__(self) -> None:
        for name in ("tokens", "lengths", "tags"):
            object.__setattr__(self, name, _int_array("Pack", name, getattr(self, name)))
        object.__setattr__(self, "targets", _int_array("Pack", "targets", self.targets, least=NO_TARGET))
        if self.targets.size != self.tokens.size:
            _refuse("Pack", "targets", f"{self.targets.size} values", f"expected one per token, {self.tokens.size}")
        if self.tags.size != self.lengths.size:
            _refuse("Pack", "tags", f"{self.tags.size} values", f"expected one per document, {self.lengths.size}")
        if not self.lengths.size or self.lengths.min() < 1 or self.lengths.sum() != self.tokens.size:
            expected = f"expected lengths that add up to {self.tokens.size} tokens"
            _refuse("Pack", "lengths", self.lengths[:8].tolist(), expected)


def _refuse(record: str, name: str, value: object, expected: str) -> NoReturn:
    raise RecordError(f"{record}: {name}: {expected}, received {value!r}")


def _require_text(record: str, name: str, value: str) -> None:
    if not value:
        _refuse(record, name, value, "expected text")


def _require_finite(record: str, name: str, value: float) -> None:
    if not math.isfinite(value):
        _refuse(record, name, value, "expected a finite number")


def _require_json(record: str, name: str, value: Mapping[str, JsonValue]) -> None:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise RecordError(f"{record}: {name}: expected JSON values only ({error})") from error


def _concat(first: npt.ArrayLike, second: npt.ArrayLike) -> IntArray | None:
    """Two arrays of ids as one read-only copy: one pass validates and copies both. None if one can be used uncopied, or
    `_int_array` has to convert or reject one."""
    import numpy as np

    if not (isinstance(first, np.ndarray) and isinstance(second, np.ndarray)):
        return None
    if first.dtype != np.int32 or second.dtype != np.int32 or first.ndim != 1 or second.ndim != 1:
        return None
    if not (first.flags.writeable and second.flags.writeable):
        return None
    path: IntArray = np.concatenate((first, second))
    if path.size and np.minimum.reduce(path) < 0:
        return None
    path.flags.writeable = False
    return path


def _int_array(record: str, name: str, values: npt.ArrayLike, least: int = 0) -> IntArray:
    """A read-only int32 copy; an array that already is read-only int32 is returned as it is."""
    import numpy as np

    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        _refuse(record, name, f"shape {array.shape} of {array.dtype}", "expected a row of integers")
    # The ufunc reductions, because for a short array the method's overhead exceeds their cost.
    if array.size and (
        np.minimum.reduce(array) < least or (array.dtype != np.int32 and np.maximum.reduce(array) > MAX_INT32)
    ):
        bad = array[(array < least) | (array > MAX_INT32)][0]
        _refuse(record, name, int(bad), f"expected integers from {least} to {MAX_INT32}")
    return _freeze(array, np.int32)


def _logprob_array(record: str, name: str, values: npt.ArrayLike) -> FloatArray:
    import numpy as np

    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "fiu"):
        _refuse(record, name, f"shape {array.shape} of {array.dtype}", "expected a row of numbers")
    if array.dtype != np.float32:
        with np.errstate(over="ignore"):
            array = array.astype(np.float32)
    frozen = _freeze(array, np.float32)
    # Both reductions propagate NaN, and every comparison with NaN is false.
    if frozen.size and not (np.minimum.reduce(frozen) > -np.inf and np.maximum.reduce(frozen) <= LOGPROB_SLACK):
        index = int((~np.isfinite(frozen) | (frozen > LOGPROB_SLACK)).argmax())
        _refuse(record, f"{name}[{index}]", float(frozen[index]), "expected a finite number, at most 0")
    return frozen


_Number = TypeVar("_Number", "np.int32", "np.float32")


def _freeze(array: npt.NDArray[np.generic], dtype: type[_Number]) -> npt.NDArray[_Number]:
    if array.dtype == dtype and not array.flags.writeable:
        return cast("npt.NDArray[_Number]", array)
    frozen = array.astype(dtype)
    frozen.flags.writeable = False
    return frozen
