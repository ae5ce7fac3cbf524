"""What the pool returns: leases on queued episodes, and units with their calls, outcomes and rewards."""

import json
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from sqlalchemy import Connection, Row, select

from m2forge.errors import RecordError
from m2forge.pool.lifecycle import Origin
from m2forge.pool.tables import call_table, episode_table, unit_table
from m2forge.records import (
    Call,
    CallRole,
    Domain,
    Episode,
    FinishReason,
    FloatArray,
    IntArray,
    RequestedSampling,
    Reward,
    Sampling,
    Task,
)
from m2forge.tree.token_tree import UNKNOWN_EXPERT, ExpertArray, TokenTree, checked_experts

TOOLS = "tools"
"""Artifact that holds the tools of an attempt, as JSON in OpenAI's form; absent if it had none."""
ROLES = "roles"
"""Artifact under which the pool stores the roles of an attempt's calls (`CallRole`), as a JSON list; absent if all are
main."""
MAX_BRANCHES = 16
"""Number of branches that writer and reader track; part of the format, so that the reader still has the parent."""
_FINISH_REASONS = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT)
"""Stored as indices into this tuple, so this order is part of the format."""
_NO_PARENT = -1
_HEAD = struct.Struct("<i6I2H2B2d")
_SAMPLING = struct.Struct("<2di4d")
"""The fields of `Sampling` in declaration order."""
_sampling_fields = attrgetter(*(item.name for item in fields(Sampling)))
_SEED = struct.Struct("<?q")
"""Whether a seed is set, and its value."""
_NOTICES = struct.Struct("<I")
"""Number of bytes of the notices' JSON, which follows."""
_HAS_REQUESTED, _HAS_NOTICES = 1, 2
"""Flags of a call's head: which optional parts follow it."""
_CHECKSUM = struct.Struct("<I")


@dataclass(frozen=True, slots=True, eq=False)
class StoredCall:
    ordinal: int
    """Index among the calls of its attempt."""
    data: bytes
    num_tokens: int
    """Number of tokens not shared with the parent call."""
    oldest_step: int | None
    """Step of the policy that sampled its oldest token; None for an empty completion."""


@dataclass(slots=True, eq=False)
class _Branch:
    ordinal: int
    path: IntArray
    experts: ExpertArray | None


class _Branches:
    """The most recently used branch ends of an attempt's calls; a call that continues a branch replaces its end."""

    def __init__(self) -> None:
        self._by_ordinal: dict[int, _Branch] = {}

    def nearest(self, path: IntArray) -> tuple[_Branch | None, int]:
        """The branch with the longest shared prefix, the latest on a tie, and the prefix length."""
        best, most = None, 0
        for branch in reversed(self._by_ordinal.values()):
            num_shared = _num_shared(path, branch.path)
            if num_shared > most:
                best, most = branch, num_shared
        return best, most

    def find(self, ordinal: int) -> _Branch:
        branch = self._by_ordinal.get(ordinal)
        if branch is None:
            raise RecordError(f"a stored call continues call {ordinal}, which is not the end of a branch")
        return branch

    def follow(self, parent: _Branch | None, num_shared: int, branch: _Branch) -> None:
        if parent is not None:
            del self._by_ordinal[parent.ordinal]
            if num_shared < parent.path.size:
                self._by_ordinal[parent.ordinal] = parent
        self._by_ordinal[branch.ordinal] = branch
        if len(self._by_ordinal) > MAX_BRANCHES:
            del self._by_ordinal[next(iter(self._by_ordinal))]


