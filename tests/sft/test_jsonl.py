"""JSONL of OpenAI-style messages: what is read, and what a broken line says about itself."""

import copy
import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest

from m2forge.records import JsonValue
from m2forge.sft.report import Problem, Report
from m2forge.sft.row_file import read_jsonl
from m2forge.text.message import Message, ToolCall
from tests.sft.sample import ADD, GOOD, noise, write_lines


def changed(**messages: dict[str, Any]) -> dict[str, Any]:
    """GOOD with keys of single messages replaced: `m2={"role": "robot"}`."""
    item: dict[str, Any] = copy.deepcopy(GOOD)
    for name, keys in messages.items():
        item["messages"][int(name[1:])].update(keys)
    return item


def call(arguments: object) -> dict[str, Any]:
    return {"tool_calls": [{"id": "c1", "function": {"name": "add", "arguments": arguments}}]}


def test_a_line_becomes_messages_with_thinking_calls_and_tools(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [GOOD])
    report = Report()
    (trajectory,) = read_jsonl(path, report)
    assert trajectory.messages == (
        Message("system", "Be brief."),
        Message("user", "1 + 2?"),
        Message("assistant", thinking="Add them.", tool_calls=(ToolCall("add", {"a": 1, "b": 2}, "c1"),)),
        Message("tool", "3", tool_call_id="c1"),
        Message("assistant", "3", thinking="It says 3."),
    )
    assert [tool.parameters for tool in trajectory.tools] == [ADD.parameters]
    assert trajectory.trained == (True,) * 5
    assert trajectory.source == f"{path}:1"
    assert not report.problems


def test_messages_may_ask_for_no_loss(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [changed(m2={"train": False}), changed(m4={"weight": 0})])
    first, second = read_jsonl(path, Report())
    assert first.trained == (True, True, False, True, True)
    assert second.trained == (True, True, True, True, False)
    nulls = write_lines(tmp_path / "nulls.jsonl", [changed(m2={"train": None, "weight": None})])
    (trajectory,) = read_jsonl(nulls, Report())
    assert trajectory.trained == (True,) * 5


def test_results_are_put_in_the_order_of_their_calls(tmp_path: Path) -> None:
    calls: JsonValue = [{"id": name, "function": {"name": "add", "arguments": {}}} for name in ("c1", "c2", "c3")]
    results: list[JsonValue] = [{"role": "tool", "tool_call_id": name, "content": name} for name in ("c3", "c1", "c2")]
    messages: JsonValue = [{"role": "user", "content": "go"}, {"role": "assistant", "tool_calls": calls}, *results]
    (trajectory,) = read_jsonl(write_lines(tmp_path / "a.jsonl", [{"messages": messages}]), Report())
    assert [message.content for message in trajectory.messages] == ["go", "", "c1", "c2", "c3"]


def test_tools_may_be_json_text_and_blank_lines_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    line = json.dumps({**GOOD, "tools": json.dumps(GOOD["tools"])})
    path.write_bytes(b"\xef\xbb\xbf" + f"{line}\n\n  \n{line}\n".encode())
    report = Report()
    first, second = read_jsonl(path, report)
    assert [tool.name for tool in first.tools] == ["add"]
    assert second.source == f"{path}:4"
    assert not report.problems


