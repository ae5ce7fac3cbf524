"""The protocol of operations on a conversation: named, deterministic changes of its messages, logged with their inputs.

    is_due        whether the operation should be applied to the conversation
    prepare       gathers its inputs, JSON values; may request a completion
    apply         the change itself: a pure function of messages and inputs

The log holds name, parameters and inputs, so `apply` alone rebuilds the prompts. If the model may call an operation
itself, `tool` describes it, and `read_call` converts a call's arguments to inputs.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from m2forge.agents.client import Reply
from m2forge.records import JsonValue
from m2forge.text.message import Message, Tool

Inputs: TypeAlias = Mapping[str, JsonValue]
AskAside: TypeAlias = Callable[[Sequence[Message]], Awaitable[Reply]]
"""Requests a completion of the conversation plus these messages; the conversation keeps neither them nor the answer."""


@dataclass(frozen=True, slots=True)
class View:
    """The view of a conversation that an operation receives."""

    messages: tuple[Message, ...]
    num_tokens: int
    """Estimate from the number of characters and the last call's tokens per character."""
    max_tokens: int
    """Context length of the policy."""
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
        """Must keep the messages up to the first user message, and every result with its call."""
        ...

    @property
    def tool(self) -> Tool: ...

    def read_call(self, view: View, arguments: Mapping[str, JsonValue]) -> Inputs: ...