class CallWriter:
    """Delta encoding of completion calls: the pool stores what each call adds to the calls before it; trees come out.

        head      parent, tokens shared with it, sizes, finish reason, times, sampling
        asked     sampling parameters and seed of the request, if the gateway overrode them
        notices   JSON: what the gateway did not honour of the request, if anything
        tokens    prompt and completion ids from the first unshared token on, each as wide as the vocabulary needs
        logprobs  float32, one per sampled token
        versions  run-length encoded: policy step, number of tokens
        experts   int16, from the first token on whose routing differs from the parent's; −1 if unknown
        crc32     checksum of everything before it

    The parent is the call with the longest common prefix among the ends of the latest branches; writer and reader track
    the same branches, so that neither keeps every path of a long episode. A restarted writer has no branches and
    repeats a prompt once. Reading the calls back in order rebuilds the recorder's tree.

    Encodes the calls of one attempt in order.
    """

    def __init__(self, vocab_size: int, num_calls: int = 0) -> None:
        """`num_calls`: number of calls that another writer has already stored."""
        self._id_width, self._vocab_size = _id_width(vocab_size), vocab_size
        self._num_calls = num_calls
        self._branches = _Branches()

    def write(self, call: Call, experts: npt.NDArray[np.integer] | None = None) -> StoredCall:
        """`experts`: routing of the first tokens of prompt and completion, as for `TokenTree.add`."""
        path: IntArray = np.concatenate((call.prompt_ids, call.response_ids))
        if int(path.max()) >= self._vocab_size:
            raise RecordError(f"a call: expected ids below {self._vocab_size}, received {int(path.max())}")
        routed = None if experts is None else _checked_experts(experts, path.size)
        parent, num_shared = self._branches.nearest(path)
        num_known = 0
        if routed is not None and parent is not None and parent.experts is not None:
            if parent.experts.shape[1:] != routed.shape[1:]:
                raise RecordError(f"a call: experts: expected {parent.experts.shape[1:]} per token as before")
            routed, num_known = _continued(parent.experts[:num_shared], routed)
        runs = _runs(call.versions)
        tokens = path[num_shared:]
        added: ExpertArray = np.empty((0, 0, 0), np.int16) if routed is None else routed[num_known:]
        shape = (0, 0) if routed is None else (routed.shape[1], routed.shape[2])
        head = _HEAD.pack(
            _NO_PARENT if parent is None else parent.ordinal,
            num_shared,
            call.prompt_ids.size,
            call.response_ids.size,
            runs.shape[0],
            num_known,
            added.shape[0],
            *shape,
            _FINISH_REASONS.index(call.finish_reason),
            (_HAS_REQUESTED if call.requested is not None else 0) | (_HAS_NOTICES if call.notices else 0),
            call.started_s,
            call.finished_s,
        )
        narrow = np.ascontiguousarray(tokens, "<i4").view("u1").reshape(-1, 4)[:, : self._id_width]
        arrays = (narrow, call.logprobs.astype("<f4", copy=False), runs, added.astype("<i2", copy=False))
        ways = [_sampling_bytes(call.sampling)] + ([] if call.requested is None else [_requested_bytes(call.requested)])
        ways += [_notices_bytes(call.notices)] if call.notices else []
        body = b"".join([head, *ways, *(array.tobytes() for array in arrays)])
        ordinal = self._num_calls
        self._num_calls += 1
        self._branches.follow(parent, num_shared, _Branch(ordinal, path, routed))
        return StoredCall(
            ordinal=ordinal,
            data=body + _CHECKSUM.pack(zlib.crc32(body)),
            num_tokens=tokens.size,
            oldest_step=int(runs[:, 0].min()) if runs.size else None,
        )

    def write_tree(self, tree: TokenTree) -> list[StoredCall]:
        """Encode all calls of a tree; `read_tree` rebuilds it."""
        return [self.write(call, tree.routing(index)) for index, call in enumerate(tree.calls())]


def read_tree(calls: Iterable[bytes], vocab_size: int, name: str) -> TokenTree:
    """Rebuild the tree of an attempt's calls; its samples are named `name/0`, `name/1`, … in the episode `name`."""
    tree = TokenTree(vocab_size)
    branches = _Branches()
    for ordinal, data in enumerate(calls):
        try:
            call, experts = _read(ordinal, data, branches, _id_width(vocab_size))
        except (RecordError, struct.error, ValueError, IndexError) as error:
            raise RecordError(f"call {ordinal} of {name} cannot be read back: {error}") from error
        tree.add(call, f"{name}/{ordinal}", episode=name, experts=experts)
    return tree


