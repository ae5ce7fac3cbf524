"""How often a model solves tasks, sampled in this process: no gateway, no agents, a few seconds on a GPU."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from m2forge.model.checkpoint import load_model
from m2forge.protocols import Prompt
from m2forge.records import PolicyVersion, Sampling, Submission, Task
from m2forge.rollout.config import RolloutConfig
from m2forge.rollout.core import Core
from m2forge.tasks.catalog import family_of
from m2forge.tasks.family import family_name
from m2forge.text.format import make_format
from m2forge.text.message import Message, Tool
from m2forge.text.parser import Completion
from m2forge.text.tokenizer import load_tokenizer

MAX_TURNS, MAX_TOKENS, CONTEXT = 8, 128, 2048
"""As the agents have them."""


@dataclass
class Attempt:
    task: Task
    messages: list[Message]
    is_over: bool = False
    is_solved: bool = False

    @property
    def tools(self) -> Sequence[Tool]:
        return family_of(self.task).tools(self.task)

    def take(self, completion: Completion) -> None:
        """The policy's turn: calls are made, an answer is judged."""
        message, family = completion.message(), family_of(self.task)
        if not message.tool_calls:
            self.is_over, self.is_solved = True, family.verify(self.task, Submission(message.content)).perf == 1
            return
        self.messages.append(message)
        for call in message.tool_calls:
            arguments = json.loads(json.dumps(dict(call.arguments)))
            result = family.call(self.task, call.name, arguments)
            self.messages.append(Message("tool", result, tool_call_id=call.id))


class Probe:
    def __init__(self, folder: Path) -> None:
        is_cuda = torch.cuda.is_available()
        model = load_model(folder, device="cuda" if is_cuda else "cpu", dtype=torch.bfloat16 if is_cuda else None)
        self._format = make_format("auto", load_tokenizer(folder))
        config = RolloutConfig(num_blocks=4096, step_tokens=8192, max_running=128, max_context=CONTEXT, seed=0)
        self._core = Core(model.eval(), config, PolicyVersion("probe", 0))

    def load(self, folder: Path, version: int) -> None:
        """Take over other weights of the same network."""
        self._core.load(folder, PolicyVersion("probe", version))

    def success(self, tasks: Sequence[Task]) -> dict[str, float]:
        """By family, at temperature 1."""
        return self.share_solved([Attempt(task, [Message("user", task.instruction)]) for task in tasks])

    def share_solved(self, attempts: Sequence[Attempt], max_turns: int = MAX_TURNS) -> dict[str, float]:
        """Run the attempts to their end, or for so many turns of the policy; by family."""
        for _ in range(max_turns):
            under_way = [attempt for attempt in attempts if not attempt.is_over]
            for attempt, completion in zip(under_way, self.complete(under_way), strict=True):
                attempt.take(completion)
        solved: dict[str, list[bool]] = {}
        for attempt in attempts:
            solved.setdefault(family_name(attempt.task), []).append(attempt.is_solved)
        return {name: sum(found) / len(found) for name, found in solved.items()}

    def complete(self, attempts: Sequence[Attempt]) -> list[Completion]:
        """The policy's next turn in each attempt."""
        completions = []
        for attempt, ids in zip(attempts, self._sample(attempts), strict=True):
            parser, tokenizer = self._format.parser(attempt.tools), self._format.tokenizer
            # Networks know a few more ids than their tokenizers; these have no text.
            parser.feed(tokenizer.decode_bytes([id for id in ids if id < tokenizer.vocab_size]))
            completions.append(parser.finish())
        return completions

    def _sample(self, attempts: Sequence[Attempt]) -> list[list[int]]:
        sampled: list[list[int]] = [[] for _ in attempts]
        for place, attempt in enumerate(attempts):
            ids = self._format.render(attempt.messages, attempt.tools, generation=True).ids
            if len(ids) + MAX_TOKENS > CONTEXT:
                continue
            prompt = Prompt(np.array(ids, np.int32), MAX_TOKENS, Sampling(), stop_ids=self._format.stop_ids)
            self._core.add(str(place), prompt)
        while not self._core.is_idle:
            for id, chunk in self._core.step():
                sampled[int(id)] += chunk.ids.tolist()
        return sampled
