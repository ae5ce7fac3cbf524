"""The journal of an episode: entries appended to one file, durable when `append` returns.

    magic                           8 bytes
    length, crc32, entry            for each entry: two little-endian uint32, then the bytes

`append` writes an entry to the operating system before it returns, so the entry survives a crash of the process; with
`sync="disk"` it is fsynced too. A failed write is undone: the file is truncated to its former size, and the error says
what to do. A process killed while writing leaves a torn tail, which `open` truncates. Damage anywhere else is refused
with its position in the file.
"""

import json
import math
import os
import struct
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Literal, Self, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from m2forge.errors import ExistsError, M2ForgeError, RecordError
from m2forge.gateway.config import Budget
from m2forge.gateway.history.history import Divergence
from m2forge.gateway.history.turn import PathRecord, TurnRecord
from m2forge.records import Call, FinishReason, FloatArray, IntArray, JsonValue, RequestedSampling, Sampling, Task
from m2forge.text.message import Message, Role, Tool, ToolCall
from m2forge.text.parser import Completion, Problem, ProblemKind
from m2forge.tree.token_tree import UNKNOWN_EXPERT, ExpertArray

_HEAD = struct.Struct("<I")
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
_SAMPLING_FIELDS = tuple(item.name for item in fields(Sampling))
_Fields: TypeAlias = dict[str, JsonValue]
_CallFields: TypeAlias = tuple[str, dict[str, JsonValue], str]


@dataclass(frozen=True, slots=True)
class Created:
    id: str
    task_id: str
    group: str
    key_hash: str
    created_s: float
    budget: Budget
    sampling: Sampling | None = None
    """Overrides the sampling parameters of requests; None lets each request use its own."""
    task: Task | None = None
    """Task whose tools the episode may call, with everything that its tools and verifier need."""
    context: int | None = None
    """Maximum tokens of prompt plus completion; None: the model's limit."""


@dataclass(frozen=True, slots=True, eq=False)
class SampleEntry:
    """One completion of a request."""

    response_ids: IntArray
    logprobs: FloatArray
    versions: IntArray
    finish_reason: FinishReason
    started_s: float
    finished_s: float
    completion: Completion
    experts: ExpertArray | None = None
    """Routed experts of the first tokens of prompt plus completion, in the token tree's format."""


def make_sample(call: Call, completion: Completion, experts: ExpertArray | None = None) -> SampleEntry:
    return SampleEntry(
        response_ids=call.response_ids,
        logprobs=call.logprobs,
        versions=call.versions,
        finish_reason=call.finish_reason,
        started_s=call.started_s,
        finished_s=call.finished_s,
        # Text that a stream held back until the end is already in the completion's text.
        completion=replace(completion, final_events=()) if completion.final_events else completion,
        experts=experts,
    )


@dataclass(frozen=True, slots=True, eq=False)
class Answered:
    id: str
    """Response id that the client knows."""
    digest: str
    """Digest of the request's body."""
    retry_token: str
    path: PathRecord | None
    """What the prompt adds to the history; None for a raw prompt, which no history contains."""
    prompt_ids: IntArray
    """Prompt ids that no earlier entry contains; all ids of a raw prompt."""
    divergence: Divergence | None
    sampling: Sampling
    samples: tuple[SampleEntry, ...]
    reply: Mapping[str, JsonValue] = field(default_factory=dict)
    """What the server needs to resend the same response."""
    is_charged: bool = True
    """Whether the request counts against the episode's budget."""
    elapsed_s: float | None = None
    """Seconds of the episode's time at the write, gateway downtime excluded; None in journals that did not record
    it."""
    requested: RequestedSampling | None = None
    """The requested sampling, if `sampling` overrode it."""
    notices: tuple[str, ...] = ()
    """What was not honoured of the request, one short text each; none in journals that did not record it."""

    def call(self, sample: SampleEntry, prompt_ids: IntArray) -> Call:
        """Return one of its samples as a call; `prompt_ids` is the whole prompt."""
        return Call(
            prompt_ids=prompt_ids,
            response_ids=sample.response_ids,
            logprobs=sample.logprobs,
            versions=sample.versions,
            finish_reason=sample.finish_reason,
            started_s=sample.started_s,
            finished_s=sample.finished_s,
            sampling=self.sampling,
            requested=self.requested,
            notices=self.notices,
        )


