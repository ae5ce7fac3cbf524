"""An agent in ten lines with OpenAI's SDK, which knows nothing of who answers: it finds URL and key in its environment.

With `--stream` the answers come as events.
"""

import json
import os
import subprocess
import sys
from typing import Any

import openai

SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
TOOLS: Any = [{"type": "function", "function": {"name": "shell", "description": "Run it.", "parameters": SCHEMA}}]


def ask(client: openai.OpenAI, messages: list[Any]) -> Any:
    if "--stream" not in sys.argv:
        return client.chat.completions.create(model="policy", messages=messages, tools=TOOLS).choices[0].message
    with client.chat.completions.stream(model="policy", messages=messages, tools=TOOLS) as stream:
        return stream.get_final_completion().choices[0].message


def main() -> None:
    client = openai.OpenAI()
    messages: list[Any] = [{"role": "user", "content": os.environ["M2FORGE_TASK"]}]
    while (answer := ask(client, messages)).tool_calls:
        messages.append(answer.model_dump(exclude_none=True))
        for call in answer.tool_calls:
            command = json.loads(call.function.arguments)["command"]
            done = subprocess.run(command, shell=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": done.stdout})
    print(answer.content)


if __name__ == "__main__":
    main()
