"""The recorded calls of an episode for a verifier and for training: which conversation each belongs to, and its text.

    messages    the main conversation after its last call, in OpenAI's message form
    calls       per recorded call: id, conversation, role, names of its tools, message, times, token counts

A call continues the conversation of the answer that precedes it. Without one it belongs to the conversation with the
same tools and the same messages up to the first of the user; where the client rewrote the beginning (`Divergence`), to
the latest one with the same tools; otherwise it begins a conversation. The main conversation is the first that has
tools, or the first if none has. A call's role:

    main        it belongs to the main conversation, or its prompt is raw text
    side        it has neither tools nor an earlier answer, no call continues it, and another conversation has tools:
                a title, a commit message, a probe
    sub_agent   it belongs to another conversation

A compacted journal holds no texts of prompts, but the turns and which of them prompts share, which determine the roles.
"""

from collections.abc import Iterator
from itertools import chain

from m2forge.errors import NotFoundError
from m2forge.gateway.episodes.episode import Episode, RecordedCall
from m2forge.gateway.history.history import Divergence
from m2forge.gateway.history.turn import Turn
from m2forge.records import CallRole, JsonValue
from m2forge.text.message import Message, Tool, message_to_openai
from m2forge.tree.token_tree import Sample


def call_roles(episode: Episode) -> list[CallRole]:
    tools = _tools(episode)
    conversations = _conversations(episode.recorded, tools)
    return list(_roles(episode.recorded, conversations, _main(conversations, tools), tools))


def describe_calls(episode: Episode) -> dict[str, JsonValue]:
    """Raises NotFoundError for an episode that was read from a compacted journal."""
    if episode.is_compacted:
        raise NotFoundError(
            f"the messages of episode {episode.id} were dropped when its journal was compacted; fetch them as the "
            "episode is closed, or attempt the task again"
        )
    tools = _tools(episode)
    conversations = _conversations(episode.recorded, tools)
    main = _main(conversations, tools)
    last = max((index for index, number in enumerate(conversations) if number == main), default=None)
    answer = None if last is None else episode.recorded[last].answer
    roles = _roles(episode.recorded, conversations, main, tools)
    samples = episode.tree.samples
    described: list[JsonValue] = [
        _describe(episode, samples[index], index, number, role, tools[index])
        for index, (number, role) in enumerate(zip(conversations, roles, strict=True))
    ]
    return {
        "messages": [] if answer is None else [message_to_openai(message) for message in _messages(answer)],
        "calls": described,
    }


def _tools(episode: Episode) -> list[tuple[Tool, ...]]:
    """The tools of each recorded call."""
    return [() if call.answer is None else episode.history.tools_of(call.answer) for call in episode.recorded]


def _describe(
    episode: Episode, sample: Sample, index: int, conversation: int, role: CallRole, tools: tuple[Tool, ...]
) -> dict[str, JsonValue]:
    return {
        "id": episode.recorded[index].id,
        "conversation": conversation,
        "role": role,
        "tools": [tool.name for tool in tools],
        "message": message_to_openai(episode.completions[index].message()),
        "finish_reason": sample.finish_reason,
        "started_s": sample.started_s,
        "finished_s": sample.finished_s,
        "num_prompt": sample.num_prompt,
        "num_sampled": sample.num_response,
    }


def _conversations(calls: list[RecordedCall], tools: list[tuple[Tool, ...]]) -> list[int]:
    """The number of each call's conversation; -1 for a raw prompt."""
    by_answer: dict[Turn, int] = {}
    by_opening: dict[Turn, int] = {}
    latest: dict[tuple[str, ...], int] = {}
    """The conversation of the latest call, by the names of its tools."""
    numbers: list[int] = []
    num_begun = 0
    for call, offered in zip(calls, tools, strict=True):
        if call.answer is None:
            numbers.append(-1)
            continue
        earlier, names = _earlier_answer(call.answer), tuple(tool.name for tool in offered)
        opening, number = _opening(call.answer), None
        if earlier is not None:
            number = by_answer.get(earlier)
        if number is None:
            number = by_opening.get(opening)
        if number is None and call.divergence not in (None, Divergence.NEW_CONVERSATION):
            number = latest.get(names)
        if number is None:
            number, num_begun = num_begun, num_begun + 1
        by_opening.setdefault(opening, number)
        by_answer[call.answer] = latest[names] = number
        numbers.append(number)
    return numbers


def _main(conversations: list[int], tools: list[tuple[Tool, ...]]) -> int:
    with_tools = (number for number, offered in zip(conversations, tools, strict=True) if offered)
    return next(with_tools, next((number for number in conversations if number >= 0), -1))


def _roles(
    calls: list[RecordedCall], conversations: list[int], main: int, tools: list[tuple[Tool, ...]]
) -> Iterator[CallRole]:
    earlier = [None if call.answer is None else _earlier_answer(call.answer) for call in calls]
    continued = {turn for turn in earlier if turn is not None}
    has_tools = any(tools)
    for index, call in enumerate(calls):
        if call.answer is None or conversations[index] == main:
            yield CallRole.MAIN
        elif has_tools and not tools[index] and call.answer not in continued and not _has_answer(call.answer):
            yield CallRole.SIDE
        else:
            yield CallRole.SUB_AGENT


def _earlier_answer(answer: Turn) -> Turn | None:
    return next((turn for turn in answer.above() if turn.response_ids is not None), None)


def _has_answer(answer: Turn) -> bool:
    """Whether the prompt holds a message of the model, sampled here or sent by the client."""
    return any(turn.role == "assistant" for turn in answer.above())


def _opening(answer: Turn) -> Turn:
    """The first message of the user in the prompt; the prompt's last message if there is none."""
    path = [turn for turn in answer.above() if turn.parent is not None]
    return next((turn for turn in reversed(path) if turn.role == "user"), path[0] if path else answer)


def _messages(answer: Turn) -> Iterator[Message]:
    turns = [turn for turn in chain((answer,), answer.above()) if turn.parent is not None]
    return (turn.message for turn in reversed(turns))
