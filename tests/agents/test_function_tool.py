"""Functions become tools by their signatures; what does not fit is told and not called."""

import asyncio
import threading
import time
from typing import Annotated, Literal

import pytest
from pydantic import Field

from m2forge.agents.tool import function_tool
from m2forge.errors import ConfigError
from m2forge.records import JsonValue


@function_tool
def weigh(
    thing: str, unit: Literal["g", "kg"] = "g", times: Annotated[int, Field(ge=1)] = 1, parts: list[int] | None = None
) -> dict[str, object]:
    """Weigh it.

    More than once.
    """
    return {"thing": thing, "unit": unit, "times": times, "parts": parts}


def test_the_signature_is_the_schema() -> None:
    assert weigh.tool.name == "weigh"
    assert weigh.tool.description == "Weigh it.\n\nMore than once."
    assert weigh.tool.parameters["required"] == ["thing"]
    properties = weigh.tool.parameters["properties"]
    assert isinstance(properties, dict)
    assert properties["thing"] == {"type": "string"}
    assert properties["unit"] == {"type": "string", "enum": ["g", "kg"], "default": "g"}


def test_arguments_are_checked_and_the_result_is_text() -> None:
    said = asyncio.run(weigh.run({"thing": "ß", "times": 2, "parts": [1]}))
    assert said == '{"thing": "ß", "unit": "g", "times": 2, "parts": [1]}'
    wrongs: list[dict[str, JsonValue]] = [{"times": 0}, {"unit": "t"}, {"x": 1}]
    for wrong in wrongs:
        assert asyncio.run(weigh.run(wrong | {"thing": "a"})).startswith("error: weigh was not called: ")
    assert asyncio.run(weigh.run({})) == "error: weigh was not called: thing: Field required"


def test_functions_that_never_end_keep_nobody_waiting() -> None:
    released = threading.Event()

    @function_tool
    def hang() -> None:
        released.wait(60)

    async def use() -> str:
        for _ in range(40):  # more than the event loop's own pool has threads
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.005):
                    await hang.run({})
        return await weigh.run({"thing": "a"})

    started_s = time.monotonic()
    try:
        assert asyncio.run(use()).startswith('{"thing": "a"')
        assert time.monotonic() - started_s < 20
    finally:
        released.set()


def test_a_function_without_annotations_is_refused() -> None:
    def bare(x):  # type: ignore[no-untyped-def]
        return x

    def loose(*args: int) -> int:
        return sum(args)

    for function in (bare, loose):
        with pytest.raises(ConfigError, match="expected a name with an annotation"):
            function_tool(function)
