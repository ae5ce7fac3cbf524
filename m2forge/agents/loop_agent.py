"""The agent kind `loop`: our own agent loop, one conversation tree per attempt, in this process.

`WhiteBoxAgent` is a tool loop that logs all of its contexts, so that training states can be rebuilt. Its conversations,
main and sub-agents', share a client, a sandbox and a log. The log is the transcript's `log.jsonl`; `rebuild` verifies
it against the gateway's recorded calls.

A `Context` is one conversation. Only its methods change the messages, and each logs its change, so replaying a log
gives the messages of each call. `Loop` requests a completion, runs its tool calls and appends their results, until the
policy answers without a call:

    operations that are due change the conversation
    the policy answers with thinking, content and calls; all become part of the conversation
    its calls run concurrently, up to a limit, and their results are appended in the order of the calls
    then operations that it called itself are applied

If an answer was cut off, or has neither content nor a call (a malformed call leaves neither), a user message says so
and the loop continues.

`LoopAgent` runs it for the attempts of a run. Its tools are the configured ones, which act on the attempt's workspace,
and those of the task's family, which the gateway serves. For a share of the attempts the logged states are rebuilt and
compared with the tokens that the gateway recorded (`agents/rebuild.py`), so that an operation that is not
deterministic, or a gateway that recorded something else, shows while training.
"""

import asyncio
import json
import logging
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from m2forge.agents.attempt import AgentError, Answer, ErrorKind, Job, Recorded
from m2forge.agents.call_log import MAIN, Appended, Applied, Called, LogEntry, Opened, read_log, write_log
from m2forge.agents.client import ChatClient, CompletionClient, Reply
from m2forge.agents.config import LoopConfig, SubAgentConfig, WhiteBoxConfig
from m2forge.agents.operation import Inputs, Operation, View, make_operation, require_valid
from m2forge.agents.rebuild import rebuild
from m2forge.agents.tool import EditTool, ReadTool, ShellTool, ToolRunner, WriteTool, answer_call, call_problems
from m2forge.errors import ConfigError, DataError, EngineError, RecordError
from m2forge.http_client import HttpClient, encode_json
from m2forge.protocols import AgentEnd, AgentResult, Endpoint, Sandbox
from m2forge.records import Call, JsonValue, Task
from m2forge.text.format import ChatFormat
from m2forge.text.message import Message, Tool, ToolCall, tool_to_openai

TOKENS_PER_CHAR = 0.35
"""Estimate used until the first call's usage gives the real ratio."""
CUT_OFF = "Your answer was cut off before it ended. Be brief: call a tool, or answer."
NOTHING = "You neither answered nor made a call that can be read. Call a tool in the form you were shown, or answer."
WILL_APPLY = "It is done after this turn."
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
        except Exception as error:  # noqa: BLE001  (an operation of the caller's may raise anything; the log is returned)
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
            lock = asyncio.Lock()
            runners += [ReadTool(sandbox, lock), WriteTool(sandbox, lock), EditTool(sandbox, lock)]
        return runners


@dataclass(frozen=True, slots=True)
class LoopResult:
    end: AgentEnd
    """FINISHED or OUT_OF_TURNS."""
    answer: str


class Context:
    def __init__(
        self,
        name: str,
        tools: Sequence[Tool],
        client: CompletionClient,
        log: list[LogEntry],
        *,
        max_tokens: int,
    ) -> None:
        """`log`: shared by all conversations of one attempt. `max_tokens`: context length of the policy."""
        self.name, self.tools = name, tuple(tools)
        self.messages: tuple[Message, ...] = ()
        self._client, self._log, self._max_tokens = client, log, max_tokens
        self._num_tool_chars = sum(len(json.dumps(tool_to_openai(tool))) for tool in tools)
        self._tokens_per_char = TOKENS_PER_CHAR
        log.append(Opened(name, self.tools))

    def append(self, *messages: Message) -> None:
        self._log.append(Appended(self.name, messages))
        self.messages += messages

    async def complete(self) -> Reply:
        """Request a completion and append it to the conversation."""
        reply = await self._complete(())
        self._log.append(Called(self.name, reply.id, reply.message))
        self.messages += (reply.message,)
        return reply

    async def complete_aside(self, suffix: Sequence[Message]) -> Reply:
        """Request a completion of the conversation plus `suffix`; neither becomes part of the conversation."""
        reply = await self._complete(suffix)
        self._log.append(Called(self.name, reply.id, reply.message, tuple(suffix), is_appended=False))
        return reply

    def apply(self, operation: Operation, inputs: Inputs) -> None:
        changed = operation.apply(self.messages, inputs)
        require_valid(operation.name, self.messages, changed)
        self._log.append(Applied(self.name, operation.name, operation.parameters, inputs))
        self.messages = changed

    def view(self) -> View:
        num_tokens = round(self._num_chars(self.messages) * self._tokens_per_char)
        return View(self.messages, num_tokens, self._max_tokens, self._tokens_per_char)

    async def _complete(self, suffix: Sequence[Message]) -> Reply:
        messages = (*self.messages, *suffix)
        reply = await self._client.complete(messages, self.tools)
        if reply.num_prompt:
            self._tokens_per_char = reply.num_prompt / max(self._num_chars(messages), 1)
        return reply

    def _num_chars(self, messages: Sequence[Message]) -> int:
        return self._num_tool_chars + sum(map(_num_chars, messages))


