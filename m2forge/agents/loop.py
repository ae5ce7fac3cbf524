"""The agent loop: request a completion, run its tool calls, append their results, until it answers without a call.

    operations that are due change the conversation
    the policy answers with thinking, content and calls; the conversation keeps all of it
    its calls run concurrently, up to a limit, and their results are appended in the order of the calls
    then operations that it called itself are applied

If an answer was cut off, or has neither content nor a call (a malformed call leaves neither), a user message says so
and the loop continues.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from m2forge.agents.config import WhiteBoxConfig
from m2forge.agents.context import Context
from m2forge.agents.operation import Operation
from m2forge.agents.tool import ToolRunner, answer_call, call_problems
from m2forge.protocols import AgentEnd
from m2forge.records import JsonValue
from m2forge.text.message import Message, ToolCall

CUT_OFF = "Your answer was cut off before it ended. Be brief: call a tool, or answer."
NOTHING = "You neither answered nor made a call that can be read. Call a tool in the form you were shown, or answer."
WILL_APPLY = "It is done after this turn."


@dataclass(frozen=True, slots=True)
class LoopResult:
    end: AgentEnd
    """FINISHED or OUT_OF_TURNS."""
    answer: str


class OperationTool:
    """See `ToolRunner`. An operation that the model calls; it is applied after all results of the turn are appended."""

    is_timed = True

    def __init__(self, operation: Operation) -> None:
        self.operation, self.tool = operation, operation.tool

    async def run(self, arguments: Mapping[str, JsonValue]) -> str:
        return WILL_APPLY


class Loop:
    def __init__(self, config: WhiteBoxConfig, runners: Sequence[ToolRunner], operations: Sequence[Operation]) -> None:
        """`operations`: applied automatically when due; the model calls operations through an `OperationTool`."""
        self._config, self._operations = config, tuple(operations)
        self._runners: Mapping[str, ToolRunner] = {runner.tool.name: runner for runner in runners}
        # One per loop: a sub-agent that waits for the slot held by its parent's call would deadlock.
        self._places = asyncio.Semaphore(config.max_parallel_calls)

    async def run(self, context: Context, max_turns: int) -> LoopResult:
        content = ""
        for _ in range(max_turns):
            await self._manage(context)
            reply = await context.ask()
            content = reply.message.content
            if reply.message.tool_calls:
                await self._act(context, reply.message.tool_calls)
            elif reply.is_cut:
                context.append(Message("user", CUT_OFF))
            elif content.strip():
                return LoopResult(AgentEnd.FINISHED, content)
            else:
                context.append(Message("user", NOTHING))
        return LoopResult(AgentEnd.OUT_OF_TURNS, content)

    async def _manage(self, context: Context) -> None:
        for operation in self._operations:
            view = context.view()
            if operation.is_due(view):
                context.apply(operation, await operation.prepare(view, context.ask_aside))

    async def _act(self, context: Context, calls: Sequence[ToolCall]) -> None:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._answer(call)) for call in calls]
        context.append(*(task.result() for task in tasks))
        for call in calls:
            runner = self._runners.get(call.name)
            if isinstance(runner, OperationTool) and not call_problems(call, runner.tool):
                context.apply(runner.operation, runner.operation.read_call(context.view(), call.arguments))

    async def _answer(self, call: ToolCall) -> Message:
        timeout_s, max_chars = self._config.tool_timeout_s, self._config.max_tool_chars
        async with self._places:
            return await answer_call(call, self._runners, timeout_s=timeout_s, max_chars=max_chars)