@dataclass(frozen=True, slots=True)
class Rewarded:
    id: str
    """Identifies the reward, which may be posted twice."""
    value: float
    call: int | None = None
    """Index of the rewarded call; None for the whole episode."""
    evidence: Mapping[str, JsonValue] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Closed:
    closed_s: float
    failure: str | None = None


Entry: TypeAlias = Created | Answered | Rewarded | Closed


def encode_entry(entry: Entry) -> bytes:
    """Journal entries of an episode: records in, bytes out, and back without loss.

        Created     the episode, with the hash of its key
        Answered    one request: what its prompt adds to the history, its samples, and the response to the client
        Rewarded    a reward for the whole episode or for one call
        Closed      no more calls

    An entry is a JSON head, with the lengths of its arrays, and the arrays: prompt ids that no earlier entry contains,
    then for each sample ids, logprobs and policy versions, four bytes each, and routed experts, two each,
    little-endian.
    """
    arrays: list[npt.NDArray[np.generic]] = []
    match entry:
        case Created():
            head: _Fields = asdict(entry) | {"budget": entry.budget.model_dump()}
        case Answered():
            head = _answered_head(entry)
            arrays.append(entry.prompt_ids)
            for sample in entry.samples:
                arrays += [sample.response_ids, sample.logprobs, sample.versions]
                arrays += [] if sample.experts is None else [sample.experts[_first_known(sample.experts) :]]
        case Rewarded() | Closed():
            head = asdict(entry)
    text = _encode({"kind": type(entry).__name__, **head}).encode()
    return b"".join([_HEAD.pack(len(text)), text, *(_little(array).tobytes() for array in arrays)])


def decode_entry(data: bytes) -> Entry:
    try:
        (size,) = _HEAD.unpack_from(data)
        head = json.loads(data[_HEAD.size : _HEAD.size + size])
        kind = head.pop("kind")
        if kind == "Answered":
            return _answered(head, _Arrays(data, _HEAD.size + size))
        if kind == "Created":
            sampling = head.get("sampling")
            known = {"budget": Budget(**head["budget"]), "sampling": sampling and Sampling(**sampling)}
            known["task"] = Task.read(head["task"]) if head.get("task") else None
            return Created(**head | known)
        if kind == "Rewarded":
            return Rewarded(**head)
        if kind == "Closed":
            return Closed(**head)
    except (KeyError, TypeError, ValueError, IndexError, struct.error) as error:
        raise RecordError(f"an entry cannot be read: {type(error).__name__}: {error}") from error
    raise RecordError(f"unknown entry kind {kind!r}; it may be of a later version")


# -- one request ------------------------------------------------------------------------------------------------------


def _answered_head(entry: Answered) -> _Fields:
    return {
        "id": entry.id,
        "digest": entry.digest,
        "retry_token": entry.retry_token,
        "path": None if entry.path is None else _path_fields(entry.path),
        "num_prompt": entry.prompt_ids.size,
        "divergence": entry.divergence,
        "sampling": {name: getattr(entry.sampling, name) for name in _SAMPLING_FIELDS},
        "asked": None if entry.requested is None else asdict(entry.requested),
        "samples": [_sample_fields(sample) for sample in entry.samples],
        "reply": entry.reply,
        "is_charged": entry.is_charged,
        "elapsed_s": entry.elapsed_s,
        "notices": entry.notices,
    }