def _num_chars(message: Message) -> int:
    calls = sum(len(call.name) + len(json.dumps(call.arguments)) for call in message.tool_calls)
    return len(message.content) + len(message.thinking) + calls


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
        self._slots = asyncio.Semaphore(config.max_parallel_calls)

    async def run(self, context: Context, max_turns: int) -> LoopResult:
        content = ""
        for _ in range(max_turns):
            await self._manage(context)
            reply = await context.complete()
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
                context.apply(operation, await operation.prepare(view, context.complete_aside))

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
        async with self._slots:
            return await answer_call(call, self._runners, timeout_s=timeout_s, max_chars=max_chars)


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


_log = logging.getLogger(__name__)


class LoopAgent:
    """See `AttemptAgent`."""

    is_silent_allowed = False

    def __init__(self, config: LoopConfig, format: ChatFormat, rng: random.Random | None = None) -> None:
        """`format`: the policy's chat format. `rng`: chooses the attempts to compare."""
        self._config, self._format, self._rng = config, format, rng or random.Random()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Every attempt closes what it opened."""

    async def attempt(self, job: Job, *, is_exclusive: bool = False) -> Answer:
        config = self._config
        sandbox = await job.workspace.start(job.endpoint)
        http = HttpClient(job.endpoint.url, key=job.endpoint.key)
        try:
            agent = WhiteBoxAgent(config, [FamilyTool(tool, http) for tool in job.tools])
            result = await agent.run(job.task, job.endpoint, sandbox)
        finally:
            http.close()
        match result.end:
            case AgentEnd.TIMEOUT:
                raise TimeoutError
            case AgentEnd.FAILED:
                is_infra = (result.failure or "").startswith(EngineError.__name__)
                raise AgentError(f"the loop failed: {result.failure}", ErrorKind.INFRA if is_infra else None)
        return Answer(result.answer, result.transcript)

    async def watch(self) -> None:
        """There is no process that could break."""
        await asyncio.get_running_loop().create_future()

    async def inspect(self, answer: Answer, recorded: Recorded) -> bool | None:
        if self._rng.random() >= self._config.check_share:
            return None
        try:
            # It tokenizes whole conversations.
            await asyncio.to_thread(self._rebuild, answer.transcript[LOG_FILE], recorded)
        except RecordError as error:
            _log.warning("the states of an attempt, rebuilt from its log, differ from what is recorded: %s", error)
            return False
        return True

    def _rebuild(self, log: bytes, recorded: Recorded) -> None:
        rebuild(read_log(log), self._format, calls_by_id(recorded))


def calls_by_id(recorded: Recorded) -> Mapping[str, Call]:
    """The recorded calls by the ids of their responses."""
    calls = recorded.tree.calls()
    return {str(step["id"]): call for step, call in zip(recorded.steps, calls, strict=False)}


class FamilyTool:
    """See `ToolRunner`. A tool of the task's family, which the gateway runs."""

    is_timed = True

    def __init__(self, tool: Tool, http: HttpClient) -> None:
        self.tool, self._http = tool, http

    async def run(self, arguments: Mapping[str, JsonValue]) -> str:
        body: JsonValue = {"name": self.tool.name, "arguments": dict(arguments)}
        response = await self._http.request("POST", "/v1/tools/call", encode_json(body))
        if not response.is_success:
            raise DataError(f"status {response.status}: {response.text[:200]}")
        return str(json.loads(response.content)["content"])
