"""One completion in the making: its tokens, what of them is in the cache, and what was not yet handed out.

A prompt with n samples is n requests. A request knows all its tokens, prompt and sampled alike; the first
`num_computed` have their keys and values in its blocks. Whether it is read for the first time, goes on token by token
or was preempted and is read again is no state of its own: whatever is not computed is to be computed, and when all is,
the next token is drawn.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from m2forge.protocols import Chunk, Prompt
from m2forge.records import FinishReason, PolicyVersion
from m2forge.rollout.block_pool import Block

Decode = Callable[[Sequence[int]], bytes]


class Draw(NamedTuple):
    token: int
    logprob: float
    raw_logprob: float
    version: int


class Request:
    def __init__(
        self, id: str, sample: int, prompt: Prompt, *, seed: int, arrival: int, deadline_s: float = math.inf
    ) -> None:
        self.id, self.sample, self.prompt, self.seed, self.deadline_s = id, sample, prompt, seed, deadline_s
        self.order = (-prompt.priority, arrival, sample)
        """Who comes first: by priority, then by age."""
        self.ids: list[int] = prompt.ids.tolist()
        self.num_prompt = len(self.ids)
        self.finish_reason: FinishReason | None = None
        self.blocks: list[Block] = []
        self.num_computed = 0
        self.computed_by: list[tuple[int, PolicyVersion]] = []
        """Which weights computed what is in the blocks: (first token, version), in order of the tokens."""
        self.slot = -1
        """Its own among the requests that run."""
        self.num_foreseen: list[int] = []
        """By prediction module: the first tokens, at most `num_computed`, that it has run over too."""
        self.drafts: list[int] = []
        """What may come behind the tokens there are; to be verified."""
        self.num_cached: int | None = None
        """Tokens of the prompt that were there when it was first admitted."""
        self._unsent: list[Draw] = []
        self._experts: list[npt.NDArray[np.int16]] = []
        self._num_routed = 0
        self._text = b""

    @property
    def num_left(self) -> int:
        """Tokens to compute before the next one can be drawn."""
        return len(self.ids) - self.num_computed

    @property
    def num_wanted(self) -> int:
        """Tokens to draw, at most."""
        return self.prompt.max_tokens - self.num_sampled

    @property
    def num_sampled(self) -> int:
        return len(self.ids) - self.num_prompt

    def note_computed(self, num_tokens: int, version: PolicyVersion) -> None:
        if not self.computed_by or self.computed_by[-1][1] != version:
            self.computed_by.append((self.num_computed, version))
        self.num_computed += num_tokens

    def note_experts(self, start: int, experts_TLK: npt.NDArray[np.int16]) -> None:
        """Experts of the tokens from `start` on. Those of a token that is computed again stay as they were."""
        missing = start - self._num_routed
        if missing > 0:
            self._experts.append(np.full((missing, *experts_TLK.shape[1:]), -1, np.int16))
            self._num_routed += missing
            missing = 0
        fresh = experts_TLK[-missing:]
        if len(fresh):
            self._experts.append(fresh)
            self._num_routed += len(fresh)

    def append(self, draw: Draw, decode: Decode | None = None) -> None:
        """Take the next token, and see whether it is the last."""
        self.ids.append(draw.token)
        self._unsent.append(draw)
        if draw.token in self.prompt.stop_ids or (decode is not None and self._completes_stop_text(decode)):
            self.finish_reason = FinishReason.STOP
        elif self.num_sampled >= self.prompt.max_tokens:
            self.finish_reason = FinishReason.LENGTH

    def _completes_stop_text(self, decode: Decode) -> bool:
        if not self.prompt.stop_texts:
            return False
        stops = [text.encode() for text in self.prompt.stop_texts]
        self._text += decode(self.ids[-1:])
        found = any(stop in self._text for stop in stops)
        # Only what may be the beginning of a stop text matters to the next token.
        longest = max(len(stop) for stop in stops) - 1
        self._text = self._text[-longest:] if longest else b""
        return found

    def restart(self) -> None:
        """Back to the bare prompt. It must hold no blocks."""
        assert not self.blocks
        del self.ids[self.num_prompt :]
        self._unsent, self._experts, self._num_routed, self._text = [], [], 0, b""

    def chunk(self) -> Chunk:
        """What was not handed out yet, which is handed out hereby."""
        draws, experts = self._unsent, self._experts
        self._unsent, self._experts = [], []
        return Chunk(
            sample=self.sample,
            ids=np.array([draw.token for draw in draws], np.int32),
            logprobs=np.array([draw.logprob for draw in draws], np.float32),
            raw_logprobs=np.array([draw.raw_logprob for draw in draws], np.float32),
            versions=np.array([draw.version for draw in draws], np.int32),
            num_cached=self.num_cached or 0,
            experts=np.concatenate(experts) if experts else None,
            finish_reason=self.finish_reason,
        )
