"""Tools that a loop can run, and what becomes of a call: a result, whatever goes wrong.

A call of a tool that is not there, with arguments that its schema does not take, or that fails or takes too long, gets
a result that says so, because the model can do better only if it is told.
"""

import asyncio
from collections.abc import Mapping
from typing import Protocol

from m2forge.errors import suggest
from m2forge.records import JsonValue
from m2forge.text.argument import argument_problems, type_problem
from m2forge.text.message import Message, Tool, ToolCall


class ToolRunner(Protocol):
    tool: Tool
    """Name, description and schema, as the model is shown them."""
    is_timed: bool
    """Whether it is ended by the loop's limit of time; else it sees to that itself."""

    async def run(self, arguments: Mapping[str, JsonValue]) -> str:
        """What the model is told. Arguments follow the schema; an exception is told as well."""
        ...


async def answer_call(
    call: ToolCall, runners: Mapping[str, ToolRunner], *, timeout_s: float, max_chars: int
) -> Message:
    """The result of a call. Only cancelling gets through."""
    runner = runners.get(call.name)
    if runner is None:
        return _result(call, f"error: there is no tool {call.name!r}; {suggest(call.name, runners)}", max_chars)
    if problems := call_problems(call, runner.tool):
        return _result(call, f"error: {call.name} was not called: {'; '.join(problems)}", max_chars)
    try:
        async with asyncio.timeout(timeout_s if runner.is_timed else None) as limit:
            text = await runner.run(call.arguments)
    except Exception as error:  # noqa: BLE001  (one tool's failure is kept from the rest)
        is_late = limit.expired() and isinstance(error, TimeoutError)
        text = f"{call.name} did not end within {timeout_s:g} s" if is_late else f"{type(error).__name__}: {error}"
        text = f"error: {text}"
    return _result(call, text, max_chars)


def call_problems(call: ToolCall, tool: Tool) -> list[str]:
    """What is wrong with a call's arguments."""
    problems = argument_problems(call.arguments, tool)
    typed = (type_problem(value, name, tool) for name, value in call.arguments.items())
    return [*problems, *(problem for problem in typed if problem is not None)]


def _result(call: ToolCall, text: str, max_chars: int) -> Message:
    if len(text) > max_chars:
        half = max_chars // 2
        text = f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[len(text) - half :]}"
    return Message("tool", text.encode(errors="replace").decode(), tool_call_id=call.id)
