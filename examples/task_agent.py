"""An agent program with tools, by OpenAI's SDK: it knows nothing of training, and imports nothing of m2forge.

It lives across tasks and works on several at once: jobs come in as lines of JSON, answers go out as lines of JSON.
Where the policy is, and with which key, every job says; also which tools there are, which the same address serves.

With `--shell` it has one tool of its own, a shell in the attempt's sandbox. A job names the sandbox's socket, which
takes requests and gives results as lines of JSON.
"""

import asyncio
import json
import sys
from functools import partial
from typing import Any

import openai

MAX_TURNS = 24
TEMPERATURE = 1.0
COMMAND_S = 10.0
MAX_RESULT_BYTES = 16 << 20
SHELL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "shell",
        "description": "Run a command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
SPENT = ("context_length_exceeded", "insufficient_quota")
"""Codes of errors: a full context, or a spent budget. The attempt ends there. Another 429 is a limit of connections."""


class SandboxFailedError(Exception):
    """Not the policy's tokens, but the sandbox is to blame."""


async def run_in_shell(job: dict[str, Any], arguments: Any) -> str:
    """The output of a command, as the policy sees it."""
    command = arguments.get("command") if isinstance(arguments, dict) else None
    if not isinstance(command, str) or "\0" in command:
        return "error: expected a command"
    reader, writer = await asyncio.open_unix_connection(job["sandbox"], limit=MAX_RESULT_BYTES)
    try:
        writer.write(json.dumps({"run": ["sh", "-c", command], "timeout_s": COMMAND_S}).encode() + b"\n")
        result = json.loads(await reader.readline())
    finally:
        writer.close()
    if "error" in result:
        if result.get("kind") == "infra":
            raise SandboxFailedError(result["error"])
        return f"error: {result['error']}"
    ending = "" if result["status"] == 0 else f"status {result['status']}\n"
    return str(result["stdout"] + result["stderr"] + ending)[:2000]


async def solve(client: openai.AsyncOpenAI, job: dict[str, Any], *, has_shell: bool) -> str:
    tools = job["tools"] + [SHELL] * has_shell
    messages: list[Any] = [{"role": "user", "content": job["task"]["instruction"]}]

    async def call(made: Any) -> dict[str, str]:
        try:
            arguments = json.loads(made.function.arguments)
        except ValueError:
            arguments = None
        if has_shell and made.function.name == "shell":
            content = await run_in_shell(job, arguments)
        else:
            body = {"name": made.function.name, "arguments": arguments}
            content = (await client.post(job["tools_url"], body=body, cast_to=dict[str, Any]))["content"]
        return {"role": "tool", "tool_call_id": made.id, "content": content}

    for _ in range(MAX_TURNS):
        answer = await client.chat.completions.create(
            model=job["model"],
            messages=messages,
            tools=tools or openai.omit,
            temperature=TEMPERATURE,
            max_tokens=128,
        )
        message = answer.choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages.append(message.model_dump(exclude_none=True))
        messages += await asyncio.gather(*(call(made) for made in message.tool_calls))
    return ""


async def work(client: openai.AsyncOpenAI, job: dict[str, Any], *, has_shell: bool) -> None:
    own = client.with_options(base_url=job["base_url"], api_key=job["api_key"])
    try:
        answer = {"answer": await solve(own, job, has_shell=has_shell)}
    except openai.APIError as error:
        status = error.status_code if isinstance(error, openai.APIStatusError) else 503
        answer = {"answer": ""} if error.code in SPENT else {"error": str(error)}
        answer |= {"kind": "infra"} if "error" in answer and (status >= 500 or status == 429) else {}
    except SandboxFailedError as error:
        answer = {"error": str(error), "kind": "infra"}
    except Exception as error:  # noqa: BLE001  (an error is an answer; without one the job would wait for its time)
        answer = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps({"id": job["id"]} | answer), flush=True)


async def main(*, has_shell: bool) -> None:
    client = openai.AsyncOpenAI(api_key="given by each job")
    running: dict[str, asyncio.Task[None]] = {}

    def end(id: str, task: asyncio.Task[None]) -> None:
        del running[id]
        if task.cancelled():
            print(json.dumps({"id": id, "cancelled": True}), flush=True)

    while line := await asyncio.to_thread(sys.stdin.readline):
        job = json.loads(line)
        id = job["id"]
        if job.get("cancel"):
            # A job that is over has been answered, which confirms as well.
            if id in running:
                running[id].cancel()
        else:
            running[id] = asyncio.create_task(work(client, job, has_shell=has_shell))
            running[id].add_done_callback(partial(end, id))
    await asyncio.gather(*running.values())


if __name__ == "__main__":
    asyncio.run(main(has_shell="--shell" in sys.argv[1:]))
