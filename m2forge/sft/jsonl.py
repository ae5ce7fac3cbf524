"""Trajectories from JSON Lines: one OpenAI-style object `{"messages": [...], "tools": [...]}` per line, or a row of
another format (row.py).

Assistant messages may have `reasoning_content` and `tool_calls`. A message with `"train": false`, or with weight 0 as
in OpenAI's fine-tuning files, is context without loss. `tools` may also be a JSON string, as tables store it. A broken
line is reported with its file and line, and the next one is read; a truncated archive yields the lines before the
truncation.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NoReturn

from m2forge.errors import FormatError
from m2forge.records import JsonValue
from m2forge.sft.archive import READ_ERRORS, read_lines
from m2forge.sft.report import Problem, Rejection, Report, show
from m2forge.sft.row import RowFormat, to_openai
from m2forge.sft.trajectory import Trajectory, check_order, sort_results
from m2forge.text.message import MAX_DOCUMENT_DEPTH, Message, Tool, message_from_openai, parse_json, tool_from_openai
from m2forge.unpack import UnpackConfig, UnpackError

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