def _read(ordinal: int, data: bytes, branches: _Branches, id_width: int) -> tuple[Call, ExpertArray | None]:
    body = memoryview(data)[: -_CHECKSUM.size]
    if (
        len(data) < _HEAD.size + _SAMPLING.size + _CHECKSUM.size
        or zlib.crc32(body) != _CHECKSUM.unpack(data[-_CHECKSUM.size :])[0]
    ):
        raise RecordError("wrong checksum: the data is damaged or truncated")
    head = _HEAD.unpack_from(body)
    parent_ordinal, num_shared, num_prompt, num_response, num_runs, num_known, num_added = head[:7]
    num_layers, num_chosen, finish_reason, flags, started_s, finished_s = head[7:]
    start = _HEAD.size + _SAMPLING.size
    sampling, requested = _read_sampling(data[_HEAD.size : start]), None
    if flags & _HAS_REQUESTED:
        requested, start = _read_requested(data, start)
    notices: tuple[str, ...] = ()
    if flags & _HAS_NOTICES:
        notices, start = _read_notices(data, start)
    parent = None if parent_ordinal == _NO_PARENT else branches.find(parent_ordinal)
    arrays = _Arrays(body[start:])
    tokens = arrays.ids(num_prompt + num_response - num_shared, id_width)
    path = tokens if parent is None else np.concatenate((parent.path[:num_shared], tokens))
    path.flags.writeable = False
    logprobs = arrays.floats(num_response)
    runs = arrays.take(2 * num_runs, "<i4").astype(np.int32).reshape(-1, 2)
    versions: IntArray = np.repeat(runs[:, 0], runs[:, 1])
    versions.flags.writeable = False
    experts = None
    if num_layers:
        added = arrays.take(num_added * num_layers * num_chosen, "<i2").astype(np.int16)
        experts = added.reshape(num_added, num_layers, num_chosen)
        if parent is not None and parent.experts is not None and num_known:
            experts = np.concatenate((parent.experts[:num_known], experts))
    arrays.finish()
    branches.follow(parent, num_shared, _Branch(ordinal, path, experts))
    call = Call(
        prompt_ids=path[:num_prompt],
        response_ids=path[num_prompt:],
        logprobs=logprobs,
        versions=versions,
        finish_reason=_FINISH_REASONS[finish_reason],
        started_s=started_s,
        finished_s=finished_s,
        sampling=sampling,
        requested=requested,
        notices=notices,
    )
    return call, experts


class _Arrays:
    """Reads consecutive arrays from a body."""

    def __init__(self, body: memoryview) -> None:
        self._body, self._at = body, 0

    def take(self, size: int, dtype: str) -> npt.NDArray[np.generic]:
        array = np.frombuffer(self._body, dtype, size, self._at)
        self._at += array.nbytes
        return array

    def ids(self, size: int, id_width: int) -> IntArray:
        wide = np.zeros((size, 4), np.uint8)
        wide[:, :id_width] = self.take(size * id_width, "u1").reshape(size, id_width)
        return wide.view("<i4").reshape(size).astype(np.int32, copy=False)

    def floats(self, size: int) -> FloatArray:
        array = self.take(size, "<f4").astype(np.float32)
        array.flags.writeable = False
        return array

    def finish(self) -> None:
        if self._at != len(self._body):
            raise RecordError(f"{len(self._body) - self._at} bytes are left over")


