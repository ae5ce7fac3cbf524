"""Drop tool output: when it exceeds a share of the context, a one-line placeholder replaces the oldest results.

Results of the last turn are never dropped, because the model has not seen them yet.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from m2forge.agents.config import DropToolOutputConfig
from m2forge.agents.operation import AskAside, Inputs, View
from m2forge.records import JsonValue
from m2forge.text.message import Message, Tool

_DROPPED = re.compile(r"\[\d+ characters of output dropped\]")
_SHORT = 60
"""Results of at most this many characters are kept, because the placeholder would be no shorter."""
TOOL = Tool(
    "drop_tool_output",
    "Drop the output of earlier turns' tool calls from this conversation; the calls themselves stay.",
    {
        "type": "object",
        "properties": {"keep_results": {"type": "integer", "description": "How many of those results stay whole."}},
        "required": ["keep_results"],
    },
)


class DropToolOutput:
    """Idempotent for the same inputs."""

    name = "drop_tool_output"
    tool = TOOL

    def __init__(self, config: DropToolOutputConfig) -> None:
        self._config = config
        self.parameters: Mapping[str, JsonValue] = config.model_dump(mode="json")

    def is_due(self, view: View) -> bool:
        said = sum(view.count(message.content) for message in view.messages if message.role == "tool")
        return said > self._config.max_share * view.max_tokens and bool(self._beyond(view))

    async def prepare(self, view: View, ask: AskAside) -> Inputs:
        return {"indexes": self._beyond(view)}

    def apply(self, messages: Sequence[Message], inputs: Inputs) -> tuple[Message, ...]:
        indexes = inputs["indexes"]
        dropped = set(indexes) if isinstance(indexes, Sequence) else set()
        return tuple(
            replace(message, content=f"[{len(message.content)} characters of output dropped]")
            if index in dropped and _can_go(message)
            else message
            for index, message in enumerate(messages)
        )

    def read_call(self, view: View, arguments: Mapping[str, JsonValue]) -> Inputs:
        old = [index for index in range(_last_turn(view.messages)) if view.messages[index].role == "tool"]
        keep = arguments["keep_results"]
        num_kept = max(int(keep), 0) if isinstance(keep, int | float) else 0
        dropped = old[: max(len(old) - num_kept, 0)]
        return {"indexes": [index for index in dropped if _can_go(view.messages[index])]}

    def _beyond(self, view: View) -> list[int]:
        """Indices of the results beyond the newest that fit into `keep_share`, except those of the last turn."""
        room = self._config.keep_share * view.max_tokens
        beyond: list[int] = []
        last_turn = _last_turn(view.messages)
        for index in reversed(range(len(view.messages))):
            message = view.messages[index]
            if message.role == "tool":
                room -= view.count(message.content)
                if room < 0 and index < last_turn and _can_go(message):
                    beyond.append(index)
        return beyond[::-1]


def _last_turn(messages: Sequence[Message]) -> int:
    """Index of the message that starts the last turn."""
    return max((index for index, message in enumerate(messages) if message.role == "assistant"), default=0)


def _can_go(message: Message) -> bool:
    return message.role == "tool" and len(message.content) > _SHORT and not _DROPPED.fullmatch(message.content)
