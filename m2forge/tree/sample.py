"""One sample of a token tree: a completion call without its token ids, which the tree stores once for all samples."""

import math
from dataclasses import dataclass, field, fields
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from m2forge.errors import RecordError
from m2forge.records import Asked, FinishReason, FloatArray, IntArray, Sampling, plain_sampling

ExpertArray: TypeAlias = npt.NDArray[np.int16]
"""(tokens, layers, chosen): the experts chosen for each token, in every layer with a router."""
UNKNOWN_EXPERT = -1
"""Value of all entries of a token whose routing was not recorded."""


def checked_experts(experts: npt.NDArray[np.integer]) -> ExpertArray:
    """(tokens, layers, chosen) as int16; a token's routing is complete or absent."""
    if experts.size and not UNKNOWN_EXPERT <= int(experts.min()) <= int(experts.max()) <= np.iinfo(np.int16).max:
        raise RecordError(f"expected -1 to 32767, received {experts.min()} to {experts.max()}")
    unknown = experts == UNKNOWN_EXPERT
    if bool((unknown.any((1, 2)) != unknown.all((1, 2))).any()):
        raise RecordError("expected all experts of a token or none, received a token routed in part")
    return experts.astype(np.int16)


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    name: str
    """Name in errors and results; unique in its tree."""
    num_prompt: int
    """Prompt tokens of its path; the rest of the path was sampled."""
    logprobs: FloatArray
    """Logprob of each sampled token, under the distribution it was sampled from."""
    versions: IntArray
    """Policy version (step) that sampled each token."""
    finish_reason: FinishReason
    started_s: float
    finished_s: float
    episode: str = ""
    """The attempt it belongs to, if samples of one attempt are weighted together."""
    advantage: float = 0.0
    """Advantage of its tokens; 0 until rewards are known."""
    sampling: Sampling = field(default_factory=plain_sampling)
    weight: float = 1.0
    """Weight of each of its tokens, relative to those of other samples in the same optimizer step."""
    asked: Asked | None = None
    """The requested sampling, if `sampling` replaced it."""

    def __post_init__(self) -> None:
        if not self.name:
            raise RecordError("Sample: name: expected text, received ''")
        if not math.isfinite(self.advantage):
            raise RecordError(f"Sample {self.name}: advantage: expected a finite number, received {self.advantage!r}")
        if not 0 <= self.weight < math.inf:
            raise RecordError(
                f"Sample {self.name}: weight: expected a finite number, at least 0, received {self.weight!r}"
            )

    @property
    def num_response(self) -> int:
        return self.logprobs.size

    @property
    def num_tokens(self) -> int:
        return self.num_prompt + self.logprobs.size

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sample):
            return NotImplemented
        return all(np.array_equal(getattr(self, item.name), getattr(other, item.name)) for item in fields(self))
