"""Reads the tools that a request offers, in any dialect: field names differ, schemas are JSON."""

from collections.abc import Callable, Mapping

from m2forge.errors import FormatError
from m2forge.gateway.exchange import AskError
from m2forge.gateway.reading import Fields, shown
from m2forge.records import JsonValue
from m2forge.text.message import Tool


def read_tools(fields: Fields, read_tool: Callable[[JsonValue, str], Tool]) -> tuple[Tool, ...]:
    """`read_tool` reads one tool description, given its path."""
    tools: dict[str, Tool] = {}
    place = fields.path("tools")
    for index, value in enumerate(fields.items("tools")):
        tool = read_tool(value, f"{place}[{index}]")
        if tool.name in tools:
            fields.refuse("tools", f"expected names to differ, received {shown(tool.name)} more than once")
        tools[tool.name] = tool
    return tuple(tools.values())


def make_tool(fields: Fields, schema: Mapping[str, JsonValue], place: str) -> Tool:
    """Create a tool from its name, description and schema; raises `AskError` at `place` if it is invalid."""
    try:
        return Tool(fields.required_text("name"), fields.text("description") or "", schema)
    except FormatError as error:
        raise AskError(f"{place}: {error}", place) from error
