"""The tools that a request offers, whatever dialect describes them: names differ, schemas are JSON."""

from collections.abc import Callable, Mapping

from m2forge.errors import FormatError
from m2forge.gateway.exchange import AskError
from m2forge.gateway.reading import Fields, shown
from m2forge.records import JsonValue
from m2forge.text.message import Tool


def read_tools(fields: Fields, read_tool: Callable[[JsonValue, str], Tool]) -> tuple[Tool, ...]:
    """`read_tool`: of one description and its place."""
    tools: dict[str, Tool] = {}
    place = fields.path("tools")
    for index, value in enumerate(fields.items("tools")):
        tool = read_tool(value, f"{place}[{index}]")
        if tool.name in tools:
            fields.refuse("tools", f"expected names to differ, received {shown(tool.name)} more than once")
        tools[tool.name] = tool
    return tuple(tools.values())


def make_tool(fields: Fields, schema: Mapping[str, JsonValue], place: str) -> Tool:
    """Of fields that hold its name and description; `place` is told where it is no tool."""
    try:
        return Tool(fields.required_text("name"), fields.text("description") or "", schema)
    except FormatError as error:
        raise AskError(f"{place}: {error}", place) from error