def _answered(head: dict[str, object], arrays: "_Arrays") -> Answered:
    path = cast("dict[str, object] | None", head["path"])
    prompt_ids = arrays.ints(cast("int", head["num_prompt"]))
    samples = tuple(_sample(sample, arrays) for sample in cast("list[dict[str, object]]", head["samples"]))
    arrays.finish()
    return Answered(
        id=cast("str", head["id"]),
        digest=cast("str", head["digest"]),
        retry_token=cast("str", head["retry_token"]),
        path=None if path is None else _path(path),
        prompt_ids=prompt_ids,
        divergence=None if head["divergence"] is None else Divergence(cast("str", head["divergence"])),
        sampling=Sampling(**cast("dict[str, float]", head["sampling"])),  # type: ignore[arg-type]  # top_k alone is int
        samples=samples,
        reply=cast("dict[str, JsonValue]", head["reply"]),
        is_charged=cast("bool", head.get("is_charged", True)),
        elapsed_s=cast("float | None", head.get("elapsed_s")),
        requested=_requested(cast("dict[str, object] | None", head.get("asked"))),
        notices=tuple(cast("list[str]", head.get("notices", []))),
    )


def _requested(fields: dict[str, object] | None) -> RequestedSampling | None:
    if fields is None:
        return None
    sampling = cast("dict[str, float]", fields["sampling"])
    return RequestedSampling(Sampling(**sampling), cast("int | None", fields["seed"]))  # type: ignore[arg-type]  # top_k alone is int


def _sample_fields(sample: SampleEntry) -> _Fields:
    completion = sample.completion
    return {
        "size": sample.response_ids.size,
        "finish_reason": sample.finish_reason,
        "started_s": sample.started_s,
        "finished_s": sample.finished_s,
        "message": _message_fields(completion.message()),
        "problems": [[problem.kind, problem.detail] for problem in completion.problems],
        "closed": completion.closed,
        "experts": None if sample.experts is None else [_first_known(sample.experts), *sample.experts.shape],
    }


def _first_known(experts: ExpertArray) -> int:
    """Return the first row to write: rows of the prompt prefix that earlier requests computed are unknown."""
    known = (experts != UNKNOWN_EXPERT).any((1, 2))
    return int(known.argmax()) if known.any() else experts.shape[0]


def _experts(arrays: "_Arrays", first_known: int, num_tokens: int, *shape: int) -> ExpertArray:
    known = arrays.shorts((num_tokens - first_known, *shape))
    return np.concatenate((np.full((first_known, *shape), UNKNOWN_EXPERT, np.int16), known))


def _sample(head: dict[str, object], arrays: "_Arrays") -> SampleEntry:
    size = cast("int", head["size"])
    message = _message(cast("Sequence[object]", head["message"]))
    problems = cast("list[tuple[str, str]]", head["problems"])
    routed = cast("list[int] | None", head.get("experts"))
    return SampleEntry(
        response_ids=arrays.ints(size),
        logprobs=arrays.floats(size),
        versions=arrays.ints(size),
        finish_reason=FinishReason(cast("str", head["finish_reason"])),
        started_s=cast("float", head["started_s"]),
        finished_s=cast("float", head["finished_s"]),
        completion=Completion(
            thinking=message.thinking,
            content=message.content,
            tool_calls=message.tool_calls,
            problems=tuple(Problem(ProblemKind(kind), detail) for kind, detail in problems),
            closed=cast("bool", head["closed"]),
        ),
        experts=None if routed is None else _experts(arrays, *routed),
    )


# -- messages and paths, as lists, because they make up most of a journal ---------------------------------------------


def _path_fields(path: PathRecord) -> _Fields:
    return {
        "parent": path.parent,
        "tools": [[tool.name, tool.description, tool.parameters] for tool in path.tools],
        "prefix": path.prefix,
        "start": path.start,
        "turns": [
            [_message_fields(turn.message), turn.closed, turn.opened, turn.start, turn.num_response]
            for turn in path.turns
        ],
    }


def _path(fields: dict[str, object]) -> PathRecord:
    tools = cast("list[tuple[str, str, dict[str, JsonValue]]]", fields["tools"])
    turns = cast("list[tuple[Sequence[object], int | None, int | None, int | None, int]]", fields["turns"])
    return PathRecord(
        parent=cast("int", fields["parent"]),
        tools=tuple(Tool(*tool) for tool in tools),
        prefix=cast("int", fields["prefix"]),
        start=cast("int", fields["start"]),
        turns=tuple(
            TurnRecord(_message(message), closed, opened, start, num_response)
            for message, closed, opened, start, num_response in turns
        ),
    )


