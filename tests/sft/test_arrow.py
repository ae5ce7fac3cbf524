"""Tables: a row is what it would be in JSONL, and no file, however made, fills the memory or ends the run."""

import json
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from m2forge.errors import ConfigError, DataError
from m2forge.sft.encode import Encoded, encode
from m2forge.sft.report import Problem, Report
from m2forge.sft.row import RowFormat
from m2forge.sft.row_file import read_arrow, read_jsonl, read_parquet
from m2forge.sft.trajectory import Trajectory
from m2forge.text.message import message_to_openai, tool_to_openai
from m2forge.unpack import UnpackConfig
from tests.sft.sample import GOOD, chat_format, trajectories, write_lines

Rows = Sequence[dict[str, Any]]


def write_arrow(path: Path, table: pa.Table, chunk_rows: int = 3) -> Path:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=chunk_rows)
    return path


def write_parquet(path: Path, table: pa.Table, **options: Any) -> Path:
    pq.write_table(table, path, **{"row_group_size": 3} | options)
    return path


def read(path: Path, report: Report | None = None, row_format: RowFormat | None = None) -> list[Trajectory]:
    reader = read_parquet if path.suffix == ".parquet" else read_arrow
    return list(reader(path, report or Report(), UnpackConfig(), row_format))


def encoded(found: Sequence[Trajectory]) -> list[tuple[list[int], list[bool]]]:
    results = [encode(trajectory, chat_format(), 4096) for trajectory in found]
    return [(result.ids.tolist(), result.trained.tolist()) for result in results if isinstance(result, Encoded)]


def to_row(trajectory: Trajectory) -> dict[str, Any]:
    messages = [
        message_to_openai(message) | {"train": trained}
        for message, trained in zip(trajectory.messages, trajectory.trained, strict=True)
    ]
    return {"messages": messages, "tools": [tool_to_openai(tool) for tool in trajectory.tools]}


def to_sharegpt(row: dict[str, Any]) -> dict[str, Any]:
    names = {"system": "system", "user": "human", "assistant": "gpt", "tool": "tool"}
    return {"conversations": [{"from": names[m["role"]], "value": m["content"]} for m in row["messages"]]}


def to_alpaca(row: dict[str, Any]) -> dict[str, Any]:
    texts = [message["content"] for message in row["messages"]]
    return {"instruction": texts[0], "input": texts[1] if len(texts) > 1 else None, "output": texts[-1]}


def to_prompt(row: dict[str, Any]) -> dict[str, Any]:
    return {"prompt": row["messages"][:-1], "completion": row["messages"][-1:], "tools": row["tools"]}


