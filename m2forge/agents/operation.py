"""Operations on a conversation: named, deterministic changes of its messages, logged with their inputs.

    is_due        whether the operation should be applied to the conversation
    prepare       gathers its inputs, JSON values; may request a completion
    apply         the change itself: a pure function of messages and inputs

The log holds name, parameters and inputs, so `apply` alone rebuilds the prompts. If the model may call an operation
itself, `tool` describes it, and `read_call` converts a call's arguments to inputs.

A conversation is a head followed by turns; operations keep or drop complete turns, so that no result is left without
its call:

    head     everything before the first assistant message: the system message, the task, notes on dropped turns
    turn     one assistant message with all that follows it, mainly the results of its calls

Built-in operations:

    DropToolOutput   when tool output exceeds a share of the context, a one-line placeholder replaces the oldest
                     results, except those of the last turn, because the model has not seen them yet
    SlidingWindow    drops the oldest turns, keeps the head and the last turns
    Summarise        the policy writes notes about the conversation; the new conversation is the task, the notes as a
                     user message, and the last turns. Earlier notes are dropped, because the later ones were written
                     with them in context
"""

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

from m2forge.agents.client import Reply
from m2forge.agents.config import DropToolOutputConfig, OperationConfig, SlidingWindowConfig, SummariseConfig
from m2forge.config import Config, build
from m2forge.errors import NotFoundError, RecordError, suggest
from m2forge.records import JsonValue
from m2forge.text.message import Message, Tool

Inputs: TypeAlias = Mapping[str, JsonValue]
CompleteAside: TypeAlias = Callable[[Sequence[Message]], Awaitable[Reply]]
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

    async def prepare(self, view: View, complete: CompleteAside) -> Inputs: ...

    def apply(self, messages: Sequence[Message], inputs: Inputs) -> tuple[Message, ...]:
        """Must keep the messages up to the first user message, and every result with its call."""
        ...

    @property
    def tool(self) -> Tool: ...

    def read_call(self, view: View, arguments: Mapping[str, JsonValue]) -> Inputs: ...


def split_turns(messages: Sequence[Message]) -> tuple[list[Message], list[list[Message]]]:
    head: list[Message] = []
    turns: list[list[Message]] = []
    for message in messages:
        if message.role == "assistant":
            turns.append([message])
        else:
            (turns[-1] if turns else head).append(message)
    return head, turns


def task_messages(messages: Sequence[Message]) -> list[Message]:
    """The messages up to the first user message, which are never dropped."""
    for index, message in enumerate(messages):
        if message.role == "user":
            return list(messages[: index + 1])
    raise RecordError("a conversation: expected a user message, which is the task, received none")


def require_valid(name: str, before: Sequence[Message], after: Sequence[Message]) -> None:
    """Raise if an operation changed the task or separated a call from its result."""
    task = task_messages(before)
    if list(after[: len(task)]) != task:
        raise RecordError(f"operation {name}: expected the messages up to the task unchanged, received others")
    waiting: list[str] = []
    for index, message in enumerate(after):
        if message.role == "tool":
            if not waiting or message.tool_call_id != waiting.pop(0):
                raise RecordError(f"operation {name}: message {index} is the result of a call that is not before it")
        else:
            if waiting:
                raise RecordError(f"operation {name}: message {index} follows a call without its result")
            waiting = [call.id for call in message.tool_calls]
    if waiting:
        raise RecordError(f"operation {name}: the results of the last message's calls are missing")


