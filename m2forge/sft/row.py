"""One row of a dataset in, OpenAI-style `{"messages": […], "tools": […]}` out, for each row format that datasets use.

    messages            messages, tools                      OpenAI's own, with `reasoning` or `reasoning_content`
    sharegpt            conversations (or conversation), system, tools
                                                             turns of `from` and `value`, or of `role` and `content`
    alpaca              instruction, input, output, system   one request and one answer
    prompt_completion   prompt, completion, tools            text, or lists of messages; the prompt carries no loss

A row may have other columns; they are ignored. Values that are null count as missing, because tables have a value for
every column.
"""

from collections.abc import Collection, Mapping
from typing import Literal, NoReturn, TypeAlias

from m2forge.records import JsonValue
from m2forge.sft.report import Problem, Rejection, show
from m2forge.text.message import parse_json

RowFormat: TypeAlias = Literal["messages", "sharegpt", "alpaca", "prompt_completion"]
Row: TypeAlias = Mapping[str, JsonValue]

REQUIRED: dict[RowFormat, tuple[tuple[str, ...], ...]] = {
    "messages": (("messages",),),
    "sharegpt": (("conversations",), ("conversation",)),
    "alpaca": (("instruction", "output"),),
    "prompt_completion": (("prompt", "completion"),),
}
"""Columns by which each format is detected, in this order; one of the alternatives is enough."""
OPTIONAL: dict[RowFormat, tuple[str, ...]] = {
    "messages": ("tools",),
    "sharegpt": ("system", "tools"),
    "alpaca": ("input", "system"),
    "prompt_completion": ("tools",),
}
ACCEPTED = "messages; conversations; instruction, output (and input, system); prompt, completion"
"""The formats, by their columns, for error messages."""
_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
"""ShareGPT's names of the speakers → roles. The value of a function_call is the JSON of its calls."""


def detect_format(columns: Collection[str]) -> RowFormat | None:
    for row_format, alternatives in REQUIRED.items():
        if any(all(name in columns for name in names) for names in alternatives):
            return row_format
    return None


def columns_of(row_format: RowFormat) -> set[str]:
    """All columns that a format reads."""
    return {name for names in REQUIRED[row_format] for name in names} | set(OPTIONAL[row_format])


def to_openai(row: Row, location: str, row_format: RowFormat | None = None) -> Row:
    """Raises `Rejection` if the row is not of the format; None: of any."""
    if row_format is None:
        row_format = detect_format([name for name, value in row.items() if value is not None])
        if row_format is None and row.get("messages") is None:
            keys = ", ".join(row) or "(none)"
            _reject(Problem.MISSING_KEY, location, f"no 'messages' among the keys {keys}; accepted are {ACCEPTED}")
    match row_format:
        case "sharegpt":
            return _from_sharegpt(row, location)
        case "alpaca":
            return _from_alpaca(row, location)
        case "prompt_completion":
            return _from_prompt(row, location)
        case _:
            return row


def _from_sharegpt(row: Row, location: str) -> Row:
    name = "conversations" if row.get("conversations") is not None else "conversation"
    turns = row.get(name)
    if turns is None:
        _reject(Problem.MISSING_KEY, location, f"no 'conversations' among the keys {', '.join(row)}")
    if not isinstance(turns, list):
        _reject(Problem.BAD_VALUE, location, f"{name} must be a list of turns, received {show(turns)}")
    messages = [_turn(turn, f"{name}[{index}]", location) for index, turn in enumerate(turns)]
    return {"messages": [*_system(row, location), *messages], "tools": row.get("tools")}


def _turn(turn: JsonValue, name: str, location: str) -> JsonValue:
    if not isinstance(turn, Mapping):
        _reject(Problem.BAD_VALUE, location, f"{name} must be an object, received {show(turn)}")
    if turn.get("from") is None:
        if turn.get("role") is None:
            _reject(Problem.MISSING_KEY, location, f"{name} has neither 'from' nor 'role'")
        return turn
    speaker, value = turn["from"], turn.get("value")
    role = _ROLES.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        _reject(Problem.BAD_ROLE, location, f"{name}: {show(speaker)}; use one of {', '.join(_ROLES)}")
    if not isinstance(value, str):
        _reject(Problem.BAD_VALUE, location, f"{name}.value must be text, received {show(value)}")
    flags = {key: turn[key] for key in ("train", "weight") if key in turn}
    if speaker == "function_call":
        return {"role": role, "tool_calls": _calls(value, name, location), **flags}
    return {"role": role, "content": value, **flags}


def _calls(text: str, name: str, location: str) -> JsonValue:
    try:
        calls = parse_json(text)
    except ValueError as error:
        raise Rejection(Problem.BAD_ARGUMENTS, location, f"{name}.value: {show(text)} ({error})") from error
    return calls if isinstance(calls, list) else [calls]


def _from_alpaca(row: Row, location: str) -> Row:
    request, context, answer = (_text(row, key, location) for key in ("instruction", "input", "output"))
    content = f"{request}\n\n{context}" if context else request
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
    return {"messages": [*_system(row, location), *messages]}


def _from_prompt(row: Row, location: str) -> Row:
    prompt, completion = row.get("prompt"), row.get("completion")
    if isinstance(prompt, list) and isinstance(completion, list):
        context = [{**message, "train": False} if isinstance(message, Mapping) else message for message in prompt]
        return {"messages": [*context, *completion], "tools": row.get("tools")}
    texts = [_text(row, key, location) for key in ("prompt", "completion")]
    messages = [{"role": role, "content": text} for role, text in zip(("user", "assistant"), texts, strict=True)]
    return {"messages": messages, "tools": row.get("tools")}


def _system(row: Row, location: str) -> list[JsonValue]:
    text = _text(row, "system", location)
    return [{"role": "system", "content": text}] if text else []


def _text(row: Row, key: str, location: str) -> str:
    """A column of text; optional ones may be missing."""
    value = row.get(key)
    if value is None and key in ("input", "system"):
        return ""
    if value is None:
        _reject(Problem.MISSING_KEY, location, f"no {key!r} among the keys {', '.join(row)}")
    if not isinstance(value, str):
        _reject(Problem.BAD_VALUE, location, f"{key} must be text, received {show(value)}")
    return value


def _reject(problem: Problem, location: str, what: str) -> NoReturn:
    raise Rejection(problem, location, what)
