"""An agent that repairs one line of a file, by OpenAI's SDK, with the tools read, edit and test.

It lives across tasks (`m2forge/agents/worker.py`). Its commands run in the attempt's sandbox, which holds code.py with
a function that has a bug, tests.json with examples of its results, and check.py, which runs them. Every edit starts
from the file as it was given, so that a wrong edit needs no repair. The attempt ends when the tests pass, when a
message has no call, or when the budget of the run is spent. The verifier has more examples.
"""

import json
from dataclasses import dataclass
from functools import partial
from typing import Any

import openai

from m2forge.agents.worker import InfraError, Job, serve

CODE, TESTS, CHECK = "code.py", "tests.json", "check.py"
MAX_TURNS = 5
MAX_TOKENS = 192
MAX_RESULT = 300
"""Characters of a test's output that the model sees."""
TEST_S = 10.0
SYSTEM = "You repair code.py. One line has a bug. Read the file, then edit and test until the tests pass."
SPENT = ("context_length_exceeded", "insufficient_quota")
"""Codes of errors: a full context, or a spent budget. The attempt ends there."""


def _tool(name: str, description: str, **parameters: str) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS: list[Any] = [
    _tool("read", "Show code.py."),
    _tool("edit", "Replace a line of the given code.py.", line="integer", text="string"),
    _tool("test", "Run the tests."),
]


def number_lines(source: str) -> str:
    return "\n".join(f"{number} {line}" for number, line in enumerate(source.splitlines(), start=1))


def edit(source: str, line: object, text: object) -> str | None:
    """The source with another line, indented as it was; None if there is no such line."""
    lines = source.splitlines()
    if not isinstance(line, int) or not isinstance(text, str) or not 1 <= line <= len(lines):
        return None
    old = lines[line - 1]
    lines[line - 1] = old[: len(old) - len(old.lstrip())] + text.strip()
    return "\n".join(lines) + "\n"


def first_messages(instruction: str) -> list[dict[str, Any]]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": instruction}]


@dataclass
class Repair:
    """One attempt's file."""

    job: Job
    given: str
    """The source at the start."""
    is_passed: bool = False

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        match name:
            case "read":
                return number_lines(self.given)
            case "edit":
                changed = edit(self.given, arguments.get("line"), arguments.get("text"))
                if changed is None:
                    return "error: expected the number of a line, and its text"
                await self.job.write_file(CODE, changed.encode())
                return "edited"
            case "test":
                return await self._test()
        return f"error: no tool {name!r}; use read, edit or test"

    async def _test(self) -> str:
        result = await self.job.run(["python3", "-I", "-S", CHECK, TESTS], timeout_s=TEST_S)
        self.is_passed = result.reason == "exited" and result.status == 0
        return result.stdout.strip()[:MAX_RESULT] or "failed: the tests did not run"


async def attempt(job: Job, client: openai.AsyncOpenAI) -> str:
    policy = client.with_options(base_url=job.base_url, api_key=job.api_key)
    repair = Repair(job, (await job.read_file(CODE)).decode())
    messages: list[Any] = first_messages(job.instruction)
    for _ in range(MAX_TURNS):
        answer = await policy.chat.completions.create(
            model=job.model, messages=messages, tools=TOOLS, temperature=1.0, max_tokens=MAX_TOKENS
        )
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        messages += [await _answer(repair, call) for call in message.tool_calls or ()]
        if repair.is_passed or not message.tool_calls:
            break
    return "repaired" if repair.is_passed else "not repaired"


async def _answer(repair: Repair, call: Any) -> dict[str, str]:
    try:
        arguments = json.loads(call.function.arguments)
    except ValueError:
        arguments = None
    content = await repair.call(call.function.name, arguments if isinstance(arguments, dict) else {})
    return {"role": "tool", "tool_call_id": call.id, "content": content}


async def work(job: Job, client: openai.AsyncOpenAI) -> str:
    try:
        return await attempt(job, client)
    except openai.APIError as error:
        if error.code in SPENT:
            return "not repaired"
        status = error.status_code if isinstance(error, openai.APIStatusError) else 503
        if status >= 500 or status == 429:
            raise InfraError(str(error)) from error
        raise


if __name__ == "__main__":
    CLIENT = openai.AsyncOpenAI(api_key="given by each job", max_retries=2)
    serve(partial(work, client=CLIENT))