@given(
    st.lists(trajectories(), min_size=1, max_size=7),
    st.sampled_from([lambda row: row, to_sharegpt, to_alpaca, to_prompt]),
    st.booleans(),
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_same_rows_give_the_same_tokens(
    tmp_path: Path, drawn: list[Trajectory], convert: Callable[[dict[str, Any]], dict[str, Any]], as_text: bool
) -> None:
    """JSONL, Parquet and Arrow, with arguments and tools as JSON text or as structs with a null for missing keys."""
    rows = [convert(to_row(trajectory)) for trajectory in drawn]
    if not as_text:
        for row in rows:
            for message in [*(row.get("messages") or []), *(row.get("prompt") or []), *(row.get("completion") or [])]:
                for call in message.get("tool_calls", ()):
                    call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    report = Report()
    expected = list(read_jsonl(write_lines(tmp_path / "a.jsonl", rows), report))
    table = pa.Table.from_pylist(rows)
    for path in (write_parquet(tmp_path / "a.parquet", table), write_arrow(tmp_path / "a.arrow", table)):
        other = Report()
        found = read(path, other)
        assert [(t.messages, t.tools, t.trained) for t in found] == [(t.messages, t.tools, t.trained) for t in expected]
        assert encoded(found) == encoded(expected)
        counts = [{kind: finding.count for kind, finding in r.problems.items()} for r in (other, report)]
        assert counts[0] == counts[1]


def test_keys_that_other_rows_have_are_missing_not_null(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {
            "messages": [
                {"role": "user", "content": "go"},
                {"role": "assistant", "content": "", "tool_calls": [{"name": name, "arguments": arguments}]},
            ],
            "tools": [{"name": name, "parameters": {"type": "object", "properties": properties}}],
        }
        for name, arguments, properties in (
            ("add", {"a": 1, "to": {"b": 2}}, {"a": {"type": "integer"}}),
            ("read", {"path": "x", "to": {"c": "d"}}, {"path": {"type": "string"}}),
        )
    ]
    expected = list(read_jsonl(write_lines(tmp_path / "a.jsonl", rows), Report()))
    assert [t.messages[1].tool_calls[0].arguments for t in expected] == [
        {"a": 1, "to": {"b": 2}},
        {"path": "x", "to": {"c": "d"}},
    ]
    table = pa.Table.from_pylist(rows)
    for path in (write_parquet(tmp_path / "a.parquet", table), write_arrow(tmp_path / "a.arrow", table)):
        assert [(t.messages, t.tools) for t in read(path)] == [(t.messages, t.tools) for t in expected]


def test_rows_are_numbered_and_broken_ones_are_reported(tmp_path: Path) -> None:
    rows = [GOOD] * 4 + [{**GOOD, "messages": [{"role": "robot", "content": "x"}]}, GOOD, {**GOOD, "messages": None}]
    for path in (
        write_parquet(tmp_path / "a.parquet", pa.Table.from_pylist(rows)),
        write_arrow(tmp_path / "a.arrow", pa.Table.from_pylist(rows)),
    ):
        report = Report()
        assert [t.source for t in read(path, report)] == [f"{path}:row {number}" for number in (1, 2, 3, 4, 6)]
        assert report.problems[Problem.BAD_ROLE].places[0].startswith(f"{path}:row 5: messages[0]")
        assert report.problems[Problem.MISSING_KEY].places[0].startswith(f"{path}:row 7: ")


def test_an_unknown_schema_lists_columns_and_what_is_accepted(tmp_path: Path) -> None:
    table = pa.Table.from_pylist([{"text": "x", "score": 1}])
    for path in (write_parquet(tmp_path / "a.parquet", table), write_arrow(tmp_path / "a.arrow", table)):
        with pytest.raises(
            DataError, match=r"columns text, score are no known row format; accepted are messages; conv"
        ):
            read(path)
        with pytest.raises(
            DataError, match="row format alpaca needs the columns instruction, output, found text, score"
        ):
            read(path, row_format="alpaca")


def test_a_set_row_format_wins_over_detection(tmp_path: Path) -> None:
    row = {"messages": "a column of that name", "instruction": "2 + 3?", "output": "5"}
    path = write_parquet(tmp_path / "a.parquet", pa.Table.from_pylist([row]))
    (trajectory,) = read(path, row_format="alpaca")
    assert [message.content for message in trajectory.messages] == ["2 + 3?", "5"]
    lines = write_lines(tmp_path / "a.jsonl", [row])
    assert [t.messages for t in read_jsonl(lines, Report(), row_format="alpaca")] == [trajectory.messages]


def test_fields_that_json_lacks_are_ignored_unless_needed(tmp_path: Path) -> None:
    time = datetime(2026, 1, 1, tzinfo=UTC)
    messages = [{"role": "user", "content": "a", "time": time}, {"role": "assistant", "content": "b", "time": time}]
    (trajectory,) = read(write_arrow(tmp_path / "a.arrow", pa.Table.from_pylist([{"messages": messages}])))
    assert [message.content for message in trajectory.messages] == ["a", "b"]
    binary = pa.Table.from_pylist([{"messages": [{"role": "user", "content": b"a"}]}])
    with pytest.raises(DataError, match=r"messages\[\]\.content is stored as binary; write it as text"):
        read(write_parquet(tmp_path / "b.parquet", binary))


def test_json_columns_are_parsed(tmp_path: Path) -> None:
    tools = pa.ExtensionArray.from_storage(pa.json_(), pa.array([json.dumps(GOOD["tools"]), "["]))
    table = pa.table({"messages": pa.array([GOOD["messages"]] * 2), "tools": tools})
    for path in (write_parquet(tmp_path / "a.parquet", table), write_arrow(tmp_path / "a.arrow", table)):
        report = Report()
        (trajectory,) = read(path, report)
        assert [tool.name for tool in trajectory.tools] == ["add"]
        assert report.count(Problem.BROKEN_JSON) == 1


def repeated(text: str, num_copies: int) -> pa.Table:
    """One conversation of copies of one text, dictionary-encoded."""
    content = pa.DictionaryArray.from_arrays(pa.array(np.zeros(num_copies, np.int32)), pa.array([text]))
    messages = pa.StructArray.from_arrays([pa.array(["user"] * num_copies), content], ["role", "content"])
    return pa.table({"messages": pa.ListArray.from_arrays(pa.array([0, num_copies], pa.int32()), messages)})


def test_a_small_file_of_many_copies_is_not_expanded(tmp_path: Path) -> None:
    for path in (
        write_parquet(tmp_path / "a.parquet", repeated("x" * (1 << 20), 2000)),
        write_arrow(tmp_path / "a.arrow", repeated("x" * (1 << 20), 2000)),
    ):
        report, before = Report(), pa.total_allocated_bytes()
        # A pool of its own: the default one remembers the most that any test of this process allocated.
        default = pa.default_memory_pool()
        pool = pa.proxy_memory_pool(default)
        pa.set_memory_pool(pool)
        try:
            assert read(path, report) == []
        finally:
            pa.set_memory_pool(default)
        assert report.problems[Problem.TOO_LARGE].places[0].startswith(f"{path}: it unpacks to 2097")
        assert pa.total_allocated_bytes() == before
        assert (pool.max_memory() or 0) < 256 << 20


def test_a_row_over_the_limit_is_left_out(tmp_path: Path) -> None:
    large = {
        "messages": [{"role": "user", "content": "x" * 5000}, {"role": "assistant", "content": "y"}],
        "tools": None,
    }
    path = write_parquet(tmp_path / "a.parquet", pa.Table.from_pylist([{**GOOD}, large, {**GOOD}]))
    report = Report()
    assert len(list(read_parquet(path, report, UnpackConfig(max_line_bytes=4000)))) == 2
    assert report.problems[Problem.TOO_LARGE].places == [f"{path}:row 2: over unpack.max_line_bytes = 4000"]


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_a_torn_file_is_reported_and_ends_nothing(tmp_path: Path, suffix: str) -> None:
    table = pa.Table.from_pylist([GOOD] * 40)
    write = write_parquet if suffix == ".parquet" else write_arrow
    data = write(tmp_path / f"whole{suffix}", table).read_bytes()
    path = tmp_path / f"torn{suffix}"
    rng = np.random.default_rng(0)
    num_read = []
    for _ in range(100):
        broken = bytearray(data[: rng.integers(0, len(data))] if rng.random() < 0.5 else data)
        for place in rng.integers(0, max(1, len(broken)), 8).tolist():
            broken[place : place + 1] = rng.bytes(1)
        path.write_bytes(broken)
        report = Report()
        try:
            num_read.append(len(read(path, report)))
        except DataError:
            continue  # the names of its columns are gone
        assert num_read[-1] == 40 or report.num_problems
    assert min(num_read) < 40


def test_a_missing_library_is_named_with_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_parquet(tmp_path / "a.parquet", pa.Table.from_pylist([GOOD]))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"need pyarrow, which is missing: pip install 'm2forge\[corpus\]'"):
        read(path)
