"""JSON encoding of prompts, chunks and errors between the server and the remote engine.

A prompt is an object with `stream` and the fields of `Prompt`, those with a default optional, except `affinity`, which
only chooses the server; its ids are a list, or little-endian int32 values in base64, which is far faster for a long
history. A chunk is an object with the fields of `Chunk`; NaN, which JSON lacks, is null, and experts are {"shape",
"data"} with little-endian int16 values in base64. An error is {"error": {"type", "message"}}. Numbers round-trip
exactly, to the bit.
"""

import base64
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Annotated, Any, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import BeforeValidator, FailFast, Field, ValidationError

from m2forge.config import Config
from m2forge.errors import (
    CheckpointError,
    ConfigError,
    EngineError,
    M2ForgeError,
    NotFoundError,
    RecordError,
    RequestError,
    suggest,
)
from m2forge.protocols import Chunk, Prompt
from m2forge.records import MAX_INT32, FinishReason, FloatArray, IntArray, JsonValue, PolicyVersion, Sampling

_ID_TYPE = "<i4"


def _read_packed(value: object) -> object:
    """Decodes base64 ids; passes anything else to the validation that follows."""
    if not isinstance(value, str):
        return tuple(value) if isinstance(value, list) else value
    data = base64.b64decode(value, validate=True)
    if len(data) % np.dtype(_ID_TYPE).itemsize:
        raise ValueError(f"expected int32 values in base64, received {len(data)} bytes")
    return tuple(np.frombuffer(data, _ID_TYPE).tolist())


TokenId = Annotated[int, Field(ge=0, le=MAX_INT32)]
TokenIds = Annotated[tuple[TokenId, ...], FailFast()]
"""Validation stops at the first invalid id: reporting a million errors would take seconds and a gigabyte."""
BodyT = TypeVar("BodyT", bound=Config)

_EXPERT_TYPE = "<i2"
_decode = json.JSONDecoder().decode
_PROMPT_FIELDS = tuple(field.name for field in fields(Prompt) if field.name not in ("ids", "affinity"))
_NUM_SHOWN = 8
"""Largest number of problems reported for one body."""
_ERRORS: dict[str, type[M2ForgeError]] = {
    kind.__name__: kind
    for kind in (CheckpointError, ConfigError, EngineError, NotFoundError, RecordError, RequestError)
}


class SamplingBody(Config):
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0


class PromptBody(Config):
    ids: Annotated[TokenIds, BeforeValidator(_read_packed)]
    max_tokens: Annotated[int, Field(le=MAX_INT32)]
    sampling: SamplingBody = SamplingBody()
    stop_ids: TokenIds = ()
    stop_texts: tuple[str, ...] = ()
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    num_samples: int = 1
    priority: Annotated[int, Field(ge=-MAX_INT32, le=MAX_INT32)] = 0
    timeout_s: Annotated[float, Field(ge=0)] | None = None
    returns_experts: bool = False
    stream: bool = True

    def prompt(self) -> Prompt:
        return Prompt(
            ids=np.array(self.ids, np.int32),
            max_tokens=self.max_tokens,
            sampling=Sampling(**self.sampling.model_dump()),
            stop_ids=self.stop_ids,
            stop_texts=self.stop_texts,
            seed=self.seed,
            num_samples=self.num_samples,
            priority=self.priority,
            timeout_s=self.timeout_s,
            returns_experts=self.returns_experts,
        )


class VersionBody(Config):
    lineage: str
    step: Annotated[int, Field(le=MAX_INT32)]
    branch: str = ""

    def version(self) -> PolicyVersion:
        return PolicyVersion(self.lineage, self.step, self.branch)


class WeightsBody(Config):
    folder: str
    version: VersionBody


def read_body(kind: type[BodyT], data: bytes) -> BodyT:
    """Validate a request's JSON; raises one `RequestError` with the problems found."""
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        problems = []
        for details in error.errors(include_url=False, include_input=False)[:_NUM_SHOWN]:
            location = ".".join(str(part) for part in details["loc"])
            if details["type"] == "extra_forbidden":
                near = suggest(str(details["loc"][-1]), _known(kind, details["loc"][:-1]))
                problems.append(f"unknown key {location!r}; {near}")
            else:
                problems.append(f"{location}: {details['msg']}" if location else details["msg"])
        if error.error_count() > _NUM_SHOWN:
            problems.append(f"{error.error_count() - _NUM_SHOWN} more")
        raise RequestError(f"invalid request body: {'; '.join(problems)}") from error


def write_prompt(prompt: Prompt) -> bytes:
    body: dict[str, JsonValue] = {name: getattr(prompt, name) for name in _PROMPT_FIELDS}
    body["sampling"] = {name: getattr(prompt.sampling, name) for name in SamplingBody.model_fields}
    # Base64 needs no escaping, so `json.dumps` does not scan it.
    ids = base64.b64encode(np.ascontiguousarray(prompt.ids, _ID_TYPE).data)
    return b"".join((b'{"ids": "', ids, b'", ', json.dumps(body)[1:].encode()))


