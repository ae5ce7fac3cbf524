"""Serializes a token tree to bytes and back: every token once, loads back equal, rejects anything it did not write.

    header   magic, version, the counts of `_Counts`
    columns  those of `_columns`, concatenated, little-endian
    text     JSON: names and episodes, the requested sampling where it differs from the actual one, and the notices of
             each sample if one has any
    crc32    of everything before it

Ids take as many bytes as the vocabulary needs, policy versions are run-length encoded, distinct samplings are stored
once. Any damage is a RecordError: the checksum detects changed bits, and the rest is validated as strictly as calls
added to a tree.
"""

import json
import struct
import zlib
from dataclasses import astuple, dataclass, fields

import numpy as np
import numpy.typing as npt

from m2forge.errors import RecordError
from m2forge.records import LOGPROB_SLACK, FinishReason, FloatArray, IntArray, RequestedSampling, Sampling
from m2forge.tree.token_tree import MAX_VOCAB_SIZE, ExpertArray, Node, Sample, TokenTree

MAGIC = b"M2TT"
FORMAT_VERSION = 4
_FINISH_REASONS = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT)
"""Stored as indices into this tuple, so the order is part of the format."""
_SAMPLING_FIELDS = tuple(item.name for item in fields(Sampling))
"""Each field is stored as a column."""

_NOT_REQUESTED = -1
Columns = dict[str, npt.NDArray[np.generic]]


