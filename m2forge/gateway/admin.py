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
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import cast

from m2forge.config import ConfigT, build
from m2forge.errors import NotFoundError
from m2forge.gateway.config import Budget, SamplingConfig
from m2forge.gateway.dialects.types import AskError, Fields, read_object, refuse_value
from m2forge.gateway.episodes.call_list import call_roles, describe_calls
from m2forge.gateway.episodes.episode import Episode
from m2forge.gateway.episodes.journal import Rewarded
from m2forge.gateway.episodes.registry import Episodes
from m2forge.gateway.metrics import GatewayCounts
from m2forge.records import MAX_INT32, JsonValue, Task
from m2forge.tree.codec import encode_tree

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
        raise AskError("call: no answer of this episode has that id", "call")
    choice = fields.integer("choice", 0, request.num_samples - 1)
    if choice is None and request.num_samples > 1:
        refuse_value("choice", f"0 to {request.num_samples - 1}, since the answer has several", None)
    return request.first_call + (choice or 0)
