"""A log and the gateway's recorded calls in, the exact state of each call out, verified token for token.

Replaying the log appends messages and applies operations again, which gives the messages of each call. They are
tokenized again and must equal the recorded call's prompt; the recorded answer must parse to the message that the agent
received. So training uses exactly what the agent's rules make of the conversation, and a non-deterministic operation,
or a gateway that recorded something else, is detected.

`Prompts` tokenizes a conversation in a simple way: the policy's answers as sampled, the rest rendered by the chat
template. A gateway does the same by other means and for any client; this file serves to verify it.

    ids = prompts.open(messages, tools, recorded)
    prompts.record(messages, tools, ids, answer, response_ids)

The ids are those of the longest recorded conversation (prompt and answer of one call) that is a prefix of the messages,
followed by the rest as the chat format appends it; other answers of the policy in the rest have their sampled tokens.
If the format cannot append (its template would render earlier messages differently), the rest is rendered after the
nearest recorded answer from which it can, or from the beginning.

Answers with the same text may have different tokens: text split otherwise, a malformed call that left nothing. A
message does not say which, so the answer that `recorded` has at that position is chosen; nothing else is taken from
`recorded`.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from m2forge.agents.call_log import Appended, Applied, Called, LogEntry, Opened
from m2forge.agents.operation import Operation, find_operation
from m2forge.errors import FormatError, RecordError
from m2forge.records import Call
from m2forge.text.format import ChatFormat
from m2forge.text.message import Message, Tool, message_to_openai, tool_to_openai


@dataclass(slots=True)
class _Node:
    """A conversation prefix that ends with one message."""

    paths: list[list[int]] = field(default_factory=list)
    """If the message is an answer of the policy: all tokens up to its end, for each recorded answer with this text."""
    children: dict[str, "_Node"] = field(default_factory=dict)


class Prompts:
    def __init__(self, format: ChatFormat) -> None:
        self._format = format
        self._beginnings: dict[str, _Node] = {}
        """Roots of the recorded conversations, by their tools."""
        self._answers: dict[str, list[list[int]]] = {}
        """Tokens of each answer by its message, with a stop token added where it was cut off."""

    def open(self, messages: Sequence[Message], tools: Sequence[Tool], recorded: Sequence[int]) -> list[int]:
        known = list(self._known(messages, tools, recorded))
        depth, ids = known[-1]
        try:
            return self._spliced(messages, depth, ids, tools, recorded)
        except FormatError:
            for depth, ids in reversed(known):
                try:
                    added = self._format.extend(messages[:depth], messages[depth:], tools, generation=True)
                except FormatError:
                    if not depth:
                        raise
                else:
                    return ids + added.ids
            raise

    def record(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        prompt_ids: Sequence[int],
        answer: Message,
        response_ids: Sequence[int],
    ) -> None:
        ended = list(response_ids)
        if not ended or ended[-1] not in self._format.closing_ids:
            ended.append(self._format.closing_ids[0])
        node = self._beginnings.setdefault(_tools_key(tools), _Node())
        for message in (*messages, answer):
            node = node.children.setdefault(_key(message), _Node())
        node.paths.append([*prompt_ids, *ended])
        self._answers.setdefault(_key(answer), []).append(ended)

    def _known(
        self, messages: Sequence[Message], tools: Sequence[Tool], recorded: Sequence[int]
    ) -> Iterator[tuple[int, list[int]]]:
        """Yield each number of leading messages whose tokens are recorded, with these tokens."""
        yield 0, []
        node = self._beginnings.get(_tools_key(tools))
        for index, message in enumerate(messages):
            node = None if node is None else node.children.get(_key(message))
            if node is None:
                return
            if node.paths:
                yield index + 1, _choose(node.paths, recorded)

    def _spliced(
        self, messages: Sequence[Message], start: int, ids: list[int], tools: Sequence[Tool], recorded: Sequence[int]
    ) -> list[int]:
        """`ids` of the first `start` messages plus those of the rest: sampled by the policy, otherwise rendered."""
        ids = list(ids)
        for index in range(start, len(messages)):
            answers = self._answers.get(_key(messages[index])) if messages[index].role == "assistant" else None
            if answers is not None:
                ids += self._format.extend(messages[:start], messages[start:index], tools, generation=True).ids
                ids += _choose(answers, recorded[len(ids) :])
                start = index + 1
        return ids + self._format.extend(messages[:start], messages[start:], tools, generation=True).ids


def _choose(readings: Sequence[list[int]], recorded: Sequence[int]) -> list[int]:
    """The reading that is a prefix of `recorded`; otherwise the last one, and the caller detects the difference."""
    return next((ids for ids in reversed(readings) if list(recorded[: len(ids)]) == ids), readings[-1])


def _key(message: Message) -> str:
    """The part of a message that the model sees, which excludes call ids."""
    calls = tuple(replace(call, id="") for call in message.tool_calls)
    return json.dumps(message_to_openai(replace(message, tool_calls=calls, tool_call_id="")), sort_keys=True)


def _tools_key(tools: Sequence[Tool]) -> str:
    return json.dumps([tool_to_openai(tool) for tool in tools], sort_keys=True)


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
                f"log entry {number}: context {name!r} is {'already open' if name in messages else 'not open'}"
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
                if entry.is_appended:
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
        where = f"call {number} ({state.id}, context {state.context})"
        if state.id not in calls:
            raise RecordError(f"{where}: it is in the log, but the gateway did not record it")
        call = calls[state.id]
        recorded = call.prompt_ids.tolist()
        rebuilt = prompts.open(state.messages, state.tools, recorded)
        if rebuilt != recorded:
            raise RecordError(f"{where}: {_difference(rebuilt, recorded, format)}")
        _require_same_answer(where, state, call, format)
        prompts.record(state.messages, state.tools, recorded, state.answer, call.response_ids.tolist())
        states.append(state)
    return states


def _difference(rebuilt: Sequence[int], recorded: Sequence[int], format: ChatFormat) -> str:
    same = next((at for at, (one, other) in enumerate(zip(rebuilt, recorded, strict=False)) if one != other), None)
    where = min(len(rebuilt), len(recorded)) if same is None else same
    shown = [repr(format.tokenizer.decode(ids[max(where - 8, 0) : where + 8])) for ids in (rebuilt, recorded)]
    return (
        f"the rebuilt prompt of {len(rebuilt)} tokens differs from the recorded one of {len(recorded)} at position "
        f"{where}: rebuilt …{shown[0]}…, recorded …{shown[1]}…"
    )


def _require_same_answer(where: str, state: CallState, call: Call, format: ChatFormat) -> None:
    parser = format.parser(state.tools)
    parser.feed(format.tokenizer.decode_bytes(call.response_ids.tolist()))
    parsed = _without_ids(parser.finish().message())
    if parsed != _without_ids(state.answer):
        raise RecordError(f"{where}: the recorded answer parses to {parsed}, but the agent received {state.answer}")


def _without_ids(message: Message) -> Message:
    """Remove call ids, which the gateway assigns, not the model."""
    return replace(message, tool_calls=tuple(replace(call, id="") for call in message.tool_calls))
