"""Trajectories from files of rows: JSON Lines, and tables as Hugging Face's datasets library writes them.

    a line of JSON Lines, or a row of a Parquet or Arrow stream file → JSON values → to_openai (row.py) → a trajectory

Assistant messages may have `reasoning_content` and `tool_calls`. A message with `"train": false`, or with weight 0 as
in OpenAI's fine-tuning files, is context without loss. `tools` may also be a JSON string, as tables store it. A broken
row is reported with its file and line, and the next one is read; a truncated file yields the rows before the
truncation.

A row of a table becomes what the same row in JSON Lines would be: a null field of a struct is a missing key, because a
table has every key in every row, and a JSON column is parsed. Nested fields that JSON cannot express, such as times,
are ignored like other unknown keys. The row format of a table is detected from its columns, in JSON Lines from each
line.

Memory is bounded: a Parquet page is checked by its header before it is decompressed, repeated text stays
dictionary-encoded until the size of its expansion is checked, and `unpack` limits that size.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from m2forge.corpus.read.extra import Arrow, arrow, parquet
from m2forge.corpus.read.file import checked_page_sizes
from m2forge.errors import DataError, FormatError
from m2forge.records import JsonValue
from m2forge.sft.compressed_file import READ_ERRORS, read_lines
from m2forge.sft.report import Problem, Rejection, Report, show
from m2forge.sft.row import ACCEPTED, REQUIRED, RowFormat, columns_of, detect_format, to_openai
from m2forge.sft.trajectory import Trajectory, check_order, sort_results
from m2forge.text.message import MAX_DOCUMENT_DEPTH, Message, Tool, message_from_openai, parse_json, tool_from_openai
from m2forge.unpack import UnpackConfig, Unpacked, UnpackError

if TYPE_CHECKING:
    from pyarrow import Array, DataType, RecordBatch, Schema

ROLES = ("system", "developer", "user", "assistant", "tool")


def read_jsonl(
    path: Path, report: Report, config: UnpackConfig | None = None, row_format: RowFormat | None = None
) -> Iterator[Trajectory]:
    """The trajectories of one file, in order. `config`: limits on decompression. `row_format`: that of all lines; None:
    each line's is detected."""
    config = config or UnpackConfig()
    number = 0
    try:
        for line in read_lines(path, config):
            number += 1
            location = f"{path}:{number}"
            try:
                if line is None:
                    raise Rejection(
                        Problem.TOO_LARGE, location, f"over unpack.max_line_bytes = {config.max_line_bytes}"
                    )
                if not (line := line.strip()):
                    continue
                row = to_openai(parse_object(line, location), location, row_format)
                trajectory = trajectory_from_openai(row, location)
            except Rejection as rejection:
                report.add_problem(rejection)
                continue
            yield trajectory
    except UnpackError as error:
        report.add_problem(Rejection(Problem.TOO_LARGE, f"{path}:{number + 1}", f"{error}; the lines before it stand"))
    except READ_ERRORS as error:
        report.add_problem(Rejection(Problem.TRUNCATED, f"{path}:{number + 1}", f"{error}; the lines before it stand"))


def trajectory_from_openai(data: Mapping[str, JsonValue], location: str) -> Trajectory:
    """Raises `Rejection` with the kind of problem."""
    items = data.get("messages")
    if items is None:
        _reject(Problem.MISSING_KEY, location, f"no 'messages' among the keys {', '.join(data) or '(none)'}")
    if not isinstance(items, list) or not items:
        _reject(Problem.BAD_VALUE, location, f"messages must be a list with messages in it, received {show(items)}")
    pairs = [_message(item, f"messages[{index}]", location) for index, item in enumerate(items)]
    messages = sort_results([message for message, _ in pairs])
    try:
        check_order(messages)
    except FormatError as error:
        raise Rejection(Problem.BAD_ORDER, location, str(error)) from error
    return Trajectory(
        messages, tools_from_openai(data.get("tools"), location), tuple(flag for _, flag in pairs), location
    )


