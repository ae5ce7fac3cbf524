"""The same agent with Anthropic's SDK. Thinking goes back as the blocks in which it came.

With `--stream` the answers come as events.
"""

import os
import subprocess
import sys
from typing import Any

import anthropic

SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
TOOLS: Any = [{"name": "shell", "description": "Run it.", "input_schema": SCHEMA}]


def ask(client: anthropic.Anthropic, messages: list[Any]) -> anthropic.types.Message:
    if "--stream" not in sys.argv:
        return client.messages.create(model="policy", max_tokens=1024, messages=messages, tools=TOOLS)
    with client.messages.stream(model="policy", max_tokens=1024, messages=messages, tools=TOOLS) as stream:
        return stream.get_final_message()


def main() -> None:
    client = anthropic.Anthropic()
    messages: list[Any] = [{"role": "user", "content": os.environ["M2FORGE_TASK"]}]
    while (answer := ask(client, messages)).stop_reason == "tool_use":
        results = []
        for block in answer.content:
            if isinstance(block, anthropic.types.ToolUseBlock):
                command = str(block.input["command"])
                done = subprocess.run(command, shell=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
                results.append({"type": "tool_result", "tool_use_id": block.id, "content": done.stdout})
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]
    print("".join(block.text for block in answer.content if isinstance(block, anthropic.types.TextBlock)))


if __name__ == "__main__":
    main()
