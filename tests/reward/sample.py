"""Small episodes, steps and attempts that several tests share."""

import numpy as np

from m2forge.records import Call, Domain, Episode, FinishReason, Task, Verdict
from m2forge.reward.judge import Attempt, Judged
from m2forge.reward.rule import Step
from m2forge.text.message import Message, ToolCall
from m2forge.text.parser import Completion, Problem, ProblemKind

LS = ToolCall("ls", {"path": "."})


def completion(
    content: str = "Done.",
    thinking: str = "I look first.",
    calls: tuple[ToolCall, ...] = (),
    problems: tuple[ProblemKind, ...] = (),
) -> Completion:
    return Completion(thinking, content, calls, tuple(Problem(kind, "detail") for kind in problems), closed=True)


def step(
    *problems: ProblemKind,
    finish_reason: FinishReason = FinishReason.STOP,
    content: str = "Done.",
    thinking: str = "I look first.",
    calls: tuple[ToolCall, ...] = (),
    user: str = "What is in this folder?",
) -> Step:
    return Step(completion(content, thinking, calls, problems), finish_reason, (Message("user", user),))


def call(num_tokens: int = 1, started_s: float = 0.0, finished_s: float = 1.0) -> Call:
    return Call(
        prompt_ids=np.array([1], np.int32),
        response_ids=np.arange(num_tokens, dtype=np.int32),
        logprobs=np.full(num_tokens, -0.5, np.float32),
        versions=np.zeros(num_tokens, np.int32),
        finish_reason=FinishReason.STOP,
        started_s=started_s,
        finished_s=finished_s,
    )


def episode(id: str = "e", calls: tuple[Call, ...] = (), task: str = "t", failure: str | None = None) -> Episode:
    return Episode(id, Task(task, Domain.AGENT, "Do it."), calls, failure=failure)


def attempt(
    id: str = "e",
    *,
    time_s: float = 1.0,
    perf: float = 1.0,
    steps: tuple[Step, ...] | None = None,
    task: str = "t",
    failure: str | None = None,
    reward: float | tuple[float, ...] | None = None,
) -> Attempt:
    """Calls that take `time_s` from the first request to the last answer."""
    steps = (step(),) if steps is None else steps
    calls = tuple(call(3, 0.0, time_s) for _ in steps)
    return Attempt(episode(id, calls, task, failure), steps, Verdict(perf, reward=reward))


def judged(id: str, rewards: tuple[float, ...], tokens: tuple[int, ...] | None = None, task: str = "t") -> Judged:
    counts = (1,) * len(rewards) if tokens is None else tokens
    return Judged(episode(id, tuple(map(call, counts)), task), rewards)