def tools_from_openai(items: JsonValue, location: str, name: str = "tools") -> tuple[Tool, ...]:
    if isinstance(items, str):
        try:
            items = parse_json(items) if items.strip() else []
        except ValueError as error:
            raise Rejection(Problem.BROKEN_JSON, location, f"{name} is text that is not JSON ({error})") from error
    if items is None:
        return ()
    if not isinstance(items, list):
        _reject(Problem.BAD_VALUE, location, f"{name} must be a list, received {show(items)}")
    tools = []
    for index, item in enumerate(items):
        if not isinstance(item, Mapping):
            _reject(Problem.BAD_VALUE, location, f"{name}[{index}] must be an object, received {show(item)}")
        try:
            tools.append(tool_from_openai(item))
        except FormatError as error:
            raise Rejection(Problem.BAD_VALUE, location, f"{name}[{index}]: {error}") from error
    return tuple(tools)


def parse_object(data: bytes, location: str) -> Mapping[str, JsonValue]:
    """Parse one JSON object from UTF-8 bytes; rejects values that UTF-8 or JSON cannot represent, and deep nesting."""
    try:
        value = parse_json(data.decode("utf-8-sig"), MAX_DOCUMENT_DEPTH)
    except json.JSONDecodeError as error:
        raise Rejection(Problem.BROKEN_JSON, location, f"{error.msg} at column {error.colno}") from error
    except ValueError as error:
        raise Rejection(Problem.BROKEN_JSON, location, str(error)) from error
    if not isinstance(value, Mapping):
        _reject(Problem.BAD_VALUE, location, f"expected an object, received {show(value)}")
    return value


def _message(item: JsonValue, name: str, location: str) -> tuple[Message, bool]:
    """The message, and whether it is trained."""
    if not isinstance(item, Mapping):
        _reject(Problem.BAD_VALUE, location, f"{name} must be an object, received {show(item)}")
    if "role" not in item:
        _reject(Problem.MISSING_KEY, location, f"{name} has no 'role'")
    if item["role"] not in ROLES:
        _reject(Problem.BAD_ROLE, location, f"{name}: {show(item['role'])}; use one of {', '.join(ROLES)}")
    _check_arguments(item.get("tool_calls"), name, location)
    trained = _trained(item, name, location)
    try:
        return message_from_openai({key: item[key] for key in item if key not in ("train", "weight")}), trained
    except FormatError as error:
        raise Rejection(Problem.BAD_VALUE, location, f"{name}: {error}") from error


def _check_arguments(calls: JsonValue, name: str, location: str) -> None:
    for index, call in enumerate(calls if isinstance(calls, list) else ()):
        function = call.get("function", call) if isinstance(call, Mapping) else None
        arguments = function.get("arguments") if isinstance(function, Mapping) else None
        if isinstance(arguments, str) and arguments.strip():
            try:
                arguments = parse_json(arguments)
            except ValueError as error:
                what = f"{name}.tool_calls[{index}]: {show(arguments)} ({error})"
                raise Rejection(Problem.BAD_ARGUMENTS, location, what) from error
        if arguments not in (None, "") and not isinstance(arguments, Mapping):
            _reject(Problem.BAD_ARGUMENTS, location, f"{name}.tool_calls[{index}]: {show(arguments)}")


def _trained(item: Mapping[str, JsonValue], name: str, location: str) -> bool:
    # Tables write null for missing values.
    train = True if item.get("train") is None else item["train"]
    weight = 1 if item.get("weight") is None else item["weight"]
    if not isinstance(train, bool):
        _reject(Problem.BAD_VALUE, location, f"{name}.train must be true or false, received {show(train)}")
    if weight not in (0, 1):
        _reject(Problem.BAD_VALUE, location, f"{name}.weight must be 0 or 1, received {show(weight)}")
    return train and bool(weight)


def _reject(problem: Problem, location: str, what: str) -> NoReturn:
    raise Rejection(problem, location, what)


# -- tables -----------------------------------------------------------------------------------------------------------

_BATCH_ROWS, _BATCH_BYTES = 256, 64 << 20
_VALUE_BYTES = 8
"""Minimum size that a value counts for: millions of empty ones take only a few bytes in a file."""
_NEEDED = frozenset(
    (
        "role",
        "content",
        "from",
        "value",
        "reasoning",
        "reasoning_content",
        "tool_calls",
        "function",
        "name",
        "arguments",
    )
)
"""Fields of a message that may not be ignored."""


