"""One completion in flight: its tokens, how many are in the KV cache, and the output not yet returned.

A prompt with n samples is n requests. A request stores all its tokens, prompt and sampled; the keys and values of the
first `num_computed` are in its blocks. Prefill, decode and prefill after preemption are not separate states: a step
computes tokens that are not computed yet, and once all are, it samples the next token.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from m2forge.protocols import Chunk, Prompt
from m2forge.records import FinishReason, PolicyVersion
from m2forge.rollout.execution.sampler import Row, is_bare
from m2forge.rollout.kv.block_pool import Block

Decode = Callable[[Sequence[int]], bytes]


class Drawn(NamedTuple):
    """Consecutive sampled tokens of one sequence."""

    tokens: list[int]
    logprobs: list[float]
    raw_logprobs: list[float]

    @property
    def num_sound(self) -> int:
        """Number of tokens before the first NaN or infinite logprob."""
        pairs = zip(self.logprobs, self.raw_logprobs, strict=True)
        return next((index for index, pair in enumerate(pairs) if not math.isfinite(sum(pair))), len(self.tokens))

    def first(self, num: int) -> "Drawn":
        return Drawn(self.tokens[:num], self.logprobs[:num], self.raw_logprobs[:num])


class Request:
    def __init__(
        self, id: str, sample: int, prompt: Prompt, *, seed: int, arrival: int, deadline_s: float = math.inf
    ) -> None:
        self.id, self.sample, self.prompt, self.seed, self.deadline_s = id, sample, prompt, seed, deadline_s
        self.order = (-prompt.priority, arrival, sample)
        """Scheduling order: by priority, then by age, then by sample."""
        self.ids: list[int] = prompt.ids.tolist()
        self.num_prompt = len(self.ids)
        self.max_ids = self.num_prompt + prompt.max_tokens
        self.is_bare = is_bare(prompt.sampling)
        """Whether temperature is the only sampling parameter in effect."""
        self.finish_reason: FinishReason | None = None
        self.blocks: list[Block] = []
        self.num_computed = 0
        self.num_prefilled = 0
        """Prefilled tokens, prefill after preemption included, except the last token of each prefill."""
        self.computed_by: list[tuple[int, PolicyVersion]] = []
        """Which policy version computed the cached tokens: (first token, version), in token order."""
        self.slot = -1
        """Index of this request among the running ones, unique while it runs."""
        self.num_mtp_computed: list[int] = []
        """By MTP module: number of leading tokens, at most `num_computed`, that it has run over."""
        self.drafts: list[int] = []
        """Draft tokens that follow `ids` and are not verified yet."""
        self.num_cached: int | None = None
        """Prompt tokens found in the prefix cache at the first admission."""
        self._unsent = Drawn([], [], [])
        self._unsent_versions: list[int] = []
        self._experts: list[npt.NDArray[np.int16]] = []
        self._num_routed = 0
        self._text = b""

    @property
    def num_uncomputed(self) -> int:
        """Tokens to compute before the next one can be sampled."""
        return len(self.ids) - self.num_computed

    @property
    def num_remaining(self) -> int:
        """Remaining tokens to sample, at most."""
        return self.max_ids - len(self.ids)

    @property
    def num_sampled(self) -> int:
        return len(self.ids) - self.num_prompt

    def rows(self, num_tokens: int) -> list[Row]:
        """Sampling rows of the next tokens, assuming that the drafts before each are accepted."""
        sampling, is_seeded = self.prompt.sampling, self.prompt.seed is not None
        prompt, sampled = list[int](), list[int]()
        if sampling.is_penalised:
            prompt, sampled = self.ids[: self.num_prompt], self.ids[self.num_prompt :]
        return [
            Row(
                sampling,
                self.seed,
                self.sample,
                self.num_sampled + index,
                prompt,
                sampled + self.drafts[:index] if sampling.is_penalised else sampled,
                is_seeded,
            )
            for index in range(num_tokens)
        ]

    def note_computed(self, num_tokens: int, version: PolicyVersion) -> None:
        last = self.computed_by[-1][1] if self.computed_by else None
        if last is not version and last != version:
            self.computed_by.append((self.num_computed, version))
        self.num_computed += num_tokens

    def note_experts(self, start: int, experts_TLK: npt.NDArray[np.int16]) -> None:
        """Record the experts of the tokens from `start` on. A recomputed token keeps its first record; tokens that were
        never routed here get −1."""
        missing = start - self._num_routed
        if missing > 0:
            self._experts.append(np.full((missing, *experts_TLK.shape[1:]), -1, np.int16))
            self._num_routed += missing
            missing = 0
        fresh = experts_TLK[-missing:]
        if len(fresh):
            self._experts.append(fresh)
            self._num_routed += len(fresh)

    def extend(self, drawn: Drawn, version: int, decode: Decode | None = None) -> int:
        """Append sampled tokens up to one that ends the completion; returns how many were appended."""
        num = min(len(drawn.tokens), self.num_remaining)
        if self.prompt.stop_ids or self.prompt.stop_texts:
            num = self._num_until_stop(drawn.tokens[:num], decode)
        self.ids += drawn.tokens[:num]
        self._unsent.tokens.extend(drawn.tokens[:num])
        self._unsent.logprobs.extend(drawn.logprobs[:num])
        self._unsent.raw_logprobs.extend(drawn.raw_logprobs[:num])
        self._unsent_versions += [version] * num
        if self.finish_reason is None and len(self.ids) == self.max_ids:
            self.finish_reason = FinishReason.LENGTH
        return num

    def _num_until_stop(self, tokens: Sequence[int], decode: Decode | None) -> int:
        for index, token in enumerate(tokens):
            if token in self.prompt.stop_ids or (decode is not None and self._completes_stop_text(token, decode)):
                self.finish_reason = FinishReason.STOP
                return index + 1
        return len(tokens)

    def _completes_stop_text(self, token: int, decode: Decode) -> bool:
        if not self.prompt.stop_texts:
            return False
        stops = [text.encode() for text in self.prompt.stop_texts]
        self._text += decode([token])
        found = any(stop in self._text for stop in stops)
        # Keep only the bytes that may begin a stop text.
        longest = max(len(stop) for stop in stops) - 1
        self._text = self._text[-longest:] if longest else b""
        return found

    def restart(self) -> None:
        """Discard everything after the prompt. The request must hold no blocks."""
        assert not self.blocks
        del self.ids[self.num_prompt :]
        self._unsent, self._unsent_versions = Drawn([], [], []), []
        self._experts, self._num_routed, self._text = [], 0, b""

    def chunk(self) -> Chunk:
        """Return the output that was not returned yet, and clear it."""
        drawn, versions, experts = self._unsent, self._unsent_versions, self._experts
        self._unsent, self._unsent_versions, self._experts = Drawn([], [], []), [], []
        return Chunk(
            sample=self.sample,
            ids=np.array(drawn.tokens, np.int32),
            logprobs=np.array(drawn.logprobs, np.float32),
            raw_logprobs=np.array(drawn.raw_logprobs, np.float32),
            versions=np.array(versions, np.int32),
            num_cached=self.num_cached or 0,
            experts=np.concatenate(experts) if experts else None,
            finish_reason=self.finish_reason,
        )
