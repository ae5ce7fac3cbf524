"""A core without a network, for tests of what stands around one: a step is one token of every completion."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from m2forge.errors import NotFoundError, RequestError
from m2forge.protocols import Chunk, Prompt
from m2forge.records import FinishReason, PolicyVersion
from m2forge.testing.scripted import ScriptedPolicy, make_chunk, uniform_draw


@dataclass
class Asked:
    prompt: Prompt
    deadline_s: float
    drawn: dict[int, list[int]] = field(default_factory=dict)
    is_aborted: bool = False


class FakeCore:
    """See `m2forge.rollout.engine.Steps`. `on_step` runs before each step: to wait, to fail."""

    def __init__(
        self, vocab_size: int, context: int, step_s: float = 0.0, on_step: Callable[[], None] | None = None
    ) -> None:
        self.policy, self.context = ScriptedPolicy(vocab_size), context
        self.version, self.num_waiting, self.num_steps = PolicyVersion("fake", 0), 0, 0
        self._step_s, self._on_step = step_s, on_step
        self._asked: dict[str, Asked] = {}

    @property
    def is_idle(self) -> bool:
        return not self._asked

    @property
    def num_running(self) -> int:
        return sum(len(asked.drawn) for asked in self._asked.values())

    def add(self, id: str, prompt: Prompt) -> None:
        if prompt.ids.size + prompt.max_tokens > self.context or prompt.ids.max() >= self.policy.vocab_size:
            raise RequestError("this prompt can never be served")
        deadline_s = time.monotonic() + (3600 if prompt.timeout_s is None else prompt.timeout_s)
        self._asked[id] = Asked(prompt, deadline_s, {sample: [] for sample in range(prompt.num_samples)})

    def abort(self, id: str) -> None:
        if id in self._asked:
            self._asked[id].is_aborted = True

    def step(self) -> list[tuple[str, Chunk]]:
        self.num_steps += 1
        time.sleep(self._step_s)
        if self._on_step is not None:
            self._on_step()
        chunks = [(id, self._next(asked, sample)) for id, asked in self._asked.items() for sample in list(asked.drawn)]
        self._asked = {id: asked for id, asked in self._asked.items() if asked.drawn}
        return chunks

    def stage(self, folder: Path, version: PolicyVersion) -> Callable[[], None]:
        if not folder.is_dir():
            raise NotFoundError(f"{folder} is not a folder")
        return partial(self.load, folder, version)

    def load(self, folder: Path, version: PolicyVersion) -> None:
        self.version = version

    def metrics(self) -> dict[str, float]:
        return {"total_steps": self.num_steps}

    def _next(self, asked: Asked, sample: int) -> Chunk:
        if asked.is_aborted or time.monotonic() >= asked.deadline_s:
            del asked.drawn[sample]
            return make_chunk(sample, [], self.version, FinishReason.ABORT)
        prompt, before = asked.prompt, asked.drawn[sample]
        uniform = uniform_draw(prompt.seed or 0, sample, len(before))
        drawn = self.policy.draw(prompt.ids.tolist(), before, self.version, prompt.sampling, uniform)
        before.append(drawn.id)
        reason = None
        if drawn.id in prompt.stop_ids:
            reason = FinishReason.STOP
        elif len(before) == prompt.max_tokens:
            reason = FinishReason.LENGTH
        if reason is not None:
            del asked.drawn[sample]
        return make_chunk(sample, [drawn], self.version, reason)
