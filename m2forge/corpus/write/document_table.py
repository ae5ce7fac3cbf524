"""Documents on disk between the stages of a build: one folder per part, one file per column.

A column holds a fixed number of bytes per document; the columns `text`, `name` and `tokens` have variable length, with
a second file of offsets. Writers append, readers memory-map: memory does not grow with the number of documents.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Generic, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from m2forge.records import JsonValue

Number = TypeVar("Number", bound=np.number)
Scalar: TypeAlias = type[Number] | np.dtype[Number]

SUMMARY_NAME = "summary.json"


@dataclass(slots=True)
class TableWriter:
    """Appends to the columns of one part."""

    folder: Path
    _files: dict[str, IO[bytes]] = field(default_factory=dict)
    _ends: dict[str, int] = field(default_factory=dict)

    def __enter__(self) -> "TableWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files.values():
            file.close()

    def append(self, column: str, rows: npt.NDArray[np.generic]) -> None:
        self._file(column).write(np.ascontiguousarray(rows).tobytes())

    def append_stretches(self, column: str, data: bytes, lengths: npt.NDArray[np.integer]) -> None:
        """Append variable-length values; lengths and offsets are in the column's unit, such as tokens."""
        offsets = f"{column}.offsets"
        if offsets not in self._files:
            self.append(offsets, np.zeros(1, np.int64))
        ends = np.cumsum(lengths, dtype=np.int64) + self._ends.get(column, 0)
        self._file(column).write(data)
        self.append(offsets, ends)
        if len(ends):
            self._ends[column] = int(ends[-1])

    def finish(self, summary: Mapping[str, JsonValue]) -> None:
        (self.folder / SUMMARY_NAME).write_text(json.dumps(summary, sort_keys=True))

    def _file(self, column: str) -> IO[bytes]:
        if column not in self._files:
            self._files[column] = (self.folder / f"{column}.bin").open("wb", buffering=1 << 18)
        return self._files[column]


class Table:
    """The columns of one finished part. Files are memory-mapped on each use and released after it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.summary: dict[str, JsonValue] = json.loads((folder / SUMMARY_NAME).read_text())

    def count(self, name: str) -> int:
        """An integer of the summary."""
        value = self.summary[name]
        assert isinstance(value, int)
        return value

    def column(self, name: str, dtype: Scalar[Number], width: int = 0) -> npt.NDArray[Number]:
        """A column of numbers; with a width, of rows of numbers."""
        path = self._folder / f"{name}.bin"
        # An empty file cannot be mapped, and a column that was never appended to has no file.
        size = path.stat().st_size if path.exists() else 0
        values = np.asarray(np.memmap(path, dtype=dtype, mode="r")) if size else np.zeros(0, dtype)
        return values.reshape(-1, width) if width else values

    def stretches(self, name: str, dtype: Scalar[Number]) -> "Stretches[Number]":
        offsets = self.column(f"{name}.offsets", np.int64)
        return Stretches(self.column(name, dtype), offsets if len(offsets) else np.zeros(1, np.int64))

    def texts(self, name: str) -> "Stretches[np.uint8]":
        return self.stretches(name, np.uint8)


@dataclass(frozen=True, slots=True)
class Stretches(Generic[Number]):
    """A column of variable-length values."""

    data: npt.NDArray[Number]
    offsets: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> npt.NDArray[Number]:
        return self.data[int(self.offsets[row]) : int(self.offsets[row + 1])]

    def text(self, row: int) -> str:
        return self[row].tobytes().decode()


class Tables:
    """The parts of a stage as one table; documents are numbered across all parts."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.parts = [Table(folder) for folder in folders]
        self.first = np.cumsum([0, *(part.count("num_rows") for part in self.parts)])

    def __len__(self) -> int:
        return int(self.first[-1])

    def column(self, name: str, dtype: type[Number]) -> npt.NDArray[Number]:
        """A column of numbers over all parts, in memory."""
        values = np.empty(len(self), dtype)
        for part, begin, end in zip(self.parts, self.first[:-1], self.first[1:], strict=True):
            values[begin:end] = part.column(name, dtype)
        return values

    def rows(self, name: str, chosen: npt.NDArray[np.int64], dtype: type[Number], width: int) -> npt.NDArray[Number]:
        """Chosen rows of a column."""
        result = np.empty((len(chosen), width), dtype)
        part_of = np.searchsorted(self.first, chosen, side="right") - 1
        for index in np.unique(part_of).tolist():
            mine = np.flatnonzero(part_of == index)
            result[mine] = self.parts[index].column(name, dtype, width)[chosen[mine] - self.first[index]]
        return result
