"""Agents of Python libraries, unmodified, against an OpenAI endpoint: `libraries.py NAME URL KEY`, in the workspace.

Each has one tool, a shell, and holds a conversation of two user turns. Prints both answers as a JSON list.
"""

import asyncio
import json
import subprocess
import sys

FIRST, SECOND = "How many lines has f?", "And now?"


def shell(command: str) -> str:
    """Runs a command and returns its output."""
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip())
    return done.stdout


async def pydantic_ai(url: str, key: str, *, output: str, api: str) -> list[object]:
    import pydantic
    from pydantic_ai import Agent, ModelRetry, NativeOutput
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    class Count(pydantic.BaseModel):
        """How many lines there are."""

        lines: int

    if api == "anthropic":
        model = AnthropicModel("policy", provider=AnthropicProvider(base_url=url, api_key=key))
    else:
        kind = OpenAIChatModel if api == "chat" else OpenAIResponsesModel
        model = kind("policy", provider=OpenAIProvider(base_url=f"{url}/v1", api_key=key))
    output_type = {"text": str, "tool": Count, "native": NativeOutput(Count)}[output]
    agent = Agent(model, instructions="Use tools.", output_type=output_type)

    @agent.tool_plain(retries=3)
    def run(command: str) -> str:
        """Runs a command and returns its output."""
        try:
            return shell(command)
        except RuntimeError as error:
            raise ModelRetry(str(error)) from error

    first = await agent.run(FIRST)
    async with agent.run_stream(SECOND, message_history=first.all_messages()) as second:
        last = await second.get_output()
    return [one if isinstance(one, str) else one.model_dump() for one in (first.output, last)]


def _langchain_model(url: str, key: str, api: str):
    from langchain_anthropic import ChatAnthropic
    from langchain_openai import ChatOpenAI

    if api == "anthropic":
        return ChatAnthropic(model="policy", base_url=url, api_key=key, max_retries=0, max_tokens=500)
    return ChatOpenAI(
        model="policy", base_url=f"{url}/v1", api_key=key, max_retries=0, use_responses_api=api == "responses"
    )


async def langchain(url: str, key: str, *, output: str, api: str) -> list[object]:
    import pydantic
    from langchain.agents import create_agent
    from langchain.agents.middleware import wrap_tool_call
    from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
    from langchain_core.messages import ToolMessage
    from langchain_core.tools import tool

    class Count(pydantic.BaseModel):
        """How many lines there are."""

        lines: int

    @tool
    def run(command: str) -> str:
        """Runs a command and returns its output."""
        return shell(command)

    @wrap_tool_call
    async def tell_errors(request, handler):
        try:
            return await handler(request)
        except RuntimeError as error:
            return ToolMessage(f"Error: {error}", tool_call_id=request.tool_call["id"], status="error")

    form = {"text": None, "tool": ToolStrategy(Count), "native": ProviderStrategy(Count)}[output]
    model = _langchain_model(url, key, api)
    agent = create_agent(model, [run], system_prompt="Use tools.", response_format=form, middleware=[tell_errors])
    answers: list[object] = []
    messages: list[object] = []
    for said in (FIRST, SECOND):
        state = await agent.ainvoke({"messages": [*messages, {"role": "user", "content": said}]})
        messages = state["messages"]
        answers.append(messages[-1].text if output == "text" else state["structured_response"].model_dump())
    return answers


async def langgraph(url: str, key: str, *, output: str, api: str) -> list[object]:
    """A graph of its own, with a checkpointer that resumes the conversation; the last node asks for structure."""
    import pydantic
    from langchain_core.tools import tool
    from langgraph.checkpoint.memory import InMemorySaver
    from langgraph.graph import START, MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode, tools_condition

    class Count(pydantic.BaseModel):
        """How many lines there are."""

        lines: int

    @tool
    def run(command: str) -> str:
        """Runs a command and returns its output."""
        return shell(command)

    model = _langchain_model(url, key, api)
    bound = model.bind_tools([run], parallel_tool_calls=False) if api != "anthropic" else model.bind_tools([run])
    structured = model.with_structured_output(Count, method="json_schema")

    async def think(state: MessagesState) -> dict[str, object]:
        return {"messages": [await bound.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("think", think)
    graph.add_node("tools", ToolNode([run], handle_tool_errors=True))
    graph.add_edge(START, "think")
    graph.add_conditional_edges("think", tools_condition)
    graph.add_edge("tools", "think")
    app = graph.compile(checkpointer=InMemorySaver())
    config = {"configurable": {"thread_id": "1"}}
    answers: list[object] = []
    for said in (FIRST, SECOND):
        async for _ in app.astream({"messages": [("user", said)]}, config, stream_mode="messages"):
            pass
        answers.append((await app.aget_state(config)).values["messages"][-1].text)
    if output == "native":
        answers.append((await structured.ainvoke("Two lines. How many?")).model_dump())
    return answers


async def instructor(url: str, key: str, *, output: str, api: str) -> list[object]:
    """The first answer fails validation, and instructor asks again with the error."""
    import instructor as library
    import openai
    import pydantic

    class Count(pydantic.BaseModel):
        lines: int

        @pydantic.field_validator("lines")
        @classmethod
        def _check(cls, lines: int) -> int:
            if lines > 10:
                raise ValueError("too many lines")
            return lines

    mode = {"tool": library.Mode.TOOLS, "native": library.Mode.JSON_SCHEMA}[output]
    client = library.from_openai(openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0), mode=mode)
    messages = [{"role": "user", "content": FIRST}]
    count = await client.chat.completions.create(model="policy", messages=messages, response_model=Count, max_retries=2)
    return [count.model_dump()]


async def autogen(url: str, key: str, *, output: str, api: str) -> list[object]:
    from autogen_agentchat.agents import AssistantAgent
    from autogen_core.models import ModelInfo
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    info = ModelInfo(vision=True, function_calling=True, json_output=True, family="unknown", structured_output=True)
    client = OpenAIChatCompletionClient(
        model="policy", base_url=f"{url}/v1", api_key=key, model_info=info, max_retries=0, include_name_in_message=True
    )

    async def run(command: str) -> str:
        """Runs a command and returns its output."""
        return shell(command)

    agent = AssistantAgent(
        "worker",
        client,
        tools=[run],
        system_message="Use tools.",
        max_tool_iterations=5,
        model_client_stream=output == "stream",
    )
    answers = []
    for said in (FIRST, SECOND):
        result = await agent.run(task=said)
        answers.append(result.messages[-1].content)
    await client.close()
    return answers


def main() -> None:
    name, output, api, url, key = sys.argv[1:]
    run = {f.__name__: f for f in (pydantic_ai, langchain, langgraph, instructor, autogen)}[name]
    print(json.dumps(asyncio.run(run(url, key, output=output, api=api))))


main()