def read_parquet(
    path: Path, report: Report, config: UnpackConfig, row_format: RowFormat | None = None
) -> Iterator[Trajectory]:
    library = parquet()
    try:
        with library.ParquetFile(path) as file:
            rows = _Rows.open(path, file.schema_arrow, report, config, row_format)
            metadata = file.metadata
        leaves = [metadata.schema.column(index) for index in range(len(metadata.schema))]
        texts = [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]
        with library.ParquetFile(path, read_dictionary=texts) as file:
            for group in range(metadata.num_row_groups):
                sizes = checked_page_sizes(path, metadata.row_group(group), rows.columns, rows.unpacked)
                batch_rows = max(1, min(_BATCH_ROWS, _BATCH_BYTES // max(1, *sizes)))
                for batch in file.iter_batches(batch_rows, row_groups=[group], columns=rows.columns):
                    yield from rows.read(batch)
    except UnpackError as error:
        report.add_problem(Rejection(Problem.TOO_LARGE, str(path), f"{error}; the rows before it stand"))
    except library.errors as error:
        report.add_problem(Rejection(Problem.TRUNCATED, str(path), f"{_first_line(error)}; the rows before it stand"))


def read_arrow(
    path: Path, report: Report, config: UnpackConfig, row_format: RowFormat | None = None
) -> Iterator[Trajectory]:
    library = arrow()
    try:
        with library.open_stream(str(path)) as stream:
            rows = _Rows.open(path, stream.schema, report, config, row_format)
            for full_batch in stream:
                batch = full_batch.select(rows.columns)
                # The library maps the file as it is: offsets of a broken one may point anywhere.
                batch.validate(full=True)
                for start in range(0, batch.num_rows, _BATCH_ROWS):
                    yield from rows.read(batch.slice(start, _BATCH_ROWS))
    except UnpackError as error:
        report.add_problem(Rejection(Problem.TOO_LARGE, str(path), f"{error}; the rows before it stand"))
    except library.errors as error:
        report.add_problem(Rejection(Problem.TRUNCATED, str(path), f"{_first_line(error)}; the rows before it stand"))


@dataclass
class _Rows:
    """Converts the batches of one file."""

    path: Path
    row_format: RowFormat
    columns: list[str]
    """Columns that the format reads."""
    report: Report
    config: UnpackConfig
    unpacked: Unpacked
    library: Arrow
    num_read: int = 0

    @classmethod
    def open(
        cls, path: Path, schema: "Schema", report: Report, config: UnpackConfig, row_format: RowFormat | None
    ) -> "_Rows":
        """Raises `DataError` if the file has none of the known formats, or not the requested one."""
        names = list(schema.names)
        found = detect_format(names) if row_format is None else row_format
        if found is None:
            raise DataError(
                f"{path}: columns {', '.join(names) or '(none)'} are no known row format; accepted are {ACCEPTED}"
            )
        if not any(all(name in names for name in needed) for needed in REQUIRED[found]):
            needed = " or ".join(", ".join(alternative) for alternative in REQUIRED[found])
            raise DataError(f"{path}: row format {found} needs the columns {needed}, found {', '.join(names)}")
        columns = [name for name in names if name in columns_of(found)]
        if len(set(columns)) < len(columns):
            raise DataError(f"{path}: columns {', '.join(columns)} occur more than once; rename the copies")
        library = arrow()
        for name in columns:
            _check_type(library, schema.field(name).type, f"{path}: {name}", is_needed=True)
        return cls(path, found, columns, report, config, Unpacked(path, config), library)

    def read(self, batch: "RecordBatch") -> Iterator[Trajectory]:
        size = sum(_expanded_bytes(self.library, column) for column in batch.columns)
        self.unpacked.add(size)
        for index in range(batch.num_rows):
            self.num_read += 1
            location = f"{self.path}:row {self.num_read}"
            try:
                if size > self.config.max_line_bytes:
                    self._refuse_large(batch.slice(index, 1), location)
                row = {name: self._value(batch, name, index, location) for name in self.columns}
                trajectory = trajectory_from_openai(to_openai(row, location, self.row_format), location)
            except Rejection as rejection:
                self.report.add_problem(rejection)
                continue
            yield trajectory

    def _value(self, batch: "RecordBatch", name: str, index: int, location: str) -> JsonValue:
        column = batch.column(name)
        try:
            return _to_json(self.library, column[index].as_py(), column.type)
        except UnicodeDecodeError as error:
            raise Rejection(Problem.BROKEN_JSON, location, f"{name} is not UTF-8 ({error.reason})") from error
        except ValueError as error:
            raise Rejection(Problem.BROKEN_JSON, location, f"{name}: {error}") from error

    def _refuse_large(self, row: "RecordBatch", location: str) -> None:
        if sum(_expanded_bytes(self.library, column) for column in row.columns) > self.config.max_line_bytes:
            limit = self.config.max_line_bytes
            raise Rejection(Problem.TOO_LARGE, location, f"over unpack.max_line_bytes = {limit}")


def _check_type(library: Arrow, kind: "DataType", name: str, *, is_needed: bool) -> None:
    """Raise if a column is stored in a way that this reader cannot bound, or JSON cannot express what is needed."""
    types = library.types
    if types.is_struct(kind):
        for field in kind:
            _check_type(library, field.type, f"{name}.{field.name}", is_needed=field.name in _NEEDED)
    elif _is_list(library, kind):
        _check_type(library, kind.value_type, f"{name}[]", is_needed=is_needed)
    elif not _is_json_leaf(library, kind) and (is_needed or not _is_ignored(library, kind)):
        raise DataError(f"{name} is stored as {kind}; write it as text, numbers, lists and structs")


def _is_list(library: Arrow, kind: "DataType") -> bool:
    types = library.types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _is_text(library: Arrow, kind: "DataType") -> bool:
    return bool(library.types.is_string(kind) or library.types.is_large_string(kind))


def _is_json_column(kind: "DataType") -> bool:
    """Whether it is Arrow's extension type for JSON text."""
    return getattr(kind, "extension_name", "") == "arrow.json"


def _is_json_leaf(library: Arrow, kind: "DataType") -> bool:
    types = library.types
    if types.is_dictionary(kind):
        return _is_text(library, kind.value_type)
    is_number = types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind) or types.is_null(kind)
    return bool(is_number or _is_text(library, kind) or _is_json_column(kind))


def _is_ignored(library: Arrow, kind: "DataType") -> bool:
    """Whether a value has no JSON form but a bounded size."""
    types = library.types
    if types.is_dictionary(kind):
        return _is_ignored(library, kind.value_type)
    return bool(
        types.is_temporal(kind) or types.is_decimal(kind) or types.is_binary(kind) or types.is_large_binary(kind)
    )


def _expanded_bytes(library: Arrow, array: "Array") -> int:
    """Bytes that the values take once dictionaries are expanded, at least `_VALUE_BYTES` each."""
    kind, types, compute = array.type, library.types, library.compute
    if _is_json_column(kind):
        return _expanded_bytes(library, array.storage)
    size = _VALUE_BYTES * len(array)
    if types.is_struct(kind):
        return size + sum(_expanded_bytes(library, array.field(index)) for index in range(kind.num_fields))
    if _is_list(library, kind):
        return size + _expanded_bytes(library, array.flatten())
    if types.is_dictionary(kind):
        lengths = compute.binary_length(array.dictionary).take(array.indices)
        return size + int(compute.sum(lengths).as_py() or 0)
    if _is_text(library, kind) or types.is_binary(kind) or types.is_large_binary(kind):
        return size + int(compute.sum(compute.binary_length(array)).as_py() or 0)
    return size


def _to_json(library: Arrow, value: object, kind: "DataType") -> JsonValue:
    """Raises ValueError for a number or a text that JSON cannot express."""
    types = library.types
    if value is None:
        return None
    if types.is_struct(kind) and isinstance(value, Mapping):
        fields = [field for field in kind if value[field.name] is not None and not _is_ignored(library, field.type)]
        return {field.name: _to_json(library, value[field.name], field.type) for field in fields}
    if _is_list(library, kind) and isinstance(value, list):
        return [_to_json(library, item, kind.value_type) for item in value]
    if _is_json_column(kind) and isinstance(value, str):
        return parse_json(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is not a JSON number")
    if isinstance(value, str | bool | int | float):
        return value
    raise ValueError(f"a value of type {kind} has no JSON form")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
