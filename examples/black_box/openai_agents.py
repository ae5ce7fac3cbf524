"""The same agent with openai-agents, by chat completions, or by responses with `--responses`.

With `--stream` the answers come as events.
"""

import asyncio
import os
import subprocess
import sys

import agents


@agents.function_tool
def shell(command: str) -> str:
    """Run it."""
    return subprocess.run(command, shell=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT).stdout


async def main() -> None:
    agents.set_tracing_disabled(True)
    agents.set_default_openai_api("responses" if "--responses" in sys.argv else "chat_completions")
    agent = agents.Agent("worker", instructions="Use the shell.", model="policy", tools=[shell])
    if "--stream" in sys.argv:
        streamed = agents.Runner.run_streamed(agent, os.environ["M2FORGE_TASK"])
        async for _ in streamed.stream_events():
            pass
        print(streamed.final_output)
    else:
        print((await agents.Runner.run(agent, os.environ["M2FORGE_TASK"])).final_output)


if __name__ == "__main__":
    asyncio.run(main())
