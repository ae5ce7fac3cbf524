"""Configuration of agents: the program to start, or the settings of our own loop.

[agent]
command = ["python", "agent.py"]
timeout_s = 300
"""

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from m2forge.config import Config

Count = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(gt=0, le=1)]


class BlackBoxConfig(Config):
    command: Annotated[tuple[str, ...], Field(min_length=1)]
    """The program and its arguments, started in the workspace."""
    env: Mapping[str, str] = {}
    """Environment variables besides those for the gateway and the task; not for secrets, because configs are stored."""
    timeout_s: Seconds | None = None
    """Timeout of the program, if shorter than the sandbox's."""


class SlidingWindowConfig(Config):
    kind: Literal["sliding_window"] = "sliding_window"
    max_turns: Count = 20
    """Maximum turns; when there are more, the oldest are dropped."""
    keep_turns: Count = 10
    """Turns that remain after a drop; fewer than `max_turns`, so that not every turn starts a new branch."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.keep_turns > self.max_turns:
            raise ValueError(f"keep_turns is {self.keep_turns}, more than max_turns, {self.max_turns}")
        return self


class SummariseConfig(Config):
    kind: Literal["summarise"] = "summarise"
    threshold: Share = 0.7
    """Share of the context above which the model is asked to summarise the conversation."""
    keep_turns: Count = 1
    """Last turns to keep unchanged, because they may hold results that the model has not seen."""
    request: str = (
        "Your context is nearly full. Write down what you need to go on: what was asked, what you found out, what you "
        "did and what is left to do. Call no tool; everything but the task and your notes will be gone."
    )


class DropToolOutputConfig(Config):
    kind: Literal["drop_tool_output"] = "drop_tool_output"
    max_share: Share = 0.3
    """Share of the context that tool output may take; above it, the oldest output is dropped."""
    keep_share: Share = 0.2
    """Share that remains after a drop; less than `max_share`, so that not every turn starts a new branch."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.keep_share > self.max_share:
            raise ValueError(f"keep_share is {self.keep_share}, more than max_share, {self.max_share}")
        return self


OperationConfig = Annotated[SlidingWindowConfig | SummariseConfig | DropToolOutputConfig, Field(discriminator="kind")]


class SubAgentConfig(Config):
    """A tool with which the model delegates part of its work to another conversation."""

    system: str = "You do one part of a larger task. Do it, and answer with what you found; nothing else is passed on."
    max_turns: Count = 10
    max_depth: Count = 1
    """Maximum nesting depth of sub-agents; at 1, sub-agents cannot start others."""


class WhiteBoxConfig(Config):
    system: str = "Solve the task. Call tools where they help, several at once where they do not depend on each other."
    max_turns: Count = 50
    """Maximum completions of the main conversation."""
    max_s: Seconds = 600.0
    """Timeout of the attempt, sub-agents included."""
    context_tokens: Count = 32768
    """Context length of the policy, to which the shares of operations refer."""
    max_tokens: Count | None = None
    """Maximum tokens of one completion."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """Sampling temperature; None leaves it to the gateway."""
    tools: tuple[Literal["shell", "files"], ...] = ("shell", "files")
    """Tools that act on the sandbox."""
    tool_timeout_s: Seconds = 60.0
    max_parallel_calls: Count = 32
    """Maximum concurrent tool calls of one turn; the others wait."""
    max_tool_chars: Annotated[int, Field(ge=100)] = 20_000
    """Maximum characters of one tool result; the middle of a longer one is cut."""
    operations: tuple[OperationConfig, ...] = ()
    """Operations on the conversation, applied in this order before each call if they are due."""
    offers_operations: bool = False
    """Whether the model may call operations itself, as tools."""
    sub_agents: SubAgentConfig | None = None
