"""The agents SDK, unchanged, asks for tools and answers through Responses."""

import asyncio
import json

import agents
import httpx2
import openai

from m2forge.gateway.dialects.openai.responses import OpenAIResponses
from m2forge.gateway.dialects.types import CompletionOutput, CompletionRequest, Ending, Usage
from m2forge.text.message import Message, ToolCall
from m2forge.text.parser import CallFinished, Completion, ContentDelta, Event, ThinkingDelta
from tests.gateway.dialects.draw_output import play

DIALECT = OpenAIResponses()
CALLS = (ToolCall("look", {"place": "roof"}, "call_1"), ToolCall("look", {"place": "cellar"}, "call_2"))
FIRST = CompletionOutput(Completion("Where is it?", "Let me see.", CALLS, (), closed=True), Ending.TOOL_CALLS)
SECOND = CompletionOutput(Completion("On the roof.", "The cat is on the roof.", (), (), closed=True), Ending.STOP)


@agents.function_tool
def look(place: str) -> str:
    """Says what is there."""
    return {"roof": "a cat", "cellar": "nothing"}[place]


def events_of(output: CompletionOutput) -> list[Event]:
    completion = output.completion
    calls = [CallFinished(call) for call in completion.tool_calls]
    return [ThinkingDelta(completion.thinking), ContentDelta(completion.content), *calls]


def respond(body: bytes, requests: list[CompletionRequest]) -> httpx2.Response:
    request = DIALECT.read(json.loads(body))
    requests.append(request)
    output, id = (FIRST, "resp_1") if len(requests) == 1 else (SECOND, "resp_2")
    usage = Usage(num_prompt=9, num_cached=3, num_sampled=7, num_thinking=2)
    if not request.is_streamed:
        return httpx2.Response(200, json=DIALECT.response(request, id, 5, [output], usage))
    pieces: list[tuple[int, list[Event], list[object]]] = [(0, [event], []) for event in events_of(output)]
    content = b"".join(play(DIALECT.stream(request, id, 5), [output], pieces, usage))  # type: ignore[arg-type]
    return httpx2.Response(200, headers={"content-type": "text/event-stream"}, content=content)


async def run(*, is_streamed: bool) -> tuple[str, list[CompletionRequest]]:
    requests: list[CompletionRequest] = []
    transport = httpx2.MockTransport(lambda request: respond(request.content, requests))
    async with (
        httpx2.AsyncClient(transport=transport) as http,
        openai.AsyncOpenAI(base_url="http://gateway/v1", api_key="key", max_retries=0, http_client=http) as client,
    ):
        model = agents.OpenAIResponsesModel("m2", client)
        agent = agents.Agent("finder", instructions="Find it.", model=model, tools=[look])
        config = agents.RunConfig(tracing_disabled=True)
        if is_streamed:
            streaming = agents.Runner.run_streamed(agent, "Where is the cat?", run_config=config)
            async for _ in streaming.stream_events():
                pass
            return str(streaming.final_output), requests
        result = await agents.Runner.run(agent, "Where is the cat?", run_config=config)
        return str(result.final_output), requests


def test_the_agents_sdk_calls_tools_and_resends_the_turn() -> None:
    for is_streamed in (False, True):
        output, requests = asyncio.run(run(is_streamed=is_streamed))
        assert output == "The cat is on the roof."
        assert [request.is_streamed for request in requests] == [is_streamed, is_streamed]
        assert requests[1].messages == (
            Message("system", "Find it."),
            Message("user", "Where is the cat?"),
            FIRST.completion.message(),
            Message("tool", "a cat", tool_call_id="call_1"),
            Message("tool", "nothing", tool_call_id="call_2"),
        )
        assert [tool.name for tool in requests[0].tools] == ["look"]
