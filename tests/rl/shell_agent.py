"""An agent program of one attempt, as a user writes it: a shell tool, and retries while the gateway restarts."""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import Any

PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
TOOL = {"type": "function", "function": {"name": "bash", "description": "Run it.", "parameters": PARAMETERS}}


def complete(messages: list[dict[str, Any]]) -> dict[str, Any]:
    body = json.dumps({"model": sys.argv[1], "messages": messages, "tools": [TOOL], "max_tokens": 200}).encode()
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    for attempt in range(60):
        try:
            url = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
            headers["x-stainless-retry-count"] = str(attempt)
            with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as response:
                message: dict[str, Any] = json.load(response)["choices"][0]["message"]
                return message
        except urllib.error.HTTPError as error:
            if error.code < 500:
                raise
        except OSError:
            pass
        time.sleep(0.5)
    raise TimeoutError


def main() -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": sys.argv[2]}]
    while calls := (message := complete(messages)).get("tool_calls"):
        messages.append(message)
        for call in calls:
            command = json.loads(call["function"]["arguments"])["command"]
            done = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": done.stdout + done.stderr})
    print(message["content"])


if __name__ == "__main__":
    main()
