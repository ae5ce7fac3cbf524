"""Tools that a loop can run. Every call gets a result, whatever goes wrong.

A call that names an unknown tool, has arguments that do not match the schema, fails, or times out gets a result that
says so, so that the model can correct itself.
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
    """Name, description and schema, as the model sees them."""
    is_timed: bool
    """Whether the loop applies its tool timeout; if False, the tool handles its own."""

    async def run(self, arguments: Mapping[str, JsonValue]) -> str:
        """The result for the model. Arguments match the schema; an exception becomes an error result."""
        ...


async def answer_call(
    call: ToolCall, runners: Mapping[str, ToolRunner], *, timeout_s: float, max_chars: int
) -> Message:
    """The result of a call; raises nothing but cancellation."""
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
    """Problems of a call's arguments."""
    problems = argument_problems(call.arguments, tool)
    typed = (type_problem(value, name, tool) for name, value in call.arguments.items())
    return [*problems, *(problem for problem in typed if problem is not None)]


def _result(call: ToolCall, text: str, max_chars: int) -> Message:
    if len(text) > max_chars:
        half = max_chars // 2
        text = f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[len(text) - half :]}"
    return Message("tool", text.encode(errors="replace").decode(), tool_call_id=call.id)
