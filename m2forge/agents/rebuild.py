"""A log and the gateway's recorded calls in, the exact state of each call out, checked token for token.

Replaying the log appends messages and applies operations again, which gives the messages of each call. They are
tokenized again (see `prompt`) and must equal the recorded call's prompt; the recorded answer must parse to the message
that the agent received. So training uses exactly what the agent's rules make of the conversation, and a
non-deterministic operation, or a gateway that recorded something else, is detected.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from m2forge.agents.log import Appended, Applied, Called, LogEntry, Opened
from m2forge.agents.operation import Operation
from m2forge.agents.prompt import Prompts
from m2forge.agents.registry import find_operation
from m2forge.errors import RecordError
from m2forge.records import Call
from m2forge.text.format import ChatFormat
from m2forge.text.message import Message, Tool


@dataclass(frozen=True, slots=True)
class CallState:
    """The prompt of one call to the policy, and its answer."""

    context: str
    id: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    answer: Message


def replay(entries: Iterable[LogEntry], operations: Sequence[Operation] = ()) -> Iterator[CallState]:
    """Yield the calls of a log in order. `operations`: the caller's own, which the log may name."""
    messages: dict[str, tuple[Message, ...]] = {}
    tools: dict[str, tuple[Tool, ...]] = {}
    for number, entry in enumerate(entries, 1):
        name = entry.context
        if isinstance(entry, Opened) == (name in messages):
            raise RecordError(
                f"log entry {number}: context {name!r} is {'open already' if name in messages else 'not open'}"
            )
        match entry:
            case Opened():
                messages[name], tools[name] = (), entry.tools
            case Appended():
                messages[name] += entry.messages
            case Applied():
                operation = find_operation(entry.operation, entry.parameters, operations)
                messages[name] = operation.apply(messages[name], entry.inputs)
            case Called():
                yield CallState(name, entry.id, (*messages[name], *entry.suffix), tools[name], entry.answer)
                if entry.is_kept:
                    messages[name] += (entry.answer,)


def rebuild(
    entries: Iterable[LogEntry],
    format: ChatFormat,
    calls: Mapping[str, Call],
    operations: Sequence[Operation] = (),
) -> list[CallState]:
    """The states of all calls in the log. `calls`: the recorded calls by completion id.

    Raises RecordError that names the call and the position of the first token that differs.
    """
    prompts = Prompts(format)
    states = []
    for number, state in enumerate(replay(entries, operations)):
        place = f"call {number} ({state.id}, context {state.context})"
        if state.id not in calls:
            raise RecordError(f"{place}: is in the log, but was not recorded")
        call = calls[state.id]
        recorded = call.prompt_ids.tolist()
        rebuilt = prompts.open(state.messages, state.tools, recorded)
        if rebuilt != recorded:
            raise RecordError(f"{place}: {_difference(rebuilt, recorded, format)}")
        _check_answer(place, state, call, format)
        prompts.record(state.messages, state.tools, recorded, state.answer, call.response_ids.tolist())
        states.append(state)
    return states


def _difference(rebuilt: Sequence[int], recorded: Sequence[int], format: ChatFormat) -> str:
    same = next((at for at, (one, other) in enumerate(zip(rebuilt, recorded, strict=False)) if one != other), None)
    place = min(len(rebuilt), len(recorded)) if same is None else same
    shown = [repr(format.tokenizer.decode(ids[max(place - 8, 0) : place + 8])) for ids in (rebuilt, recorded)]
    return (
        f"the rebuilt prompt of {len(rebuilt)} tokens differs from the recorded one of {len(recorded)} at position "
        f"{place}: rebuilt …{shown[0]}…, recorded …{shown[1]}…"
    )


def _check_answer(place: str, state: CallState, call: Call, format: ChatFormat) -> None:
    parser = format.parser(state.tools)
    parser.feed(format.tokenizer.decode_bytes(call.response_ids.tolist()))
    said = _without_ids(parser.finish().message())
    if said != _without_ids(state.answer):
        raise RecordError(f"{place}: the recorded answer reads {said}, the agent took it for {state.answer}")


def _without_ids(message: Message) -> Message:
    """Remove call ids, which the gateway assigns, not the model."""
    return replace(message, tool_calls=tuple(replace(call, id="") for call in message.tool_calls))
