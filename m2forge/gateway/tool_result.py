"""Sorts tool results into the order of their calls.

Clients that run tools concurrently send results as they finish, each with its call's id. Chat formats show the model no
ids, only the order, so it must match the calls. Every call needs a result, as the vendors require too: if one were
missing, the model would take the next for it.
"""

from collections.abc import Sequence
from typing import NoReturn

from m2forge.gateway.exchange import AskError
from m2forge.gateway.reading import shown
from m2forge.text.message import Message, ToolCall


def order_results(messages: Sequence[Message], place: str = "messages") -> tuple[Message, ...]:
    """Return the messages, with the results after each assistant turn in the order of its calls.

    Refuses a result for a call that is not in that turn or already has one, and a call without a result.
    """
    ordered = list(messages)
    index, end = 0, len(ordered)
    while index < end:
        message = ordered[index]
        index += 1
        if message.tool_calls:
            start = index
            while index < end and ordered[index].role == "tool":
                index += 1
            _order(message.tool_calls, ordered, start, index, place)
        elif message.role == "tool":
            _refuse(message.tool_call_id, "the assistant did not make just before", f"{place}[{index - 1}]")
    return tuple(ordered)


def _order(calls: Sequence[ToolCall], messages: list[Message], start: int, end: int, place: str) -> None:
    """Sort the results of these calls, `messages[start:end]`."""
    if len(calls) == 1 and end == start + 1 and messages[start].tool_call_id == calls[0].id:
        return
    rank_of_id = {call.id: rank for rank, call in enumerate(calls)}
    if len(rank_of_id) < len(calls):
        raise AskError(f"{place}: calls of one turn have the same id; give each its own", place)
    answered: set[str] = set()
    for index in range(start, end):
        id = messages[index].tool_call_id
        if id not in rank_of_id or id in answered:
            wrong = "was answered before" if id in answered else "the assistant did not make just before"
            _refuse(id, wrong, f"{place}[{index}]")
        answered.add(id)
    missing = [call.id for call in calls if call.id not in answered]
    if missing:
        raise AskError(f"{place}: call {shown(missing[0])} has no result; send one for each call, just after", place)
    messages[start:end] = sorted(messages[start:end], key=lambda result: rank_of_id[result.tool_call_id])


def _refuse(id: str, wrong: str, path: str) -> NoReturn:
    raise AskError(f"{path}: a tool's result answers call {shown(id)}, which {wrong}", path)