def _message_fields(message: Message) -> list[JsonValue]:
    calls: list[JsonValue] = [[call.name, call.arguments, call.id] for call in message.tool_calls]
    return [message.role, message.content, message.thinking, calls, message.tool_call_id]


def _message(fields: Sequence[object]) -> Message:
    role, content, thinking, calls, tool_call_id = cast("tuple[Role, str, str, list[_CallFields], str]", fields)
    return Message(role, content, thinking, tuple(ToolCall(*call) for call in calls), tool_call_id)


class _Arrays:
    """Reads arrays from the end of an entry, one after another."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data, self._at = data, at

    def ints(self, size: int) -> IntArray:
        return self._take(size, "<i4").astype(np.int32, copy=False)

    def floats(self, size: int) -> FloatArray:
        return self._take(size, "<f4").astype(np.float32, copy=False)

    def shorts(self, shape: tuple[int, ...]) -> ExpertArray:
        return self._take(math.prod(shape), "<i2").astype(np.int16, copy=False).reshape(shape)

    def finish(self) -> None:
        if self._at != len(self._data):
            raise ValueError(f"{len(self._data) - self._at} bytes are left over")

    def _take(self, size: int, dtype: str) -> npt.NDArray[np.generic]:
        array = np.frombuffer(self._data, dtype, size, self._at)
        self._at += array.nbytes
        return array


def _little(array: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    return array.astype(array.dtype.newbyteorder("<"), copy=False)


# -- the file ---------------------------------------------------------------------------------------------------------

MAGIC = b"M2GWJ\x00\x01\n"
SUFFIX = ".journal"
_FRAME = struct.Struct("<II")
MAX_OPEN = 128
"""Maximum number of open files of all journals together."""
_MODE = 0o600
"""File mode: only the owner may read prompts and completions."""


class JournalError(M2ForgeError, OSError):
    """A journal cannot be written or read."""


class Journal:
    """Only the most recently written files stay open: there may be more episodes than a process may have open
    files."""

    def __init__(self, path: Path, size: int, sync: Literal["system", "disk"]) -> None:
        self.path = path
        self._size, self._sync = size, sync
        self._is_torn = False
        """Whether a failed write could not be undone."""

    @classmethod
    def create(cls, path: Path, *, sync: Literal["system", "disk"] = "system") -> Self:
        """Create an empty journal at `path`, which must not exist."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritable(path, error) from error
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _MODE)
        except FileExistsError:
            raise ExistsError(f"{path} exists; an episode has one journal") from None
        except OSError as error:
            raise _unwritable(path, error) from error
        journal = cls(path, 0, sync)
        try:
            journal._write(descriptor, MAGIC)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        if sync == "disk":
            sync_folder(path.parent)
        return journal

    @classmethod
    def open(cls, path: Path, *, sync: Literal["system", "disk"] = "system") -> tuple[Self, list[Entry]]:
        """Open the journal at `path` for appending and return its entries. Truncates a torn tail."""
        entries, size = read_entries(path)
        try:
            if size < path.stat().st_size or size == 0:
                os.truncate(path, size)
        except OSError as error:
            raise _unwritable(path, error) from error
        return cls(path, size, sync), entries

    def append(self, entry: Entry) -> None:
        """Return when the entry is written; if it raises, the journal is unchanged."""
        frame = _framed(entry)
        descriptor = self._open()
        try:
            self._check_end(descriptor)
            self._write(descriptor, frame if self._size else MAGIC + frame)
        except BaseException:
            self.release()
            raise

    def move(self, path: Path) -> None:
        """Rename the file to `path`, which must not exist."""
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.path.rename(path)
        except OSError as error:
            raise _unwritable(self.path, error) from error
        self.path = path

    def switch(self, path: Path) -> None:
        """Continue in another file with the same content."""
        self.release()
        self.path, self._size = path, path.stat().st_size

    def release(self) -> None:
        """Close the file until the next entry."""
        descriptor = _OPEN.pop(self, None)
        if descriptor is not None:
            os.close(descriptor)

    def delete(self) -> None:
        self.release()
        self.path.unlink(missing_ok=True)

    def _open(self) -> int:
        descriptor = _OPEN.get(self)
        if descriptor is not None:
            _OPEN.move_to_end(self)
            return descriptor
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        except OSError as error:
            raise _unwritable(self.path, error) from error
        _OPEN[self] = descriptor
        while len(_OPEN) > MAX_OPEN:
            next(iter(_OPEN)).release()
        return descriptor

    def _check_end(self, descriptor: int) -> None:
        """Check that the file ends where this journal left it."""
        try:
            if self._is_torn:
                os.ftruncate(descriptor, self._size)
                self._is_torn = False
            on_disk, ours = self.path.stat(), os.fstat(descriptor)
        except OSError as error:
            raise _unwritable(self.path, error) from error
        if not os.path.samestat(on_disk, ours) or on_disk.st_size != self._size:
            raise JournalError(
                f"{self.path}: the journal cannot be written: the file has {on_disk.st_size} bytes or was replaced, "
                f"expected {self._size} bytes; make sure that no other gateway uses this folder"
            )

    def _write(self, descriptor: int, data: bytes) -> None:
        try:
            left = memoryview(data)
            while left:
                left = left[os.write(descriptor, left) :]
            if self._sync == "disk":
                os.fsync(descriptor)
        except OSError as error:
            try:
                os.ftruncate(descriptor, self._size)
            except OSError:
                self._is_torn = True
            raise _unwritable(self.path, error) from error
        self._size += len(data)