_DROPPED = re.compile(r"\[\d+ characters of output dropped\]")
_SHORT = 60
"""Results of at most this many characters stay, because the placeholder would be no shorter."""
DROP_TOOL_OUTPUT = Tool(
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
    tool = DROP_TOOL_OUTPUT

    def __init__(self, config: DropToolOutputConfig) -> None:
        self._config = config
        self.parameters: Mapping[str, JsonValue] = config.model_dump(mode="json")

    def is_due(self, view: View) -> bool:
        num_tokens = sum(view.count(message.content) for message in view.messages if message.role == "tool")
        return num_tokens > self._config.max_share * view.max_tokens and bool(self._beyond(view))

    async def prepare(self, view: View, complete: CompleteAside) -> Inputs:
        return {"indexes": self._beyond(view)}

    def apply(self, messages: Sequence[Message], inputs: Inputs) -> tuple[Message, ...]:
        indexes = inputs["indexes"]
        dropped = set(indexes) if isinstance(indexes, Sequence) else set()
        return tuple(
            replace(message, content=f"[{len(message.content)} characters of output dropped]")
            if index in dropped and _is_droppable(message)
            else message
            for index, message in enumerate(messages)
        )

    def read_call(self, view: View, arguments: Mapping[str, JsonValue]) -> Inputs:
        old = [index for index in range(_last_turn(view.messages)) if view.messages[index].role == "tool"]
        keep = arguments["keep_results"]
        num_kept = max(int(keep), 0) if isinstance(keep, int | float) else 0
        dropped = old[: max(len(old) - num_kept, 0)]
        return {"indexes": [index for index in dropped if _is_droppable(view.messages[index])]}

    def _beyond(self, view: View) -> list[int]:
        """Indices of the results beyond the newest that fit into `keep_share`, except those of the last turn."""
        room = self._config.keep_share * view.max_tokens
        beyond: list[int] = []
        last_turn = _last_turn(view.messages)
        for index in reversed(range(len(view.messages))):
            message = view.messages[index]
            if message.role == "tool":
                room -= view.count(message.content)
                if room < 0 and index < last_turn and _is_droppable(message):
                    beyond.append(index)
        return beyond[::-1]


def _last_turn(messages: Sequence[Message]) -> int:
    """Index of the message that starts the last turn."""
    return max((index for index, message in enumerate(messages) if message.role == "assistant"), default=0)


def _is_droppable(message: Message) -> bool:
    return message.role == "tool" and len(message.content) > _SHORT and not _DROPPED.fullmatch(message.content)


SLIDING_WINDOW = Tool(
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
    tool = SLIDING_WINDOW

    def __init__(self, config: SlidingWindowConfig) -> None:
        self._config = config
        self.parameters: Mapping[str, JsonValue] = config.model_dump(mode="json")

    def is_due(self, view: View) -> bool:
        return len(split_turns(view.messages)[1]) > self._config.max_turns

    async def prepare(self, view: View, complete: CompleteAside) -> Inputs:
        return {"keep_turns": self._config.keep_turns}

    def apply(self, messages: Sequence[Message], inputs: Inputs) -> tuple[Message, ...]:
        head, turns = split_turns(messages)
        turns_kept = turns[-_positive(inputs["keep_turns"]) :]
        return (*head, *(message for turn in turns_kept for message in turn))

    def read_call(self, view: View, arguments: Mapping[str, JsonValue]) -> Inputs:
        return {"keep_turns": _positive(arguments["keep_turns"])}


def _positive(value: JsonValue) -> int:
    return max(int(value), 1) if isinstance(value, int | float) else 1


NOTES_HEAD = "Your notes on what happened so far:\n\n"
NO_NOTES = "(none)"
SUMMARISE = Tool(
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
    tool = SUMMARISE

    def __init__(self, config: SummariseConfig) -> None:
        self._config = config
        self.parameters: Mapping[str, JsonValue] = config.model_dump(mode="json")

    def is_due(self, view: View) -> bool:
        has_more = len(split_turns(view.messages)[1]) > self._config.keep_turns
        return has_more and view.num_tokens > self._config.threshold * view.max_tokens

    async def prepare(self, view: View, complete: CompleteAside) -> Inputs:
        reply = await complete([Message("user", self._config.request)])
        return {"summary": reply.message.content.strip() or NO_NOTES}

    def apply(self, messages: Sequence[Message], inputs: Inputs) -> tuple[Message, ...]:
        _, turns = split_turns(messages)
        turns_kept = turns[-self._config.keep_turns :]
        notes = Message("user", f"{NOTES_HEAD}{inputs['summary']}")
        return (*task_messages(messages), notes, *(message for turn in turns_kept for message in turn))

    def read_call(self, view: View, arguments: Mapping[str, JsonValue]) -> Inputs:
        return {"summary": str(arguments["summary"]).strip() or NO_NOTES}


_CONFIGS: Mapping[str, type[SlidingWindowConfig | SummariseConfig | DropToolOutputConfig]] = {
    SlidingWindow.name: SlidingWindowConfig,
    Summarise.name: SummariseConfig,
    DropToolOutput.name: DropToolOutputConfig,
}


def make_operation(config: OperationConfig) -> Operation:
    match config:
        case SlidingWindowConfig():
            return SlidingWindow(config)
        case SummariseConfig():
            return Summarise(config)
        case DropToolOutputConfig():
            return DropToolOutput(config)


def find_operation(name: str, parameters: Mapping[str, JsonValue], custom: Sequence[Operation] = ()) -> Operation:
    """The operation of `custom` with this name and these parameters, otherwise a built-in one."""
    for operation in custom:
        if operation.name == name and operation.parameters == parameters:
            return operation
    if name not in _CONFIGS:
        known = {*_CONFIGS, *(operation.name for operation in custom)}
        raise NotFoundError(f"operation {name!r} with {dict(parameters)} is unknown; {suggest(name, known)}")
    kind: type[Config] = _CONFIGS[name]
    return make_operation(build(kind, parameters, origin=f"operation {name}"))  # type: ignore[arg-type]  # one of those
