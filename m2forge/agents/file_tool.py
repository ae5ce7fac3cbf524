"""Tools that read, write and edit files of the workspace without a shell.

Calls of one turn run concurrently, but file tools run one after the other, in the order of the calls.
"""

import asyncio
from collections.abc import Mapping

from m2forge.errors import DataError
from m2forge.protocols import Sandbox
from m2forge.records import JsonValue
from m2forge.text.message import Tool

MAX_FILE_BYTES = 1 << 20
_PATH: dict[str, JsonValue] = {"type": "string", "description": "Relative to the workspace."}
_TEXT: dict[str, JsonValue] = {"type": "string"}


def _tool(name: str, description: str, *others: str) -> Tool:
    properties = {"path": _PATH} | dict.fromkeys(others, _TEXT)
    return Tool(name, description, {"type": "object", "properties": properties, "required": ["path", *others]})


class _FileTool:
    is_timed = True

    def __init__(self, sandbox: Sandbox, turn: asyncio.Lock) -> None:
        """`turn`: lock shared by the tools of one workspace, because one of two concurrent edits would be lost."""
        self._sandbox, self._turn = sandbox, turn

    async def run(self, arguments: Mapping[str, JsonValue]) -> str:
        async with self._turn:
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
