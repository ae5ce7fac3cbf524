"""The admin's routes, which create, inspect, reward and close episodes. JSON bodies in, bodies out.

    POST /episodes               {"task_id", "group", "budget", "sampling", "context", "task", "id"} -> id, key
    GET  /episodes/ID            budget spent, divergences and roles of its calls, rewards
    GET  /episodes/ID/tree       the token tree, as `tree/codec.py` encodes it
    POST /episodes/ID/reward     {"value", "call", "choice", "id", "evidence"}; idempotent: a duplicate counts once
    POST /episodes/ID/close      {"failure", "with_calls"}: refuse further calls; `with_calls` adds `describe_calls`
    POST /episodes/ID/take       {"failure"}: close and return the token tree, in one request
    DELETE /episodes/ID          delete episode and journal, once the tree is saved elsewhere; its key is refused
    DELETE /episodes             {"ids"}: delete many; unknown ids are skipped

Every field but `value` is optional. `budget` is {"max_calls", "max_tokens", "max_s"}. `sampling` ({"temperature",
"top_p", …}) overrides the sampling parameters of the episode's requests, seeds included; without it each request uses
its own. The episode's tools work on `task` (a complete `Task`, metadata included); its client never sees it.
`context` limits prompt plus completion: a longer prompt gets the vendor's error for a full context.

A reward is for the episode or for one call. `call` is that call's index or its response id; for a response with
several choices (`n`), `choice` is the index of the rewarded one. `id` identifies the reward; by default the episode
and each call have one reward each.

`describe_calls` shows a verifier the recorded calls of an episode, which conversation each belongs to, and its text:

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

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import chain
from typing import cast

from m2forge.config import ConfigT, build
from m2forge.errors import NotFoundError
from m2forge.gateway.config import Budget, SamplingConfig
from m2forge.gateway.dialects.types import BadRequestError, Fields, read_object, refuse_value
from m2forge.gateway.episodes.episode import Episode, RecordedCall
from m2forge.gateway.episodes.journal import Rewarded
from m2forge.gateway.episodes.registry import Episodes
from m2forge.gateway.history.history import Divergence
from m2forge.gateway.history.turn import Turn
from m2forge.gateway.metrics import GatewayCounts
from m2forge.records import MAX_INT32, CallRole, JsonValue, Task
from m2forge.text.message import Message, Tool, message_to_openai
from m2forge.tree.codec import encode_tree
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


PATH = "/episodes"
_EPISODE_FIELDS = frozenset({"task_id", "group", "budget", "sampling", "context", "task", "id"})
_REWARD_FIELDS = frozenset({"value", "call", "choice", "id", "evidence"})
_CLOSE_FIELDS = frozenset({"failure", "with_calls"})
_TAKE_FIELDS = frozenset({"failure"})
_DELETE_FIELDS = frozenset({"ids"})


class Admin:
    def __init__(self, episodes: Episodes, counts: GatewayCounts, max_reward: float) -> None:
        self._episodes, self._counts, self._max_reward = episodes, counts, max_reward

    def create(self, body: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
        fields = Fields(body, _EPISODE_FIELDS)
        texts = {name: fields.text(name) or "" for name in ("task_id", "group", "id")}
        sampling = _read(SamplingConfig, fields, "sampling")
        episode, key = self._episodes.create(
            texts["task_id"],
            group=texts["group"],
            id=texts["id"],
            budget=_read(Budget, fields, "budget"),
            sampling=None if sampling is None else sampling.record(),
            task=Task.read(read_object(fields.value("task"), "task")) if fields.has("task") else None,
            context=fields.integer("context", 1, MAX_INT32),
        )
        return {"id": episode.id, "key": key}

    def show(self, id: str) -> dict[str, JsonValue]:
        episode = self._find(id)
        return describe(episode) | {"roles": [str(role) for role in call_roles(episode)]}

    def reward(self, id: str, body: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
        episode, fields = self._find(id), Fields(body, _REWARD_FIELDS)
        value = fields.number("value", -self._max_reward, self._max_reward)
        if value is None:
            refuse_value("value", "a number", None)
        call = _call(episode, fields)
        evidence = read_object(fields.value("evidence") or {}, "evidence")
        name = fields.text("id") or ("episode" if call is None else f"call-{call}")
        is_accepted = episode.reward(Rewarded(name, value, call, evidence))
        self._counts.num_rewards += is_accepted
        return {"id": name, "is_taken": is_accepted}

    def close(self, id: str, body: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
        episode, fields = self._find(id), Fields(body, _CLOSE_FIELDS)
        episode.close(fields.text("failure"))
        return describe(episode) | (describe_calls(episode) if fields.boolean("with_calls") else {})

    def take(self, id: str, body: Mapping[str, JsonValue]) -> bytes:
        episode = self._find(id)
        episode.close(Fields(body, _TAKE_FIELDS).text("failure"))
        return encode_tree(episode.tree)

    def tree(self, id: str) -> bytes:
        return encode_tree(self._find(id).tree)

    def delete(self, id: str) -> dict[str, JsonValue]:
        self._find(id)
        self._episodes.delete(id)
        return {"id": id}

    def delete_all(self, body: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
        ids = Fields(body, _DELETE_FIELDS).value("ids")
        if not isinstance(ids, list) or not all(isinstance(id, str) for id in ids):
            refuse_value("ids", "a list of texts", ids)
        known = [id for id in dict.fromkeys(cast("list[str]", ids)) if self._episodes.knows(id)]
        for id in known:
            self._episodes.delete(id)
        return {"num_deleted": len(known)}

    def _find(self, id: str) -> Episode:
        episode = self._episodes.get(id)
        if episode is None:
            raise NotFoundError("there is no such episode; create one with POST /episodes")
        return episode


def describe(episode: Episode) -> dict[str, JsonValue]:
    return {
        "id": episode.id,
        "task_id": episode.task_id,
        "task": None if episode.task is None else asdict(episode.task),
        "group": episode.group,
        "created_s": episode.created_s,
        "budget": episode.budget.model_dump(),
        "sampling": None if episode.sampling is None else asdict(episode.sampling),
        "context": episode.context,
        "num_calls": episode.num_calls,
        "num_sampled": episode.num_sampled,
        "num_running": episode.num_running,
        "num_failed": episode.num_failed,
        "divergences": {reason.value: number for reason, number in episode.num_divergences.items() if number},
        "rewards": [asdict(reward) for reward in episode.rewards.values()],
        "closed": None if episode.closed is None else asdict(episode.closed),
    }


def _read(kind: type[ConfigT], fields: Fields, name: str) -> ConfigT | None:
    """Read the object in field `name`; None if the field is absent."""
    if not fields.has(name):
        return None
    nested = Fields(fields.value(name), frozenset(kind.model_fields), name)
    data = {key: value for key in nested.data if (value := nested.value(key)) is not None}
    return build(kind, cast("dict[str, float]", data), origin=name)


def _call(episode: Episode, fields: Fields) -> int | None:
    """Return the index of the rewarded call; None for the whole episode."""
    call_name = fields.value("call")
    if not isinstance(call_name, str):
        if fields.has("choice"):
            fields.refuse("choice", "is one of an answer's; give the id of that as call")
        return fields.integer("call", 0, MAX_INT32)
    request = episode.requests.named(call_name)
    if request is None:
        raise BadRequestError("call: no answer of this episode has that id", "call")
    choice = fields.integer("choice", 0, request.num_samples - 1)
    if choice is None and request.num_samples > 1:
        refuse_value("choice", f"0 to {request.num_samples - 1}, since the answer has several", None)
    return request.first_call + (choice or 0)
