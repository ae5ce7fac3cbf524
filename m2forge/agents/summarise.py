"""Summarise: the model's own notes replace all turns but the last ones.

The policy writes notes about the whole conversation. The new conversation is the task, the notes as a user message, and
the last turns. Earlier notes are dropped, because the later ones were written with them in context.
"""

from collections.abc import Mapping, Sequence

from m2forge.agents.config import SummariseConfig
from m2forge.agents.operation import AskAside, Inputs, View
from m2forge.agents.turns import split_turns, task_of
from m2forge.records import JsonValue
from m2forge.text.message import Message, Tool

NOTES_HEAD = "Your notes on what happened so far:\n\n"
NO_NOTES = "(none)"
TOOL = Tool(
    "summarise_context",
    "Replace all but the task and the end of this conversation by your own notes.",
    {
        "type": "object",
        "properties": {"summary": {"type": "string", "description": "Notes that hold all you need to go on."}},
        "required": ["summary"],
    },
)


class Summarise:
    """Idempotent for the same inputs."""

    name = "summarise"
    tool = TOOL

    def __init__(self, config: SummariseConfig) -> None:
        self._config = config
        self.parameters: Mapping[str, JsonValue] = config.model_dump(mode="json")

    def is_due(self, view: View) -> bool:
        has_more = len(split_turns(view.messages)[1]) > self._config.keep_turns
        return has_more and view.num_tokens > self._config.threshold * view.max_tokens

    async def prepare(self, view: View, ask: AskAside) -> Inputs:
        reply = await ask([Message("user", self._config.request)])
        return {"summary": reply.message.content.strip() or NO_NOTES}

    def apply(self, messages: Sequence[Message], inputs: Inputs) -> tuple[Message, ...]:
        _, turns = split_turns(messages)
        kept = turns[-self._config.keep_turns :]
        notes = Message("user", f"{NOTES_HEAD}{inputs['summary']}")
        return (*task_of(messages), notes, *(message for turn in kept for message in turn))

    def read_call(self, view: View, arguments: Mapping[str, JsonValue]) -> Inputs:
        return {"summary": str(arguments["summary"]).strip() or NO_NOTES}