def _id_width(vocab_size: int) -> int:
    return max(1, (max(vocab_size - 1, 1).bit_length() + 7) // 8)


def _num_shared(path: IntArray, other: IntArray) -> int:
    length = min(path.size, other.size)
    differs = path[:length] != other[:length]
    first = int(differs.argmax())
    return first if differs[first] else length


@lru_cache(64)
def _sampling_bytes(sampling: Sampling) -> bytes:
    return _SAMPLING.pack(*_sampling_fields(sampling))


@lru_cache(64)
def _read_sampling(data: bytes) -> Sampling:
    return Sampling(*_SAMPLING.unpack(data))


def _requested_bytes(requested: RequestedSampling) -> bytes:
    return _sampling_bytes(requested.sampling) + _SEED.pack(requested.seed is not None, requested.seed or 0)


def _read_requested(data: bytes, start: int) -> tuple[RequestedSampling, int]:
    """Parse the request's sampling from `start` on; returns it and its end."""
    sampling = _read_sampling(data[start : start + _SAMPLING.size])
    has_seed, seed = _SEED.unpack_from(data, start + _SAMPLING.size)
    return RequestedSampling(sampling, seed if has_seed else None), start + _SAMPLING.size + _SEED.size


def _notices_bytes(notices: tuple[str, ...]) -> bytes:
    text = json.dumps(notices, separators=(",", ":")).encode()
    return _NOTICES.pack(len(text)) + text


def _read_notices(data: bytes, start: int) -> tuple[tuple[str, ...], int]:
    """Parse the notices from `start` on; returns them and their end."""
    (size,) = _NOTICES.unpack_from(data, start)
    end = start + _NOTICES.size + size
    return tuple(json.loads(data[start + _NOTICES.size : end])), end


def _runs(versions: IntArray) -> npt.NDArray[np.int32]:
    """Run-length encode versions as (run, 2): version and length."""
    if not versions.size:
        return np.empty((0, 2), np.int32)
    changes = np.flatnonzero(versions[1:] != versions[:-1])
    if not changes.size:
        return np.array([[versions[0], versions.size]], "<i4")
    starts = np.concatenate(([0], changes + 1))
    lengths = np.diff(np.concatenate((starts, [versions.size])))
    return np.stack((versions[starts], lengths), 1).astype("<i4")


def _continued(parent: ExpertArray, routed: ExpertArray) -> tuple[ExpertArray, int]:
    """A call's routing with the parent's where known, because a tree keeps the first recorded routing; and how many of
    its first tokens share the parent's."""
    length = min(parent.shape[0], routed.shape[0])
    is_known = parent[:length, :1, :1] != UNKNOWN_EXPERT
    routed = np.concatenate((np.where(is_known, parent[:length], routed[:length]), routed[length:]))
    differs = (routed[:length] != parent[:length]).any((1, 2))
    return routed, int(differs.argmax()) if differs.any() else length


def _checked_experts(experts: npt.NDArray[np.integer], num_tokens: int) -> ExpertArray:
    if experts.ndim != 3 or experts.shape[0] > num_tokens or 0 in experts.shape[1:]:
        raise RecordError(f"a call: experts: expected (tokens, layers, chosen), received {experts.shape}")
    try:
        return checked_experts(experts)
    except RecordError as error:
        raise RecordError(f"a call: experts: {error}") from error


class Queued(NamedTuple):
    """A group to queue."""

    task: Task
    num_episodes: int
    context: int | None = None
    """Maximum tokens of prompt plus completion; None: the model's limit."""


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to record one attempt of an episode."""

    episode: int
    unit: int
    attempt: int
    name: str
    """Name of the attempt, unique to it, so that each attempt is a separate gateway episode with its own API key."""
    group: str
    task: Task
    worker: str
    num_calls: int = 0
    """Number of recorded calls when the lease was read."""
    context: int | None = None
    """Maximum tokens of prompt plus completion; None: the model's limit."""

    def writer(self, vocab_size: int) -> CallWriter:
        return CallWriter(vocab_size, self.num_calls)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an attempt ended."""

    failure: str | None = None
    """Why the attempt failed, for example a timeout; such an attempt counts, with its reward, like the others."""
    artifacts: Mapping[str, str] = field(default_factory=dict)
    """Artifacts of the attempt by name, such as the answer."""
    reward: Reward | None = None
    """Reward of the attempt; None if it is given later."""
    step_rewards: tuple[float, ...] | None = None
    """Step rewards, one per call."""

    def __post_init__(self) -> None:
        if self.reward is None and self.step_rewards is not None:
            raise RecordError("Outcome: step_rewards: expected none without a reward")

    @property
    def stored_failure(self) -> str | None:
        return None if self.failure is None else storable(self.failure)


@dataclass(frozen=True, slots=True)
class StoredEpisode:
    name: str
    """Name of the attempt that counts."""
    state: str
    task: Task
    calls: tuple[bytes, ...]
    vocab_size: int
    reward: Reward | None
    step_rewards: tuple[float, ...] | None
    failure: str | None
    artifacts: Mapping[str, str]
    num_attempts: int

    def tree(self) -> TokenTree:
        """Rebuild the recorder's tree."""
        return read_tree(self.calls, self.vocab_size, self.name)

    def episode(self, tree: TokenTree | None = None) -> Episode:
        """The episode's record. `tree`: its tree, if already built."""
        tree = tree or self.tree()
        return Episode(self.name, self.task, tuple(tree.calls()), self.reward, self.failure)


@dataclass(frozen=True, slots=True)
class StoredUnit:
    position: int | None
    group: str
    task: Task
    episodes: tuple[StoredEpisode, ...]
    lag: int | None = None
    """Number of units taken between its submission and its own claim."""
    oldest_step: int | None = None


def attempt_name(name: str, attempt: int, origin: str) -> str:
    """Name of an attempt; a deployed agent's episode has one attempt, which keeps the episode's name."""
    return name if origin == Origin.DEPLOYED else f"{name}-{attempt}"


def make_label(stage: str | None, domain: str) -> str:
    """The label that quotas count: a domain of a stage, or a domain alone."""
    return domain if stage is None else f"{stage}/{domain}"


def split_label(label: str) -> tuple[str | None, str]:
    stage, slash, domain = label.rpartition("/")
    return (stage if slash else None), domain


def task_text(task: Task) -> str:
    return json.dumps(asdict(task), allow_nan=False, separators=(",", ":"))


def read_task(text: str) -> Task:
    fields = json.loads(text)
    return Task(**fields | {"domain": Domain(fields["domain"])})


def storable(text: str) -> str:
    """Replace the characters of an agent's text that PostgreSQL refuses: NUL and lone surrogates."""
    return text.encode(errors="replace").decode().replace("\0", "\N{REPLACEMENT CHARACTER}")


def reward_text(reward: Reward) -> str:
    return json.dumps(asdict(reward), allow_nan=False, separators=(",", ":"))


def read_lease(row: Row[tuple[object, ...]]) -> Lease:
    """Build a lease from a row of `LEASE_COLUMNS`."""
    return Lease(
        episode=row.id,
        unit=row.unit,
        attempt=row.attempt,
        name=attempt_name(row.name, row.attempt, row.origin),
        group=row.group_name,
        task=read_task(row.task),
        worker=row.worker,
        num_calls=row.num_calls,
        context=row.context,
    )


LEASE_COLUMNS = (
    *(episode_table.c[name] for name in ("id", "unit", "attempt", "name", "worker", "num_calls", "state")),
    *(unit_table.c[name] for name in ("origin", "group_name", "task", "context")),
)
_STORED_COLUMNS = (
    *(episode_table.c[name] for name in ("id", "unit", "name", "attempt", "state", "reward", "step_rewards")),
    *(episode_table.c[name] for name in ("failure", "artifacts")),
    *(unit_table.c[name] for name in ("place", "group_name", "origin", "task", "lag", "oldest_step")),
)


def read_units(connection: Connection, unit_ids: Sequence[int], vocab_size: int) -> list[StoredUnit]:
    """Read units with all of their recorded data, in queue order."""
    unit, episode = unit_table.c, episode_table.c
    query = select(*_STORED_COLUMNS).join_from(unit_table, episode_table, unit.id == episode.unit)
    query = query.where(unit.id.in_(unit_ids)).order_by(unit.place, unit.id, episode.id)
    rows = connection.execute(query).all()
    calls = _read_calls(connection, [row.id for row in rows])
    units = []
    for _, group in groupby(rows, lambda row: row.unit):
        first, *others = group
        task = read_task(first.task)
        episodes = tuple(_read_episode(row, task, calls.get(row.id, []), vocab_size) for row in (first, *others))
        units.append(StoredUnit(first.place, first.group_name, task, episodes, first.lag, first.oldest_step))
    return units


def _read_calls(connection: Connection, episode_ids: Sequence[int]) -> dict[int, list[bytes]]:
    """Calls by episode, in order. The table holds only those of the attempt that counts."""
    call = call_table.c
    query = select(call.episode, call.data).where(call.episode.in_(episode_ids))
    calls: dict[int, list[bytes]] = {}
    for episode, data in connection.execute(query.order_by(call.episode, call.attempt, call.ordinal)).all():
        calls.setdefault(episode, []).append(data)
    return calls


def _read_episode(row: Row[tuple[object, ...]], task: Task, calls: list[bytes], vocab_size: int) -> StoredEpisode:
    return StoredEpisode(
        name=attempt_name(row.name, row.attempt, row.origin),
        state=row.state,
        task=task,
        calls=tuple(calls),
        vocab_size=vocab_size,
        reward=None if row.reward is None else Reward(**json.loads(row.reward)),
        step_rewards=None if row.step_rewards is None else tuple(json.loads(row.step_rewards)),
        failure=row.failure,
        artifacts=json.loads(row.artifacts),
        num_attempts=row.attempt,
    )


def role_artifacts(roles: Sequence[str]) -> dict[str, str]:
    """The artifact that stores the roles of an attempt's calls; none where all are main."""
    return {ROLES: json.dumps(roles)} if any(role != CallRole.MAIN for role in roles) else {}


def read_roles(artifacts: Mapping[str, str]) -> list[str]:
    """The roles of an attempt's calls; none where all are main."""
    roles: list[str] = json.loads(artifacts.get(ROLES, "[]"))
    return roles
