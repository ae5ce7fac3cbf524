"""Sliding window: drops the oldest turns, keeps the head and the last turns."""

from collections.abc import Mapping, Sequence

from m2forge.agents.config import SlidingWindowConfig
from m2forge.agents.operation import AskAside, Inputs, View
from m2forge.agents.turns import split_turns
from m2forge.records import JsonValue
from m2forge.text.message import Message, Tool

TOOL = Tool(
    "forget_old_turns",
    "Drop the oldest turns of this conversation; the task and the last turns stay.",
    {
        "type": "object",
        "properties": {"keep_turns": {"type": "integer", "description": "How many turns stay, at least 1."}},
        "required": ["keep_turns"],
    },
)


class SlidingWindow:
    """Idempotent for the same inputs."""

    name = "sliding_window"
    tool = TOOL

    def __init__(self, config: SlidingWindowConfig) -> None:
        self._config = config
        self.parameters: Mapping[str, JsonValue] = config.model_dump(mode="json")

    def is_due(self, view: View) -> bool:
        return len(split_turns(view.messages)[1]) > self._config.max_turns

    async def prepare(self, view: View, ask: AskAside) -> Inputs:
        return {"keep_turns": self._config.keep_turns}

    def apply(self, messages: Sequence[Message], inputs: Inputs) -> tuple[Message, ...]:
        head, turns = split_turns(messages)
        kept = turns[-_positive(inputs["keep_turns"]) :]
        return (*head, *(message for turn in kept for message in turn))

    def read_call(self, view: View, arguments: Mapping[str, JsonValue]) -> Inputs:
        return {"keep_turns": _positive(arguments["keep_turns"])}


def _positive(value: JsonValue) -> int:
    return max(int(value), 1) if isinstance(value, int | float) else 1