BROKEN: list[tuple[object, Problem, str]] = [
    ('{"messages": [', Problem.BROKEN_JSON, "Expecting value"),
    ('{"messages": [NaN]}', Problem.BROKEN_JSON, "NaN is not a JSON number"),
    ("[" * 100_000, Problem.BROKEN_JSON, "nested deeper than 200"),
    ('{"messages": ' + "[" * 201 + "]" * 201 + "}", Problem.BROKEN_JSON, "nested deeper than 200"),
    (changed(m1={"content": "\ud800"}), Problem.BROKEN_JSON, "surrogates not allowed"),
    ("[1, 2]", Problem.BAD_VALUE, "expected an object, received [1, 2]"),
    ({"tools": []}, Problem.MISSING_KEY, "no 'messages' among the keys tools"),
    ({"messages": []}, Problem.BAD_VALUE, "received []"),
    ({"messages": ["hello"]}, Problem.BAD_VALUE, 'messages[0] must be an object, received "hello"'),
    ({"messages": [{"content": "x"}]}, Problem.MISSING_KEY, "messages[0] has no 'role'"),
    (changed(m2={"role": "robot"}), Problem.BAD_ROLE, 'messages[2]: "robot"; use one of system'),
    (changed(m2={"role": ["user"]}), Problem.BAD_ROLE, '["user"]'),
    (changed(m1={"content": 3}), Problem.BAD_VALUE, "messages[1]"),
    (changed(m2=call("{a: 1}")), Problem.BAD_ARGUMENTS, 'messages[2].tool_calls[0]: "{a: 1}"'),
    (changed(m2=call("[1]")), Problem.BAD_ARGUMENTS, "messages[2].tool_calls[0]: [1]"),
    (changed(m2=call(7)), Problem.BAD_ARGUMENTS, "messages[2].tool_calls[0]: 7"),
    (changed(m2={"train": "no"}), Problem.BAD_VALUE, 'messages[2].train must be true or false, received "no"'),
    (changed(m2={"weight": 0.5}), Problem.BAD_VALUE, "messages[2].weight must be 0 or 1, received 0.5"),
    (changed(m2={"tool_calls": None}), Problem.BAD_ORDER, "messages[3] is a tool result, but no call of the last"),
    (
        changed(m3={"tool_call_id": "c9"}),
        Problem.BAD_ORDER,
        "messages[3] answers call 'c9'; the calls without a result are c1",
    ),
    ({"messages": [{"role": "user", "content": "x"}]}, Problem.BAD_ORDER, "none of the 1 messages"),
    ({**GOOD, "tools": {"name": "add"}}, Problem.BAD_VALUE, "tools must be a list"),
    ({**GOOD, "tools": ["add"]}, Problem.BAD_VALUE, "tools[0] must be an object"),
    ({**GOOD, "tools": [{"type": "function"}]}, Problem.BAD_VALUE, "tools[0]"),
    ({**GOOD, "tools": "[{"}, Problem.BROKEN_JSON, "tools is text that is not JSON"),
    ({**GOOD, "tools": "[" * 50_000}, Problem.BROKEN_JSON, "tools is text that is not JSON (nested deeper"),
    (
        {**GOOD, "tools": '[{"name": "f", "parameters": {"maximum": 1e999}}]'},
        Problem.BROKEN_JSON,
        "1e999 is not a JSON",
    ),
    (changed(m2=call('{"a":' * 50_000)), Problem.BAD_ARGUMENTS, "nested deeper than 100"),
    (changed(m2=call('{"a": 1e999}')), Problem.BAD_ARGUMENTS, "1e999 is not a JSON number"),
]


@pytest.mark.parametrize(("line", "problem", "what"), BROKEN)
def test_a_broken_line_is_reported_with_its_number_and_skipped(
    tmp_path: Path, line: dict[str, Any] | str, problem: Problem, what: str
) -> None:
    path = write_lines(tmp_path / "a.jsonl", [GOOD, line, GOOD])
    report = Report()
    assert [trajectory.source for trajectory in read_jsonl(path, report)] == [f"{path}:1", f"{path}:3"]
    assert report.num_problems == report.count(problem) == 1
    (place,) = report.problems[problem].places
    assert place.startswith(f"{path}:2: ")
    assert what in place


def test_bytes_that_are_no_text_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"messages": "\xff"}\n' + json.dumps(GOOD).encode())
    report = Report()
    assert len(list(read_jsonl(path, report))) == 1
    assert report.problems[Problem.BROKEN_JSON].places[0].startswith(f"{path}:1: ")


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_truncated_archive_yields_the_lines_before_its_end(tmp_path: Path, suffix: str) -> None:
    item = {**GOOD, "noise": noise(2000)}
    lines = [json.dumps({**item, "number": number}) + "\n" for number in range(500)]
    plain = "".join(lines).encode()
    data = gzip.compress(plain) if suffix == ".gz" else pyarrow.compress(plain, codec="zstd", asbytes=True)
    whole, torn = tmp_path / f"whole.jsonl{suffix}", tmp_path / f"torn.jsonl{suffix}"
    whole.write_bytes(data)
    torn.write_bytes(data[: len(data) * 3 // 4])

    report = Report()
    assert len(list(read_jsonl(whole, report))) == 500
    assert not report.problems

    num_read = len(list(read_jsonl(torn, report)))
    assert 0 < num_read < 500
    assert report.num_problems == 1
    assert report.problems[Problem.TRUNCATED].places[0].startswith(f"{torn}:{num_read + 1}: ")


def test_a_file_that_is_no_archive_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(b"plain text")
    report = Report()
    assert not list(read_jsonl(path, report))
    assert report.problems[Problem.TRUNCATED].places[0].startswith(f"{path}:1: ")
