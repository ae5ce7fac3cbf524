"""The real openai-agents SDK runs a two-tool agent through the gateway, by either of its ways of asking."""

import asyncio

import agents
import openai
import pytest

from m2forge.records import JsonValue
from m2forge.text.message import Message, Tool
from tests.gateway.dialogue import FORMATS, call
from tests.gateway.live import check_recorded, live, num_new_tokens

SCHEMA: dict[str, JsonValue] = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
TOOLS = (Tool("add", "Adds.", SCHEMA), Tool("multiply", "Multiplies.", SCHEMA))
SAYS = [
    Message("assistant", "", "Both at once.", (call("add", a=2, b=3), call("multiply", a=4, b=5))),
    Message("assistant", "Then", "Now the sum.", (call("add", a=5, b=20),)),
    Message("assistant", "25", "Done."),
]


@agents.function_tool
def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


@agents.function_tool
def multiply(a: int, b: int) -> int:
    """Multiplies."""
    return a * b


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("kind", [agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel])
@pytest.mark.parametrize("name", FORMATS)
def test_an_agent_runs_unmodified(
    name: str, kind: type[agents.OpenAIChatCompletionsModel | agents.OpenAIResponsesModel], is_streamed: bool
) -> None:
    format = FORMATS[name]()
    agents.set_tracing_disabled(True)

    async def run(url: str, key: str) -> str:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=20) as client:
            agent = agents.Agent(
                "adder", instructions="Use tools.", model=kind("m", openai_client=client), tools=[add, multiply]
            )
            if not is_streamed:
                return str((await agents.Runner.run(agent, "What is 2+3+4*5?")).final_output)
            result = agents.Runner.run_streamed(agent, "What is 2+3+4*5?")
            async for _ in result.stream_events():
                pass
            return str(result.final_output)

    with live(format, SAYS, tools=TOOLS) as gateway:
        episode, key = gateway.episode()
        assert asyncio.run(run(gateway.url, key)) == "25"
        check_recorded(gateway, episode)
        assert gateway.counts.num_encoded == num_new_tokens(format, gateway.engine.seen())
        assert episode.num_calls == 3