_OPEN: OrderedDict[Journal, int] = OrderedDict()
"""Descriptors of open files, most recently written last."""


def write_entries(path: Path, entries: Iterable[Entry], sync: Literal["system", "disk"]) -> None:
    """Write a journal of these entries to `path`, which must not exist."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _MODE)
    with os.fdopen(descriptor, "wb") as file:
        file.write(MAGIC)
        file.writelines(map(_framed, entries))
        file.flush()
        if sync == "disk":
            os.fsync(descriptor)


def _framed(entry: Entry) -> bytes:
    data = encode_entry(entry)
    return _FRAME.pack(len(data), zlib.crc32(data)) + data


def read_entries(path: Path) -> tuple[list[Entry], int]:
    """Return the entries and their total size without a torn tail; does not change the file."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise JournalError(f"{path}: the journal cannot be read ({error.strerror})") from error
    if not data.startswith(MAGIC):
        if MAGIC.startswith(data):
            return [], 0
        raise RecordError(f"{path}: not a journal; it begins with {data[:8]!r}")
    entries, size = [], len(MAGIC)
    for frame, end in _frames(path, data):
        try:
            entries.append(decode_entry(frame))
        except RecordError as error:
            raise RecordError(f"{path}: byte {size}: {error}") from error
        size = end
    return entries, size


def _frames(path: Path, data: bytes) -> Iterator[tuple[bytes, int]]:
    at = len(MAGIC)
    while at + _FRAME.size <= len(data):
        length, checksum = _FRAME.unpack_from(data, at)
        start = at + _FRAME.size
        frame = data[start : start + length]
        if len(frame) < length or not length or zlib.crc32(frame) != checksum:
            if start + length >= len(data) or not any(data[at:]):
                return
            raise RecordError(
                f"{path}: byte {at}: damaged, and entries follow; restore the file, or truncate it there to drop them"
            )
        at = start + length
        yield frame, at


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _unwritable(path: Path, error: OSError) -> JournalError:
    return JournalError(
        f"{path}: the journal cannot be written ({error.strerror}); the entry was not stored: free disk space, or set "
        "gateway.journal to a folder that can be written"
    )
