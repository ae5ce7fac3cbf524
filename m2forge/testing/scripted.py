"""An engine without a model: a deterministic policy over token ids, for tests of engine clients.

The logits after a context are pseudo-random numbers seeded by a hash of the policy's seed, its version and all tokens
so far, so the same request gets the same response in every process, another version responds differently, and logprobs
are those of a real softmax. `ScriptedPolicy` is the distribution; `ScriptedEngine` samples from it and implements the
`Engine` contract. A script may fix the sampled tokens: they get the logprobs that the policy assigns them.
"""

import asyncio
import hashlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from m2forge.errors import EngineError, NotFoundError, RequestError
from m2forge.protocols import Chunk, EngineState, Prompt
from m2forge.records import FinishReason, PolicyVersion, Sampling

Script: TypeAlias = Mapping[tuple[int, ...], Sequence[int]] | Callable[[tuple[int, ...]], Sequence[int] | None]
"""Maps prompt ids to the response of every completion. Prompts that it does not map are sampled."""

LOGIT_SPREAD = 2.0
"""Standard deviation of the logits: wide enough that some tokens are likely and some are not."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """One sampled token."""

    id: int
    logprob: float
    raw_logprob: float


class ScriptedPolicy:
    """The next-token distribution: a pure function of seed, version and context."""

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        self.vocab_size, self._seed = vocab_size, seed

    def logits(self, context: Sequence[int], version: PolicyVersion) -> npt.NDArray[np.float64]:
        """(vocab_size,): logits of the token after `context`."""
        named = f"{self._seed} {version.lineage} {version.step} {version.branch}"
        digest = hashlib.blake2b(named.encode(), digest_size=16)
        digest.update(np.asarray(context, np.int32).tobytes())
        return _generator(digest.digest()).standard_normal(self.vocab_size) * LOGIT_SPREAD

    def draw(
        self,
        prompt_ids: Sequence[int],
        sampled_ids: Sequence[int],
        version: PolicyVersion,
        sampling: Sampling,
        uniform: float,
        forced_id: int | None = None,
    ) -> Drawn:
        """Sample by inverse CDF at `uniform`, or return `forced_id` as if it had been sampled."""
        logits_V = self.logits([*prompt_ids, *sampled_ids], version)
        raw_V = _log_softmax(logits_V)
        drawn_V = shaped_logprobs(_penalised(logits_V, sampling, prompt_ids, sampled_ids), sampling, forced_id)
        if forced_id is None:
            share_V = np.exp(drawn_V).cumsum()
            chosen = int(np.searchsorted(share_V, uniform * share_V[-1], side="right"))
        else:
            chosen = forced_id
        return Drawn(chosen, float(drawn_V[chosen]), float(raw_V[chosen]))


def shaped_logprobs(
    logits_V: npt.NDArray[np.float64], sampling: Sampling, scripted_id: int | None = None
) -> npt.NDArray[np.float64]:
    """Logprobs of the sampling distribution, −inf for excluded tokens: min_p, then top_k, then top_p of the remaining
    ones. `scripted_id` is never excluded."""
    allowed_V = np.zeros(logits_V.size, bool)
    if sampling.temperature == 0:
        allowed_V[int(logits_V.argmax()) if scripted_id is None else scripted_id] = True
        return np.where(allowed_V, 0.0, -np.inf)
    hot_V = _log_softmax(logits_V / sampling.temperature)
    order_V = np.argsort(-hot_V, kind="stable")
    sorted_V = hot_V[order_V]
    chosen_V = sorted_V >= sorted_V[0] + np.log(max(sampling.min_p, np.finfo(np.float64).tiny))
    if sampling.top_k:
        chosen_V[sampling.top_k :] = False
    share_V = np.exp(_log_softmax(np.where(chosen_V, sorted_V, -np.inf)))
    chosen_V &= share_V.cumsum() - share_V < sampling.top_p  # probability of all likelier tokens
    allowed_V[order_V[chosen_V]] = True
    if scripted_id is not None:
        allowed_V[scripted_id] = True
    return _log_softmax(np.where(allowed_V, hot_V, -np.inf))


def uniform_draw(seed: int, sample: int, index: int) -> float:
    """A number in [0, 1) for token `index` of completion `sample`, independent of all other draws."""
    return float(_generator(hashlib.blake2b(f"{seed} {sample} {index}".encode(), digest_size=16).digest()).random())


@dataclass(slots=True)
class _Completion:
    """A completion in progress."""

    sample: int
    ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None


class ScriptedEngine:
    """See `Engine`. Samples one token of each completion in turn, with `delay_s` before each."""

    def __init__(
        self,
        vocab_size: int = 64,
        seed: int = 0,
        *,
        version: PolicyVersion | None = None,
        script: Script | None = None,
        context: int | None = None,
        decode: Callable[[Sequence[int]], bytes] | None = None,
        delay_s: float = 0.0,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`context`: maximum length of prompt and completion; `decode`: returns the bytes of ids, for stop texts."""
        self.policy = ScriptedPolicy(vocab_size, seed)
        self._version = version or PolicyVersion("scripted", 0)
        self._script, self._context, self._decode = script, context, decode
        self._delay_s, self._sleep, self._clock = delay_s, sleep, clock
        self._num_requests, self._num_running, self._is_closed = 0, 0, False

    async def generate(self, prompt: Prompt) -> AsyncGenerator[Chunk, None]:
        if self._is_closed:
            raise EngineError("the engine is closed; make another")
        self._refuse_impossible(prompt)
        ids = tuple(int(id) for id in prompt.ids)
        script = self._scripted(ids)
        # Requests without a seed get different ones, the same in every run.
        seed = self._num_requests if prompt.seed is None else prompt.seed
        self._num_requests += 1
        deadline_s = np.inf if prompt.timeout_s is None else self._clock() + prompt.timeout_s
        going = [_Completion(sample) for sample in range(prompt.num_samples)]
        self._num_running += len(going)
        try:
            while going:
                for completion in list(going):
                    await self._sleep(self._delay_s)
                    if self._clock() >= deadline_s:
                        completion.finish_reason = FinishReason.ABORT
                        yield make_chunk(completion.sample, [], self._version, FinishReason.ABORT)
                    else:
                        yield self._extend(completion, prompt, ids, script, seed)
                    if completion.finish_reason is not None:
                        going.remove(completion)
                        self._num_running -= 1
        finally:
            self._num_running -= len(going)

    async def load(self, folder: Path, version: PolicyVersion) -> None:
        """There are no weights: only the version changes the policy."""
        if not folder.is_dir():
            raise NotFoundError(f"{folder} is not a folder; give a model folder")
        self._version = version

    async def state(self) -> EngineState:
        return EngineState(self._version, self._num_running, 0)

    async def close(self) -> None:
        self._is_closed = True

    def _extend(
        self, completion: _Completion, prompt: Prompt, ids: tuple[int, ...], script: Sequence[int] | None, seed: int
    ) -> Chunk:
        index = len(completion.ids)
        uniform = uniform_draw(seed, completion.sample, index)
        forced_id = None if script is None else script[index]
        drawn = self.policy.draw(ids, completion.ids, self._version, prompt.sampling, uniform, forced_id)
        completion.ids.append(drawn.id)
        is_last = script is not None and index + 1 == len(script)
        if is_last or drawn.id in prompt.stop_ids or self._has_stop_text(completion.ids, prompt.stop_texts):
            completion.finish_reason = FinishReason.STOP
        elif index + 1 == prompt.max_tokens:
            completion.finish_reason = FinishReason.LENGTH
        return make_chunk(completion.sample, [drawn], self._version, completion.finish_reason)

    def _scripted(self, ids: tuple[int, ...]) -> Sequence[int] | None:
        if self._script is None:
            return None
        response = self._script.get(ids) if isinstance(self._script, Mapping) else self._script(ids)
        if response is not None and not response:
            raise RequestError(
                f"the script has an empty response to a prompt of {len(ids)} tokens; expected one token or more"
            )
        return response

    def _has_stop_text(self, ids: Sequence[int], stop_texts: Sequence[str]) -> bool:
        if not stop_texts or self._decode is None:
            return False
        text = self._decode(ids)
        return any(stop.encode() in text for stop in stop_texts)

    def _refuse_impossible(self, prompt: Prompt) -> None:
        strange = [int(id) for id in prompt.ids if not 0 <= id < self.policy.vocab_size]
        if strange:
            raise RequestError(f"the prompt holds ids outside 0..{self.policy.vocab_size - 1}: {strange[:8]}")
        wanted = prompt.ids.size + prompt.max_tokens
        if self._context is not None and wanted > self._context:
            raise RequestError(
                f"{prompt.ids.size} tokens of prompt and {prompt.max_tokens} sampled ones exceed the context length of "
                f"{self._context}; ask for fewer"
            )
        if "" in prompt.stop_texts:
            raise RequestError("stop_texts: expected text, received ''")
        if prompt.stop_texts and self._decode is None:
            raise RequestError("stop_texts need the engine's `decode`; give it, or stop by stop_ids")
        if prompt.returns_experts:
            raise RequestError("a scripted policy has no experts; ask without returns_experts")


