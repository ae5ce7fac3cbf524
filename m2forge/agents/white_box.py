"""Our own agent: a tool loop that logs all of its contexts, so that training states can be rebuilt.

Its conversations, main and sub-agents', share a client, a sandbox and a log. The log is the transcript's `log.jsonl`;
`rebuild` checks it against the gateway's recorded calls.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence

from m2forge.agents.client import ChatClient, CompletionClient
from m2forge.agents.config import SubAgentConfig, WhiteBoxConfig
from m2forge.agents.context import Context
from m2forge.agents.file_tool import EditTool, ReadTool, WriteTool
from m2forge.agents.log import MAIN, LogEntry, write_log
from m2forge.agents.loop import Loop, LoopResult, OperationTool
from m2forge.agents.operation import Operation
from m2forge.agents.registry import make_operation
from m2forge.agents.shell_tool import ShellTool
from m2forge.agents.tool import ToolRunner
from m2forge.errors import ConfigError
from m2forge.protocols import AgentEnd, AgentResult, Endpoint, Sandbox
from m2forge.records import JsonValue, Task
from m2forge.text.message import Message, Tool

LOG_FILE = "log.jsonl"
DELEGATE = Tool(
    "delegate",
    "Give a part of the work to a sub-agent with the same tools. It sees the instruction and nothing else of this "
    "conversation; its answer is the result. Several calls at once run side by side.",
    {"type": "object", "properties": {"instruction": {"type": "string"}}, "required": ["instruction"]},
)


class WhiteBoxAgent:
    """See `Agent`."""

    def __init__(
        self, config: WhiteBoxConfig, tools: Sequence[ToolRunner] = (), operations: Sequence[Operation] = ()
    ) -> None:
        """`tools` and `operations`: the caller's own, in addition to the configured ones."""
        self._config, self._tools = config, tuple(tools)
        self._operations = (*map(make_operation, config.operations), *operations)

    async def run(self, task: Task, endpoint: Endpoint, sandbox: Sandbox) -> AgentResult:
        client = ChatClient(endpoint, max_tokens=self._config.max_tokens, temperature=self._config.temperature)
        attempt = Attempt(self._config, client, [*self._sandbox_tools(sandbox), *self._tools], self._operations)
        started_s = time.time()
        instruction = task.instruction.encode(errors="replace").decode()
        end, answer, failure = AgentEnd.FAILED, "", None
        try:
            async with asyncio.timeout(self._config.max_s) as limit:
                result = await attempt.converse(MAIN, self._config.system, instruction, self._config.max_turns)
            end, answer = result.end, result.answer
        except Exception as error:  # noqa: BLE001  (an operation of the caller's may raise anything; the log is kept)
            failure = f"{type(error).__name__}: {error}"
            if limit.expired() and isinstance(error, TimeoutError):
                end, failure = AgentEnd.TIMEOUT, f"time ran out after {self._config.max_s:g} s"
        finally:
            await client.close()
        log = write_log(attempt.log)
        return AgentResult(end, answer, started_s, max(time.time(), started_s), failure, {LOG_FILE: log})

    def _sandbox_tools(self, sandbox: Sandbox) -> list[ToolRunner]:
        runners: list[ToolRunner] = []
        if "shell" in self._config.tools:
            runners.append(ShellTool(sandbox, timeout_s=self._config.tool_timeout_s))
        if "files" in self._config.tools:
            turn = asyncio.Lock()
            runners += [ReadTool(sandbox, turn), WriteTool(sandbox, turn), EditTool(sandbox, turn)]
        return runners


class Attempt:
    """The conversations of one attempt at a task."""

    def __init__(
        self,
        config: WhiteBoxConfig,
        client: CompletionClient,
        runners: Sequence[ToolRunner],
        operations: Sequence[Operation],
    ) -> None:
        self._config, self._client, self._operations = config, client, tuple(operations)
        offered = [OperationTool(operation) for operation in operations] if config.offers_operations else []
        self._runners: tuple[ToolRunner, ...] = (*runners, *offered)
        self.log: list[LogEntry] = []

    async def converse(self, name: str, system: str, instruction: str, max_turns: int, *, depth: int = 0) -> LoopResult:
        runners, sub_agents = list(self._runners), self._config.sub_agents
        if sub_agents is not None and depth < sub_agents.max_depth:
            runners.append(DelegateTool(self, sub_agents, name, depth))
        tools = [runner.tool for runner in runners]
        if len({tool.name for tool in tools}) < len(tools):
            raise ConfigError(f"expected tools of different names, received {[tool.name for tool in tools]}")
        context = Context(name, tools, self._client, self.log, max_tokens=self._config.context_tokens)
        context.append(Message("system", system), Message("user", instruction))
        return await Loop(self._config, runners, self._operations).run(context, max_turns)


class DelegateTool:
    """See `ToolRunner`. A nested loop with its own conversation."""

    tool = DELEGATE
    is_timed = False

    def __init__(self, attempt: Attempt, config: SubAgentConfig, parent: str, depth: int) -> None:
        self._attempt, self._config, self._parent, self._depth = attempt, config, parent, depth
        self._num_started = 0

    async def run(self, arguments: Mapping[str, JsonValue]) -> str:
        name = f"{self._parent}.{self._num_started}"
        self._num_started += 1
        instruction, config = str(arguments["instruction"]), self._config
        result = await self._attempt.converse(name, config.system, instruction, config.max_turns, depth=self._depth + 1)
        if result.end is AgentEnd.FINISHED:
            return result.answer
        return f"{result.answer}\n[the sub-agent had no turns left before it was done]".lstrip("\n")
