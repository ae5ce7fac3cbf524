"""What components ask of each other, so that they meet without importing one another.

An `Engine` samples from a policy: token ids in, token ids out, each with its log-probabilities and the version that
sampled it. Native, remote and scripted engines are one to whoever asks.
"""

import math
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from m2forge.errors import RecordError
from m2forge.records import FinishReason, FloatArray, IntArray, PolicyVersion, Sampling


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """What is asked of an engine: to continue these tokens."""

    ids: IntArray
    max_tokens: int
    """Sampled tokens, at most."""
    sampling: Sampling = field(default_factory=Sampling)
    stop_ids: tuple[int, ...] = ()
    """A sampled token among these ends the completion and belongs to it."""
    stop_texts: tuple[str, ...] = ()
    """Text that ends the completion with the token that completes it, however it is cut into tokens; special tokens
    count as their names. An engine that cannot be exact about it refuses."""
    seed: int | None = None
    """The same seed, prompt and weights draw the same tokens, whatever else the engine does meanwhile."""
    num_samples: int = 1
    """Completions to draw; they share the prompt's computation."""
    priority: int = 0
    """Higher is served first."""
    timeout_s: float | None = None
    """After so long what is there is returned, as aborted."""
    returns_experts: bool = False

    def __post_init__(self) -> None:
        for name in ("max_tokens", "num_samples"):
            if getattr(self, name) < 1:
                raise RecordError(f"Prompt: {name}: expected 1 or more, received {getattr(self, name)!r}")
        if not self.ids.size:
            raise RecordError("Prompt: ids: expected at least one token, received none")
        if self.timeout_s is not None and not 0 <= self.timeout_s < math.inf:
            raise RecordError(f"Prompt: timeout_s: expected a finite number, 0 or more, received {self.timeout_s!r}")
        for text in self.stop_texts:
            if any("\ud800" <= sign <= "\udfff" for sign in text):
                raise RecordError(f"Prompt: stop_texts: expected text that UTF-8 can express, received {text!r}")


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Tokens of one completion, as they come; the last one carries the reason it ended."""

    sample: int
    """Which of the prompt's completions."""
    ids: IntArray
    logprobs: FloatArray
    """Under the distribution that each token was drawn from; 0 where it was the only choice."""
    raw_logprobs: FloatArray
    """Under the softmax of the bare logits; NaN where a server does not tell."""
    versions: IntArray
    """Step of the policy that drew each token."""
    num_cached: int = 0
    """Tokens of the prompt that were not computed again."""
    experts: npt.NDArray[np.int16] | None = None
    """(tokens, layers, chosen) of the tokens that were run for this chunk, from the prompt's first on; −1 where another
    request had computed them."""
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class EngineState:
    version: PolicyVersion
    num_running: int
    """Completions that are being computed: a prompt with three samples counts as three."""
    num_waiting: int
    """Completions that were taken and wait for room."""


class Engine(Protocol):
    def generate(self, prompt: Prompt) -> AsyncGenerator[Chunk, None]:
        """Closing the iterator aborts what is not finished. A prompt that can never be served is refused at once."""
        ...

    async def load(self, folder: Path, version: PolicyVersion) -> None:
        """Take over the weights of a model folder while serving."""
        ...

    async def state(self) -> EngineState: ...

    async def close(self) -> None: ...
