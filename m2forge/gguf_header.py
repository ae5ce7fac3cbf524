"""Reads the header of a GGUF file, the format of llama.cpp: its metadata, and the locations of its tensors.

    "GGUF", version, number of tensors, number of fields │ fields │ tensors │ padding │ data of the tensors
    field: name, type, value;   tensor: name, dimensions (the fastest first), type, offset into the data

Every length and count in the file is compared with the remaining bytes before anything is read or allocated for it, so
that a header costs memory in proportion to its own size. A header that claims more than the file holds is a DataError.
"""

import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from m2forge.errors import DataError

Scalar = bool | int | float | str
Value = Scalar | list[Scalar]

VERSIONS = (2, 3)
MAX_ITEMS = 1 << 24
"""Maximum number of items of all metadata arrays. The largest vocabularies, with merges, have about a million."""
MAX_DIMENSIONS = 4

_SCALARS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")
_MIN_FIELD, _MIN_TENSOR = _LENGTH.size + 4 + 1, _LENGTH.size + 4 + 4 + 8
"""Size in bytes of a field and of a tensor entry with an empty name."""
_ALIGNMENT = "general.alignment"


class StoredTensor(NamedTuple):
    shape: tuple[int, ...]
    """Fastest dimension last."""
    kind: int
    """Number of its type, which gives the quantisation."""
    start: int
    """Byte offset in the file."""


class GGUFHeader(NamedTuple):
    fields: dict[str, Value]
    tensors: dict[str, StoredTensor]
    data: npt.NDArray[np.uint8]
    """The whole file, memory-mapped."""


def read_header(path: Path) -> GGUFHeader:
    try:
        data = np.memmap(path, mode="r")
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is not a complete GGUF file: {error}; fetch it again") from error
    try:
        return _Reader(data).read()
    except (ValueError, struct.error) as error:
        raise DataError(f"{path} is not a complete GGUF file: {error}; fetch it again") from error


class _Reader:
    """Reads sequentially from the start of the file. Raises ValueError for anything invalid."""

    def __init__(self, data: npt.NDArray[np.uint8]) -> None:
        self._data, self._bytes = data, data.data
        self._at, self._num_items = 0, 0

    def read(self) -> GGUFHeader:
        if bytes(self._take(4)) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        version, num_tensors, num_fields = struct.unpack("<IQQ", self._take(20))
        if version not in VERSIONS:
            raise ValueError(f"its version is {version}, expected one of {VERSIONS} in little-endian order")
        self._need(num_fields, _MIN_FIELD, "fields")
        fields: dict[str, Value] = {}
        for _ in range(num_fields):
            name = self._text()
            if name in fields:
                raise ValueError(f"the field {name!r} occurs twice")
            fields[name] = self._value(name)
        self._need(num_tensors, _MIN_TENSOR, "tensors")
        entries = [self._tensor() for _ in range(num_tensors)]
        begin = self._begin(fields.get(_ALIGNMENT, 32))
        tensors = {name: tensor._replace(start=begin + tensor.start) for name, tensor in entries}
        if len(tensors) < len(entries):
            raise ValueError(f"{len(entries) - len(tensors)} of its tensors occur twice")
        return GGUFHeader(fields, tensors, self._data)

    def _begin(self, alignment: Value) -> int:
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise ValueError(f"{_ALIGNMENT} is {alignment!r}, expected a power of two")
        return -(-self._at // alignment) * alignment

    def _value(self, name: str) -> Value:
        (kind,) = struct.unpack("<I", self._take(4))
        if kind != _ARRAY:
            return self._text() if kind == _STRING else self._numbers(kind, 1, name)[0]
        kind, num_items = struct.unpack("<IQ", self._take(12))
        self._num_items += num_items
        if self._num_items > MAX_ITEMS:
            raise ValueError(f"its arrays have {self._num_items} items up to {name!r}, at most {MAX_ITEMS} are allowed")
        if kind != _STRING:
            return self._numbers(kind, num_items, name)
        self._need(num_items, _LENGTH.size, f"texts in {name!r}")
        return [self._text() for _ in range(num_items)]

    def _numbers(self, kind: int, num_items: int, name: str) -> list[Scalar]:
        if kind not in _SCALARS:
            raise ValueError(f"the field {name!r} has type {kind}; arrays of arrays and unknown types are not read")
        dtype = np.dtype(_SCALARS[kind])
        values: list[Scalar] = np.frombuffer(self._take(num_items * dtype.itemsize), dtype).tolist()
        return values

    def _tensor(self) -> tuple[str, StoredTensor]:
        name = self._text()
        (num_dimensions,) = struct.unpack("<I", self._take(4))
        if num_dimensions > MAX_DIMENSIONS:
            raise ValueError(
                f"the tensor {name!r} has {num_dimensions} dimensions, at most {MAX_DIMENSIONS} are allowed"
            )
        *sizes, kind, offset = struct.unpack(f"<{num_dimensions}QIQ", self._take(8 * num_dimensions + 12))
        return name, StoredTensor(tuple(reversed(sizes)), kind, offset)

    def _text(self) -> str:
        (length,) = _LENGTH.unpack(self._take(_LENGTH.size))
        return str(self._take(length), "utf-8")

    def _need(self, count: int, min_bytes: int, what: str) -> None:
        left = len(self._bytes) - self._at
        if count * min_bytes > left:
            raise ValueError(f"it announces {count} {what} at byte {self._at}, where {left} bytes are left")

    def _take(self, num_bytes: int) -> memoryview:
        self._need(num_bytes, 1, "bytes")
        self._at += num_bytes
        return self._bytes[self._at - num_bytes : self._at]
