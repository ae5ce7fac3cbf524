"""One conversation to train on: messages, available tools, and which messages carry loss.

Readers (row_file.py, atif.py) create trajectories; encode.py tokenizes them. Invariants: it holds an assistant message,
tool results follow the calls they answer, in call order, and `trained` says for each message whether it carries loss.
Messages of other roles never carry loss, whatever `trained` says.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from m2forge.errors import FormatError
from m2forge.text.message import Message, Tool


@dataclass(frozen=True, slots=True)
class Trajectory:
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    trained: tuple[bool, ...]
    """One flag per message: whether it carries loss."""
    source: str
    """Where it was read from, such as "file:line"."""

    def __post_init__(self) -> None:
        if len(self.trained) != len(self.messages):
            raise FormatError(
                f"{self.source}: trained has {len(self.trained)} values, expected one per message, {len(self.messages)}"
            )


def sort_results(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Sort the results of each turn into the order of its calls; tools may finish in any order."""
    ordered: list[Message] = []
    ids: list[str] = []
    results: list[Message] = []

    def settle() -> None:
        if all(result.tool_call_id in ids for result in results):
            results.sort(key=lambda result: ids.index(result.tool_call_id))
        ordered.extend(results)
        results.clear()

    for message in messages:
        if message.role == "tool":
            results.append(message)
            continue
        settle()
        ordered.append(message)
        ids = [call.id for call in message.tool_calls]
    settle()
    return tuple(ordered)


def check_order(messages: Sequence[Message]) -> None:
    """Raise if there is no assistant message, or a tool result has no matching call."""
    if not any(message.role == "assistant" for message in messages):
        raise FormatError(f"none of the {len(messages)} messages is the assistant's")
    open_ids: list[str] = []
    for index, message in enumerate(messages):
        if message.role == "assistant":
            open_ids = [call.id for call in message.tool_calls]
        elif message.role != "tool":
            open_ids = []
        elif not open_ids:
            raise FormatError(
                f"messages[{index}] is a tool result, but no call of the last assistant message lacks one"
            )
        elif message.tool_call_id in open_ids:
            open_ids.remove(message.tool_call_id)
        elif message.tool_call_id and all(open_ids):
            raise FormatError(
                f"messages[{index}] answers call {message.tool_call_id!r}; the calls without a result are "
                f"{', '.join(open_ids)}"
            )
        else:
            open_ids.pop(0)