@dataclass(frozen=True)
class _Counts:
    vocab_size: int
    num_nodes: int
    num_tokens: int
    num_samples: int
    num_logprobs: int
    num_runs: int
    num_layers: int
    """0 if no routing is recorded."""
    num_chosen: int
    num_samplings: int
    num_text: int

    @property
    def id_width(self) -> int:
        return max(1, (max(self.vocab_size - 1, 1).bit_length() + 7) // 8)


_HEADER = struct.Struct(f"<4sH{len(fields(_Counts))}Q")
_CHECKSUM = struct.Struct("<I")


def _columns(counts: _Counts) -> dict[str, tuple[str, int]]:
    """Type and length of each column, in order."""
    num_samples = counts.num_samples
    return {
        "node_parent": ("<i4", counts.num_nodes),
        "node_size": ("<i4", counts.num_nodes),
        "token": ("u1", counts.num_tokens * counts.id_width),
        "sample_node": ("<i4", num_samples),
        "num_prompt": ("<i4", num_samples),
        "num_response": ("<i4", num_samples),
        "finish_reason": ("u1", num_samples),
        "started_s": ("<f8", num_samples),
        "finished_s": ("<f8", num_samples),
        "advantage": ("<f8", num_samples),
        "weight": ("<f8", num_samples),
        "sampling": ("<i4", num_samples),
        "asked": ("<i4", num_samples),
        "temperature": ("<f8", counts.num_samplings),
        "top_p": ("<f8", counts.num_samplings),
        "top_k": ("<i4", counts.num_samplings),
        "min_p": ("<f8", counts.num_samplings),
        "presence_penalty": ("<f8", counts.num_samplings),
        "frequency_penalty": ("<f8", counts.num_samplings),
        "repetition_penalty": ("<f8", counts.num_samplings),
        "logprob": ("<f4", counts.num_logprobs),
        "run_version": ("<i4", counts.num_runs),
        "run_length": ("<i4", counts.num_runs),
        "expert": ("<i2", counts.num_tokens * counts.num_layers * counts.num_chosen),
    }


def encode_tree(tree: TokenTree) -> bytes:
    nodes, parents = tree.nodes()
    index_of = {node: index for index, node in enumerate(nodes)}
    samples = tree.samples
    tokens: IntArray = np.concatenate([np.empty(0, np.int32), *(node.tokens for node in nodes)])
    logprobs: FloatArray = np.concatenate([np.empty(0, np.float32), *(sample.logprobs for sample in samples)])
    run_version, run_length = _runs(np.concatenate([np.empty(0, np.int32), *(sample.versions for sample in samples)]))
    shape = tree.experts_shape or (0, 0)
    experts = [node.experts(shape) for node in nodes] if tree.experts_shape else []
    requested = {wish: index for index, wish in enumerate(dict.fromkeys(s.requested for s in samples if s.requested))}
    texts: list[object] = [
        [[s.name, s.episode] for s in samples],
        [[*astuple(wish.sampling), wish.seed] for wish in requested],
    ]
    if any(s.notices for s in samples):
        texts.append([s.notices for s in samples])
    text = json.dumps(texts, separators=(",", ":")).encode()
    samplings = {sampling: index for index, sampling in enumerate(dict.fromkeys(s.sampling for s in samples))}
    counts = _Counts(
        vocab_size=tree.vocab_size,
        num_nodes=len(nodes),
        num_tokens=tokens.size,
        num_samples=len(samples),
        num_logprobs=logprobs.size,
        num_runs=run_version.size,
        num_layers=shape[0],
        num_chosen=shape[1],
        num_samplings=len(samplings),
        num_text=len(text),
    )
    columns: dict[str, npt.ArrayLike] = {
        "node_parent": parents,
        "node_size": [node.size for node in nodes],
        "token": _narrow(tokens, counts.id_width),
        "sample_node": [index_of[end] for end in tree.ends()],
        "num_prompt": [sample.num_prompt for sample in samples],
        "num_response": [sample.num_response for sample in samples],
        "finish_reason": [_FINISH_REASONS.index(sample.finish_reason) for sample in samples],
        "started_s": [sample.started_s for sample in samples],
        "finished_s": [sample.finished_s for sample in samples],
        "advantage": [sample.advantage for sample in samples],
        "weight": [sample.weight for sample in samples],
        "sampling": [samplings[sample.sampling] for sample in samples],
        "asked": [_NOT_REQUESTED if sample.requested is None else requested[sample.requested] for sample in samples],
        **{name: [getattr(sampling, name) for sampling in samplings] for name in _SAMPLING_FIELDS},
        "logprob": logprobs,
        "run_version": run_version,
        "run_length": run_length,
        "expert": np.concatenate([np.empty(0, np.int16), *(part.ravel() for part in experts)]),
    }
    parts = [_HEADER.pack(MAGIC, FORMAT_VERSION, *astuple(counts))]
    parts += [np.asarray(columns[name], dtype).tobytes() for name, (dtype, _) in _columns(counts).items()]
    body = b"".join([*parts, text])
    return body + _CHECKSUM.pack(zlib.crc32(body))


def decode_tree(data: bytes) -> TokenTree:
    counts = _checked_counts(data)
    columns: Columns = {}
    offset = _HEADER.size
    for name, (dtype, length) in _columns(counts).items():
        # A separate copy: the tree grows in these arrays, and the bytes are neither writeable nor aligned.
        columns[name] = np.frombuffer(data, dtype, length, offset).astype(np.dtype(dtype).newbyteorder("="))
        offset += columns[name].nbytes
    nodes = _decoded_nodes(counts, columns)
    samples = _decoded_samples(counts, columns, data[offset : offset + counts.num_text])
    ends = []
    for sample, index in zip(samples, columns["sample_node"].tolist(), strict=True):
        _require(0 <= index < len(nodes) and nodes[index].depth < sample.num_tokens <= nodes[index].end, "a path's end")
        ends.append(nodes[index])
    reached = {end for sample, end in zip(samples, ends, strict=True) if sample.num_tokens == end.end}
    _require(all(node.children or node in reached for node in nodes), "a leaf of no sample")
    shape = (counts.num_layers, counts.num_chosen) if counts.num_layers else None
    return TokenTree.assemble(counts.vocab_size, nodes, samples, ends, shape)


def _checked_counts(data: bytes) -> _Counts:
    """Validate what makes the rest safe to read: magic, version, checksum and length."""
    _require(len(data) >= _HEADER.size + _CHECKSUM.size, f"only {len(data)} bytes")
    magic, version, *numbers = _HEADER.unpack_from(data)
    _require(magic == MAGIC, f"the magic {magic!r}, not {MAGIC!r}")
    _require(version == FORMAT_VERSION, f"format version {version}, this program reads {FORMAT_VERSION}")
    (checksum,) = _CHECKSUM.unpack_from(data, len(data) - _CHECKSUM.size)
    _require(zlib.crc32(memoryview(data)[: -_CHECKSUM.size]) == checksum, "a wrong checksum; it was damaged or cut off")
    counts = _Counts(*numbers)
    _require(1 <= counts.vocab_size <= MAX_VOCAB_SIZE, f"a vocabulary of {counts.vocab_size}")
    size = sum(np.dtype(dtype).itemsize * length for dtype, length in _columns(counts).values())
    expected = _HEADER.size + size + counts.num_text + _CHECKSUM.size
    _require(len(data) == expected, f"{len(data)} bytes where its header states {expected}")
    is_routed = counts.num_layers > 0 and counts.num_chosen > 0 and counts.num_tokens > 0
    _require(is_routed or counts.num_layers == counts.num_chosen == 0, "routing of nothing")
    return counts


def _decoded_nodes(counts: _Counts, columns: Columns) -> list[Node]:
    parents, sizes = columns["node_parent"].tolist(), columns["node_size"].tolist()
    _require(min(sizes, default=1) > 0 and sum(sizes) == counts.num_tokens, "sizes of nodes")
    _require(all(-1 <= parent < index for index, parent in enumerate(parents)), "parents of nodes")
    tokens = _widened(columns["token"], counts.id_width)
    _require(not tokens.size or 0 <= tokens.min() <= tokens.max() < counts.vocab_size, "ids past the vocabulary")
    nodes: list[Node] = []
    start = 0
    for parent_index, size in zip(parents, sizes, strict=True):
        parent = nodes[parent_index] if parent_index >= 0 else None
        node = Node(tokens[start : start + size], parent.end if parent else 0, parent)
        first = int(tokens[start])
        if parent:
            _require(first not in parent.children, "two branches of one token")
            parent.children[first] = node
        nodes.append(node)
        start += size
    _require(all(len(node.children) != 1 for node in nodes), "a node with one child")
    roots = [int(node.tokens[0]) for node in nodes if node.parent is None]
    _require(len(roots) == len(set(roots)), "two roots of one token")
    if counts.num_layers:
        _decode_experts(counts, columns["expert"].astype(np.int16), nodes)
    return nodes


def _decode_experts(counts: _Counts, flat: ExpertArray, nodes: list[Node]) -> None:
    experts = flat.reshape(counts.num_tokens, counts.num_layers, counts.num_chosen)
    unknown = experts < 0
    _require(not experts.size or experts.min() >= -1, "experts below -1")
    _require(bool((unknown.all((1, 2)) == unknown.any((1, 2))).all()), "a token routed in part")
    start = 0
    for node in nodes:
        node.learn(experts[start : start + node.size])
        start += node.size


def _decoded_samples(counts: _Counts, columns: Columns, text: bytes) -> list[Sample]:
    logprobs = columns["logprob"].astype(np.float32)
    _require(bool((np.isfinite(logprobs) & (logprobs <= LOGPROB_SLACK)).all()), "log-probabilities above 0")
    run_length = columns["run_length"].astype(np.int64)
    _require(bool((run_length > 0).all()) and run_length.sum() == counts.num_logprobs, "runs of versions")
    versions: IntArray = np.repeat(columns["run_version"].astype(np.int32), run_length)
    _require(not versions.size or versions.min() >= 0, "versions below 0")
    for array in (logprobs, versions):
        array.flags.writeable = False
    num_prompt, num_response = columns["num_prompt"], columns["num_response"].astype(np.int64)
    _require(not num_prompt.size or (num_prompt.astype(np.int64).min() > 0 <= num_response.min()), "lengths of paths")
    _require(num_response.sum() == counts.num_logprobs, "lengths of responses")
    ends = num_response.cumsum().tolist()
    times_s = np.stack([columns["started_s"], columns["finished_s"]]).astype(np.float64)
    _require(bool(np.isfinite(times_s).all() and (times_s[0] <= times_s[1]).all()), "times")
    _require(max(columns["finish_reason"].tolist(), default=0) < len(_FINISH_REASONS), "finish reasons")
    names, requested, notices = _decoded_texts(text, counts.num_samples)
    wishes = columns["asked"].tolist()
    _require(all(_NOT_REQUESTED <= index < len(requested) for index in wishes), "wishes that it does not tell")
    samplings = [Sampling(*row) for row in zip(*(columns[name].tolist() for name in _SAMPLING_FIELDS), strict=True)]
    used = columns["sampling"].tolist()
    _require(all(0 <= index < len(samplings) for index in used), "ways of sampling that it does not tell")
    return [
        Sample(
            name=name,
            num_prompt=int(num_prompt[index]),
            logprobs=logprobs[end - int(num_response[index]) : end],
            versions=versions[end - int(num_response[index]) : end],
            finish_reason=_FINISH_REASONS[int(columns["finish_reason"][index])],
            started_s=float(times_s[0, index]),
            finished_s=float(times_s[1, index]),
            episode=episode,
            advantage=float(columns["advantage"][index]),
            sampling=samplings[used[index]],
            weight=float(columns["weight"][index]),
            requested=None if wishes[index] == _NOT_REQUESTED else requested[wishes[index]],
            notices=notices[index],
        )
        for index, ((name, episode), end) in enumerate(zip(names, ends, strict=True))
    ]


def _decoded_texts(
    text: bytes, num_samples: int
) -> tuple[list[tuple[str, str]], list[RequestedSampling], list[tuple[str, ...]]]:
    """Names, requested samplings, and the notices of each sample."""
    try:
        pairs, wishes, *noted = json.loads(text)
        notices: list[tuple[str, ...]] = [tuple(texts) for texts in (noted[0] if noted else [()] * num_samples)]
        names = [(name, episode) for name, episode in pairs]
        requested = [RequestedSampling(Sampling(*sampling), seed) for *sampling, seed in wishes]
    except (TypeError, ValueError, ArithmeticError, RecursionError) as error:
        raise RecordError(f"bytes that are no token tree: their names cannot be read ({error})") from error
    _require(all(isinstance(part, str) for pair in names for part in pair), "names that are not text")
    _require(len(names) == num_samples == len({name for name, _ in names}), "names missing or used twice")
    _require(all(wish.seed is None or isinstance(wish.seed, int) for wish in requested), "seeds that are no integers")
    _require(len(noted) <= 1 and len(notices) == num_samples, "notices missing")
    _require(all(isinstance(notice, str) for texts in notices for notice in texts), "notices that are not text")
    return names, requested, notices


def _require(condition: bool, found: str) -> None:
    if not condition:
        raise RecordError(f"bytes that are no token tree: they hold {found}")


def _runs(values: IntArray) -> tuple[IntArray, IntArray]:
    """Run-length encoding: values and lengths."""
    starts = np.concatenate(([0], (np.diff(values) != 0).nonzero()[0] + 1))[: values.size]
    return values[starts], np.diff(np.append(starts, values.size)).astype(np.int32)


def _narrow(ids: IntArray, width: int) -> npt.NDArray[np.uint8]:
    return ids.astype("<u4").view(np.uint8).reshape(-1, 4)[:, :width]


def _widened(column: npt.NDArray[np.generic], width: int) -> IntArray:
    """Ids of `width` bytes each as int32; values from 2^31 on become negative."""
    wide = np.zeros((column.size // width, 4), np.uint8)
    wide[:, :width] = column.reshape(-1, width)
    return wide.view("<i4").ravel().astype(np.int32)
