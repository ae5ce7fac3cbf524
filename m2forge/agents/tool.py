"""Tools that an agent loop can run: calls in, results out. Every call gets a result, whatever goes wrong.

A call that names an unknown tool, has arguments that do not match the schema, fails, or times out gets a result that
says so, so that the model can correct itself. The tools:

    ReadTool, WriteTool, EditTool   files of the workspace, without a shell. Calls of one turn run concurrently, but
                                    file tools run one after the other, in the order of the calls
    ShellTool                       each call runs in a new shell in the sandbox; no process that it starts outlives it
    FunctionTool                    a Python function: its name, its docstring as the description, and its annotations
                                    as the schema. One that is not a coroutine runs in its own thread. The result is
                                    the returned string, or JSON for other types

    @function_tool
    async def search(query: str, limit: int = 5) -> str:
        '''Look it up.'''
"""

import asyncio
import concurrent.futures
import contextvars
import functools
import inspect
import json
import threading
import typing
from collections.abc import Callable, Mapping
from typing import Protocol

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from m2forge.errors import ConfigError, DataError, suggest
from m2forge.protocols import Command, OutcomeReason, Sandbox
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
    except Exception as error:  # noqa: BLE001  (one tool's failure must not affect others)
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


MAX_FILE_BYTES = 1 << 20
_PATH: dict[str, JsonValue] = {"type": "string", "description": "Relative to the workspace."}
_TEXT: dict[str, JsonValue] = {"type": "string"}


def _tool(name: str, description: str, *others: str) -> Tool:
    properties = {"path": _PATH} | dict.fromkeys(others, _TEXT)
    return Tool(name, description, {"type": "object", "properties": properties, "required": ["path", *others]})


class _FileTool:
    is_timed = True

    def __init__(self, sandbox: Sandbox, lock: asyncio.Lock) -> None:
        """`lock`: lock shared by the tools of one workspace, because one of two concurrent edits would be lost."""
        self._sandbox, self._lock = sandbox, lock

    async def run(self, arguments: Mapping[str, JsonValue]) -> str:
        async with self._lock:
            return await self._use(arguments)

    async def _use(self, arguments: Mapping[str, JsonValue]) -> str:
        raise NotImplementedError


class ReadTool(_FileTool):
    """See `ToolRunner`."""

    tool = _tool("read_file", "Read a text file.")

    async def _use(self, arguments: Mapping[str, JsonValue]) -> str:
        return (await self._sandbox.read(str(arguments["path"]), MAX_FILE_BYTES)).decode(errors="replace")


class WriteTool(_FileTool):
    """See `ToolRunner`."""

    tool = _tool("write_file", "Write a text file, whole; folders are made.", "content")

    async def _use(self, arguments: Mapping[str, JsonValue]) -> str:
        content = str(arguments["content"]).encode(errors="replace")
        await self._sandbox.write(str(arguments["path"]), content)
        return f"wrote {len(content)} bytes"


class EditTool(_FileTool):
    """See `ToolRunner`."""

    tool = _tool("edit_file", "Replace a piece of a text file, which must occur in it exactly once.", "old", "new")

    async def _use(self, arguments: Mapping[str, JsonValue]) -> str:
        path, old, new = (str(arguments[name]).encode(errors="replace") for name in ("path", "old", "new"))
        content = await self._sandbox.read(path.decode(), MAX_FILE_BYTES)
        count = content.count(old) if old else 0
        if count != 1:
            raise DataError(f"expected the old text once in {path.decode()}, found it {count} times")
        await self._sandbox.write(path.decode(), content.replace(old, new))
        return "edited"


SHELL = Tool(
    "shell",
    "Run a command in a shell, in the workspace. Each call is a shell of its own; what it leaves running is ended.",
    {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
)


class ShellTool:
    """See `ToolRunner`."""

    tool = SHELL
    is_timed = False

    def __init__(self, sandbox: Sandbox, *, timeout_s: float) -> None:
        """The sandbox enforces `timeout_s`, so that the result includes the output up to then."""
        self._sandbox, self._timeout_s = sandbox, timeout_s

    async def run(self, arguments: Mapping[str, JsonValue]) -> str:
        argv = ("sh", "-c", str(arguments["command"]).replace("\0", ""))
        outcome = await self._sandbox.run(Command(argv, timeout_s=self._timeout_s, merges_stderr=True))
        text = outcome.stdout.text()
        match outcome.reason:
            case OutcomeReason.EXITED:
                return text if outcome.status == 0 else f"{text}\n[exit status {outcome.status}]"
            case OutcomeReason.TIMEOUT:
                return f"{text}\n[ended after {self._timeout_s:g} s, the most a command may take]"
            case OutcomeReason.SIGNALLED:
                return f"{text}\n[ended by signal {-outcome.status}]"
            case OutcomeReason.MEMORY:
                return f"{text}\n[ended, because the sandbox had no memory left]"
            case OutcomeReason.FLOODED | OutcomeReason.KILLED | OutcomeReason.TAMPERED:
                return f"{text}\n[{outcome.reason}]"


class FunctionTool:
    """See `ToolRunner`."""

    is_timed = True

    def __init__(self, function: Callable[..., object]) -> None:
        self._function = function
        self._model = _arguments_of(function)
        schema = self._model.model_json_schema()
        schema.pop("title", None)
        for parameter in schema.get("properties", {}).values():
            parameter.pop("title", None)
        self.tool = Tool(function.__name__, inspect.getdoc(function) or "", schema)

    async def run(self, arguments: Mapping[str, JsonValue]) -> str:
        try:
            validated = self._model.model_validate_json(json.dumps(dict(arguments)))
        except ValidationError as error:
            problems = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()]
            return f"error: {self.tool.name} was not called: {'; '.join(problems)}"
        values = {name: getattr(validated, name) for name in type(validated).model_fields}
        if inspect.iscoroutinefunction(self._function):
            output = await self._function(**values)
        else:
            output = await _in_thread(functools.partial(self._function, **values))
        return output if isinstance(output, str) else json.dumps(output, ensure_ascii=False, default=str)


def function_tool(function: Callable[..., object]) -> FunctionTool:
    return FunctionTool(function)


async def _in_thread(work: Callable[[], object]) -> object:
    """Run in a new daemon thread: in the event loop's pool, a function that never ends would block a worker thread and
    the exit of the process."""
    done: concurrent.futures.Future[object] = concurrent.futures.Future()
    done.set_running_or_notify_cancel()  # It cannot be cancelled from here on.

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001  (raised where it is awaited)
            done.set_exception(error)

    threading.Thread(target=contextvars.copy_context().run, args=(run,), daemon=True).start()
    return await asyncio.wrap_future(done)


def _arguments_of(function: Callable[..., object]) -> type[BaseModel]:
    hints = typing.get_type_hints(function, include_extras=True)
    fields: dict[str, tuple[object, object]] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if name not in hints or parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(f"tool {function.__name__}: parameter {name!r}: expected a name with an annotation")
        fields[name] = (hints[name], ... if parameter.default is parameter.empty else parameter.default)
    config = ConfigDict(extra="forbid")
    return create_model(function.__name__, __config__=config, **fields)  # type: ignore[call-overload, no-any-return]
