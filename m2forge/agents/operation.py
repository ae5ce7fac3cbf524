"""What an operation on a conversation is: a named, deterministic change of its messages, recorded with all it needs.

    is_due        looks at the conversation and says whether the operation should happen
    prepare       gathers its inputs, JSON values; may ask the policy
    apply         the change itself: a pure function of messages and inputs

The log holds name, parameters and inputs, so `apply` alone rebuilds what the policy was shown. Where the model may call
an operation itself, `tool` is how it is offered, and `read_call` makes the inputs of a call's arguments.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from m2forge.agents.client import Reply
from m2forge.records import JsonValue
from m2forge.text.message import Message, Tool

Inputs: TypeAlias = Mapping[str, JsonValue]
AskAside: TypeAlias = Callable[[Sequence[Message]], Awaitable[Reply]]
"""Asks the policy about the conversation followed by these messages; neither they nor the answer are kept in it."""


@dataclass(frozen=True, slots=True)
class View:
    """A conversation as an operation sees it."""

    messages: tuple[Message, ...]
    num_tokens: int
    """An estimate: what the last call's messages came to, in proportion to their characters."""
    max_tokens: int
    """What the policy can see."""
    tokens_per_char: float

    def count(self, text: str) -> float:
        return len(text) * self.tokens_per_char


class Operation(Protocol):
    name: str

    @property
    def parameters(self) -> Mapping[str, JsonValue]: ...

    def is_due(self, view: View) -> bool: ...

    async def prepare(self, view: View, ask: AskAside) -> Inputs: ...

    def apply(self, messages: Sequence[Message], inputs: Inputs) -> tuple[Message, ...]:
        """Keeps the messages up to the first user's, and every result with its call."""
        ...

    @property
    def tool(self) -> Tool: ...

    def read_call(self, view: View, arguments: Mapping[str, JsonValue]) -> Inputs: ...
