"""An agent program with tools, by OpenAI's SDK: it knows nothing of training, and imports nothing of m2forge.

It lives across tasks and works on several at once: jobs come in as lines of JSON, answers go out as lines of JSON.
Where the policy is, and with which key, every job says; also which tools there are, which the same address serves.
"""

import asyncio
import json
import sys
from functools import partial
from typing import Any

import openai

MAX_TURNS = 24
TEMPERATURE = 1.0
SPENT = ("context_length_exceeded", "insufficient_quota")
"""Codes of errors: a full context, or a spent budget. The attempt ends there. Another 429 is a limit of connections."""


async def solve(client: openai.AsyncOpenAI, job: dict[str, Any]) -> str:
    messages: list[Any] = [{"role": "user", "content": job["task"]["instruction"]}]

    async def call(made: Any) -> dict[str, str]:
        try:
            arguments = json.loads(made.function.arguments)
        except ValueError:
            arguments = None
        body = {"name": made.function.name, "arguments": arguments}
        result = await client.post(job["tools_url"], body=body, cast_to=dict[str, Any])
        return {"role": "tool", "tool_call_id": made.id, "content": result["content"]}

    for _ in range(MAX_TURNS):
        answer = await client.chat.completions.create(
            model=job["model"],
            messages=messages,
            tools=job["tools"] or openai.omit,
            temperature=TEMPERATURE,
            max_tokens=128,
        )
        message = answer.choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages.append(message.model_dump(exclude_none=True))
        messages += await asyncio.gather(*(call(made) for made in message.tool_calls))
    return ""


async def work(client: openai.AsyncOpenAI, job: dict[str, Any]) -> None:
    own = client.with_options(base_url=job["base_url"], api_key=job["api_key"])
    try:
        answer = {"answer": await solve(own, job)}
    except openai.APIError as error:
        status = error.status_code if isinstance(error, openai.APIStatusError) else 503
        answer = {"answer": ""} if error.code in SPENT else {"error": str(error)}
        answer |= {"kind": "infra"} if "error" in answer and (status >= 500 or status == 429) else {}
    except Exception as error:  # noqa: BLE001  (an error is an answer; without one the job would wait for its time)
        answer = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps({"id": job["id"]} | answer), flush=True)


async def main() -> None:
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
            running[id] = asyncio.create_task(work(client, job))
            running[id].add_done_callback(partial(end, id))
    await asyncio.gather(*running.values())


if __name__ == "__main__":
    asyncio.run(main())
