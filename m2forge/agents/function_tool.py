"""A Python function as a tool: its name, its docstring as the description, and its annotations as the schema.

    @function_tool
    async def search(query: str, limit: int = 5) -> str:
        '''Look it up.'''

A function that is not a coroutine runs in its own thread. The result is the returned string, or JSON for other types.
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

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from m2forge.errors import ConfigError
from m2forge.records import JsonValue
from m2forge.text.message import Tool


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
            checked = self._model.model_validate_json(json.dumps(dict(arguments)))
        except ValidationError as error:
            problems = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()]
            return f"error: {self.tool.name} was not called: {'; '.join(problems)}"
        values = {name: getattr(checked, name) for name in type(checked).model_fields}
        if inspect.iscoroutinefunction(self._function):
            told = await self._function(**values)
        else:
            told = await _in_thread(functools.partial(self._function, **values))
        return told if isinstance(told, str) else json.dumps(told, ensure_ascii=False, default=str)


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
