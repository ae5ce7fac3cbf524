"""The structure of a conversation: a head followed by turns.

    head     everything before the first assistant message: the system message, the task, notes on dropped turns
    turn     one assistant message with all that follows it, mainly the results of its calls

Operations keep whole turns or drop them, so that no result is left without its call.
"""

from collections.abc import Sequence

from m2forge.errors import RecordError
from m2forge.text.message import Message


def split_turns(messages: Sequence[Message]) -> tuple[list[Message], list[list[Message]]]:
    head: list[Message] = []
    turns: list[list[Message]] = []
    for message in messages:
        if message.role == "assistant":
            turns.append([message])
        else:
            (turns[-1] if turns else head).append(message)
    return head, turns


def task_of(messages: Sequence[Message]) -> list[Message]:
    """The messages up to the first user message, which are never dropped."""
    for index, message in enumerate(messages):
        if message.role == "user":
            return list(messages[: index + 1])
    raise RecordError("a conversation without a user's message has no task")


def check_operation(name: str, before: Sequence[Message], after: Sequence[Message]) -> None:
    """Raise if an operation changed the task or separated a call from its result."""
    task = task_of(before)
    if list(after[: len(task)]) != task:
        raise RecordError(f"operation {name}: expected the messages up to the task unchanged")
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
        raise RecordError(f"operation {name}: the last message's calls lost their results")
