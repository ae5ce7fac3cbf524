"""What agents are told: which program to start, or how the loop of our own goes.

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
    """The program and its arguments. It is started in the workspace."""
    env: Mapping[str, str] = {}
    """Variables on top of those that name the gateway and the task. No place for secrets: it is written down."""
    timeout_s: Seconds | None = None
    """Ends it sooner than the sandbox would."""


class SlidingWindowConfig(Config):
    kind: Literal["sliding_window"] = "sliding_window"
    max_turns: Count = 20
    """More turns than this, and the oldest go."""
    keep_turns: Count = 10
    """So many are left: fewer than may be, so that not every turn begins another branch."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.keep_turns > self.max_turns:
            raise ValueError(f"keep_turns is {self.keep_turns}, more than max_turns, {self.max_turns}")
        return self


class SummariseConfig(Config):
    kind: Literal["summarise"] = "summarise"
    threshold: Share = 0.7
    """Of the context; when the conversation is longer, the model is asked to sum it up."""
    keep_turns: Count = 1
    """The last turns stay as they are: there may be results among them that the model has not seen."""
    request: str = (
        "Your context is nearly full. Write down what you need to go on: what was asked, what you found out, what you "
        "did and what is left to do. Call no tool; everything but the task and your notes will be gone."
    )


class DropToolOutputConfig(Config):
    kind: Literal["drop_tool_output"] = "drop_tool_output"
    max_share: Share = 0.3
    """Of the context, for what tools said; when they said more, the oldest of it goes."""
    keep_share: Share = 0.2
    """So much is left: less than may be, so that not every turn begins another branch."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.keep_share > self.max_share:
            raise ValueError(f"keep_share is {self.keep_share}, more than max_share, {self.max_share}")
        return self


OperationConfig = Annotated[SlidingWindowConfig | SummariseConfig | DropToolOutputConfig, Field(discriminator="kind")]


class SubAgentConfig(Config):
    """A tool by which the model gives part of its work to another conversation."""

    system: str = "You do one part of a larger task. Do it, and answer with what you found; nothing else is passed on."
    max_turns: Count = 10
    max_depth: Count = 1
    """Sub-agents of sub-agents: 1 has none."""


class WhiteBoxConfig(Config):
    system: str = "Solve the task. Call tools where they help, several at once where they do not depend on each other."
    max_turns: Count = 50
    """Completions of the main conversation."""
    max_s: Seconds = 600.0
    """For the whole attempt."""
    context_tokens: Count = 32768
    """What the policy can see: operations count shares of it."""
    max_tokens: Count | None = None
    """Of one completion."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """None leaves it to the gateway."""
    tools: tuple[Literal["shell", "files"], ...] = ("shell", "files")
    """Over the sandbox."""
    tool_timeout_s: Seconds = 60.0
    max_parallel_calls: Count = 32
    """Of one turn; the others wait."""
    max_tool_chars: Annotated[int, Field(ge=100)] = 20_000
    """Of one result: the middle of a longer one is left out."""
    operations: tuple[OperationConfig, ...] = ()
    """On the conversation, before each call, in this order, where they are due."""
    offers_operations: bool = False
    """Whether the model may call them itself, as tools."""
    sub_agents: SubAgentConfig | None = None