def write_chunk(chunk: Chunk) -> dict[str, JsonValue]:
    """Omits experts and the finish reason if the chunk has none."""
    body: dict[str, JsonValue] = {
        "sample": chunk.sample,
        "ids": chunk.ids.tolist(),
        "logprobs": _write_floats(chunk.logprobs),
        "raw_logprobs": _write_floats(chunk.raw_logprobs),
        "versions": chunk.versions.tolist(),
        "num_cached": chunk.num_cached,
    }
    if chunk.experts is not None:
        data = base64.b64encode(chunk.experts.astype(_EXPERT_TYPE).tobytes()).decode()
        body["experts"] = {"shape": list(chunk.experts.shape), "data": data}
    if chunk.finish_reason is not None:
        body["finish_reason"] = chunk.finish_reason.value
    return body


def read_chunk(line: str | bytes) -> Chunk:
    """The chunk of one line of a stream. Raises the error if the line carries one."""
    try:
        body = _decode(line if isinstance(line, str) else line.decode())
        if "error" in body:
            raise read_error(body, 500)
        return Chunk(
            sample=body["sample"],
            ids=_read_ints(body["ids"]),
            logprobs=_read_floats(body["logprobs"]),
            raw_logprobs=_read_floats(body["raw_logprobs"]),
            versions=_read_ints(body["versions"]),
            num_cached=body["num_cached"],
            experts=_read_experts(body.get("experts")),
            finish_reason=None if "finish_reason" not in body else FinishReason(body["finish_reason"]),
        )
    except (KeyError, OverflowError, TypeError, ValueError) as error:
        if isinstance(error, M2ForgeError):
            raise
        raise EngineError(f"the server sent a line that is not a chunk ({error!r}): {line[:200]!r}") from error


def read_chunks(lines: Sequence[bytes]) -> Iterator[Chunk]:
    """The chunks of lines received together, merged if all belong to one completion. If a line carries an error, it is
    raised after the chunks before it."""
    if len(lines) > 1:
        try:
            bodies = _decode((b"[%b]" % b",".join(lines)).decode())
            if (merged := _read_merged(bodies)) is not None:
                yield merged
                return
        except (KeyError, OverflowError, TypeError, ValueError):
            pass  # `read_chunk` raises it for the faulty line
    yield from map(read_chunk, lines)


def _read_merged(bodies: Sequence[Mapping[str, Any]]) -> Chunk | None:
    """Merges chunks of one completion; returns None if the bodies are anything else."""
    first, last = bodies[0], bodies[-1]
    for body in bodies:
        if body.get("sample") != first["sample"] or "experts" in body or (body is not last and "finish_reason" in body):
            return None
    return Chunk(
        sample=first["sample"],
        ids=_read_ints([id for body in bodies for id in body["ids"]]),
        logprobs=_read_floats([number for body in bodies for number in body["logprobs"]]),
        raw_logprobs=_read_floats([number for body in bodies for number in body["raw_logprobs"]]),
        versions=_read_ints([step for body in bodies for step in body["versions"]]),
        num_cached=max(body["num_cached"] for body in bodies),
        finish_reason=None if "finish_reason" not in last else FinishReason(last["finish_reason"]),
    )


def write_error(error: M2ForgeError) -> dict[str, JsonValue]:
    return {"error": {"type": type(error).__name__, "message": str(error)}}


def read_error(body: object, status: int) -> M2ForgeError:
    """The error in a response, of the original type if it is one of ours."""
    error = body.get("error") if isinstance(body, Mapping) else None
    if not isinstance(error, Mapping):
        return EngineError(f"the server answered {status}: {str(body)[:200]}")
    kind = _ERRORS.get(str(error.get("type")), RequestError if 400 <= status < 500 else EngineError)
    return kind(str(error.get("message")))


def _known(kind: type[Config], location: Iterable[str | int]) -> Iterable[str]:
    """The keys allowed in the object at `location`."""
    for part in location:
        inner = kind.model_fields[str(part)].annotation
        if not (isinstance(inner, type) and issubclass(inner, Config)):
            return ()
        kind = inner
    return kind.model_fields


def _write_floats(values: FloatArray) -> list[JsonValue]:
    listed: list[JsonValue] = values.tolist()
    # NaN is the only value that differs from itself.
    return [None if value != value else value for value in listed]


def _read_floats(values: Sequence[float | None]) -> FloatArray:
    return np.array([np.nan if value is None else value for value in values], np.float32)


def _read_ints(values: Sequence[int]) -> IntArray:
    return np.array(values, np.int32)


def _read_experts(body: Mapping[str, str | list[int]] | None) -> npt.NDArray[np.int16] | None:
    if body is None:
        return None
    values = np.frombuffer(base64.b64decode(str(body["data"])), _EXPERT_TYPE)
    return values.reshape([int(size) for size in body["shape"]]).astype(np.int16)