def make_chunk(
    sample: int, drawn: Sequence[Drawn], version: PolicyVersion, finish_reason: FinishReason | None = None
) -> Chunk:
    """A chunk of these tokens, all of one version."""
    return Chunk(
        sample=sample,
        ids=np.array([token.id for token in drawn], np.int32),
        logprobs=np.array([token.logprob for token in drawn], np.float32),
        raw_logprobs=np.array([token.raw_logprob for token in drawn], np.float32),
        versions=np.full(len(drawn), version.step, np.int32),
        finish_reason=finish_reason,
    )


def _generator(key: bytes) -> np.random.Generator:
    # Counter-based, so that creating one is cheap and no state is shared.
    return np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))


def _penalised(
    logits_V: npt.NDArray[np.float64], sampling: Sampling, prompt_ids: Sequence[int], sampled_ids: Sequence[int]
) -> npt.NDArray[np.float64]:
    count_V = np.bincount(np.asarray(sampled_ids, np.int64), minlength=logits_V.size)
    was_there_V = count_V > 0
    was_there_V[np.asarray(prompt_ids, np.int64)] = True
    factor_V = np.where(logits_V > 0, 1 / sampling.repetition_penalty, sampling.repetition_penalty)
    repeated_V = logits_V * np.where(was_there_V, factor_V, 1)
    penalised_V: npt.NDArray[np.float64] = (
        repeated_V - sampling.presence_penalty * (count_V > 0) - sampling.frequency_penalty * count_V
    )
    return penalised_V


def _log_softmax(logits_V: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    shifted_V = logits_V - logits_V.max()
    with np.errstate(divide="ignore"):
        normalised_V: npt.NDArray[np.float64] = shifted_V - np.log(np.exp(shifted_V).sum())
    return normalised_V
