"""Results of tools, put in the order of the calls that they answer.

Clients that run tools at once send results as they come, each with its call's id. Chat formats show a model no ids but
the order, so the order must be the calls'.
"""

from collections.abc import Sequence

from m2forge.gateway.exchange import AskError
from m2forge.text.message import Message


def order_results(messages: Sequence[Message], place: str = "messages") -> tuple[Message, ...]:
    """The same messages, the results after each assistant's turn in the order of its calls.

    Refused is a result that answers no call of that turn, or one that was answered before.
    """
    ordered = list(messages)
    start = 0
    while start < len(ordered):
        if ordered[start].role != "tool":
            start += 1
            continue
        end = start
        while end < len(ordered) and ordered[end].role == "tool":
            end += 1
        calls = ordered[start - 1].tool_calls if start else ()
        rank_of_id = {call.id: rank for rank, call in enumerate(calls)}
        answered: set[str] = set()
        for index in range(start, end):
            id = ordered[index].tool_call_id
            if id not in rank_of_id or id in answered:
                wrong = "was answered before" if id in answered else "the assistant did not make just before"
                path = f"{place}[{index}]"
                raise AskError(f"{path}: a tool's result answers call {id!r}, which {wrong}", path)
            answered.add(id)
        ordered[start:end] = sorted(ordered[start:end], key=lambda result: rank_of_id[result.tool_call_id])
        start = end
    return tuple(ordered)
