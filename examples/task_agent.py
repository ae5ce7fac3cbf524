"""An agent program with tools, by OpenAI's SDK: it knows nothing of training.

It lives across tasks and works on several at once: jobs come in as lines of JSON, answers go out as lines of JSON.
Where the policy is, and with which key, every job says. The tools are those of the task's own family.
"""

import asyncio
import json
import sys
from functools import partial
from typing import Any

import openai

from m2forge.records import Domain, Task
from m2forge.tasks.catalog import family_of
from m2forge.text.message import tool_to_openai

MAX_TURNS = 24
TEMPERATURE = 1.0
SPENT = (400, 429)
"""A context that is full, or a budget that is spent: the attempt ends there."""


async def solve(client: openai.AsyncOpenAI, model: str, task: Task) -> str:
    family = family_of(task)
    tools: Any = [tool_to_openai(tool) for tool in family.tools(task)] or openai.omit
    messages: list[Any] = [{"role": "user", "content": task.instruction}]

    async def call(made: Any) -> dict[str, str]:
        await asyncio.sleep(family.latency_s(task, made.function.name))
        try:
            arguments = json.loads(made.function.arguments)
        except ValueError:
            arguments = None
        result = family.call(task, made.function.name, arguments)
        return {"role": "tool", "tool_call_id": made.id, "content": result}

    for _ in range(MAX_TURNS):
        answer = await client.chat.completions.create(
            model=model, messages=messages, tools=tools, temperature=TEMPERATURE, max_tokens=128
        )
        message = answer.choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages.append(message.model_dump(exclude_none=True))
        messages += await asyncio.gather(*(call(made) for made in message.tool_calls))
    return ""


async def work(client: openai.AsyncOpenAI, job: dict[str, Any]) -> None:
    told = job["task"]
    task = Task(**told | {"domain": Domain(told["domain"])})
    own = client.with_options(base_url=job["base_url"], api_key=job["api_key"])
    try:
        answer = {"answer": await solve(own, job["model"], task)}
    except openai.APIError as error:
        status = error.status_code if isinstance(error, openai.APIStatusError) else 503
        answer = {"answer": ""} if status in SPENT else {"error": str(error)}
        answer |= {"kind": "infra"} if status >= 500 else {}
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
