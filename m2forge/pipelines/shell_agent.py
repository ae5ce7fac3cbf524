"""A model at work with one tool, a shell in a sandbox: messages in, the whole conversation and how it ended out.

    messages ─▶ completion ─▶ its calls run in the sandbox ─▶ results ─▶ completion ─▶ … ─▶ one without calls

A repeated command may print other output (times, process ids), which would change the next request. So a result is
stored before the model sees it, and a resumed or replayed attempt shows the model the stored one: it runs the same
commands, and every completion is in the store.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, cast

from m2forge.errors import EngineError
from m2forge.pipelines.shared_stage import Fields
from m2forge.pipelines.stage import Context, Item, Messages
from m2forge.protocols import Command, OutcomeReason, Sandbox
from m2forge.records import JsonValue

Ended: TypeAlias = Literal["answer", "turns"]
"""answer: a completion without calls; turns: none within the limit."""
MAX_CHARACTERS = 8000
MARKUP = re.compile(r"</?(tool_call|minimax:tool_call|invoke|function_calls?)\b|<\|[a-z_]+\|>")
"""Markup of tool calls that a server did not parse."""


class Malformed(Exception):
    """A completion that no conversation for training may contain."""

    def __init__(self, reason: str, received: str) -> None:
        super().__init__(reason)
        self.reason, self.received = reason, received


@dataclass(frozen=True, slots=True)
class Shell:
    """The tool."""

    sandbox: Sandbox
    name: str = "shell"
    description: str = "Run a command."
    env: Mapping[str, str] = field(default_factory=dict)
    command_s: float = 60.0
    """Timeout of a command."""
    max_characters: int = MAX_CHARACTERS
    """Characters of a command's output that the model sees, half from its beginning and half from its end."""

    @property
    def tool(self) -> Fields:
        """In OpenAI's form."""
        parameters: Fields = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
        function: Fields = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}

    def run(self, command: str, context: Context) -> str:
        """The result that the model sees: the command's output, and its status unless it is 0. Raises if the sandbox
        ended."""
        outcome = context.run(self.sandbox.run(Command(("sh", "-c", command), self.env, b"", self.command_s)))
        if self.sandbox.is_lost:
            raise EngineError("the sandbox ended during a command")
        text = outcome.stdout.text() + outcome.stderr.text()
        if len(text) > self.max_characters:
            begin, end = self.max_characters // 2, len(text) - (self.max_characters - self.max_characters // 2)
            text = f"{text[:begin]}\n[{end - begin} characters left out]\n{text[end:]}"
        if outcome.reason is not OutcomeReason.EXITED:
            return text + f"{outcome.reason}\n"
        return text + f"status {outcome.status}\n" if outcome.status else text


def converse(
    shell: Shell, item: Item, context: Context, model: str, messages: Messages, *, draw: int, max_turns: int
) -> tuple[list[Fields], Ended]:
    """`draw`: the number of the attempt. Raises `Malformed`; then the sandbox keeps the effects of earlier calls."""
    spoken = list(messages)
    for _ in range(max_turns):
        completion = context.ask(model, spoken, tools=[shell.tool], draw=draw)
        if completion.finish_reason == "length":
            raise Malformed("cut off", completion.content)
        message = clean_message(completion.message, shell.name)
        key: list[JsonValue] = [item.id, draw, dict(shell.env), *spoken, message]
        spoken.append(message)
        calls = calls_of(message)
        if not calls:
            return spoken, "answer"
        for number, call in enumerate(calls):
            result = context.remember([*key, number], shell.run(command_of(call), context))
            spoken.append(result_message(call, result))
    return spoken, "turns"


# -- messages ----------------------------------------------------------------------------------------------------------


def calls_of(message: Fields) -> list[Fields]:
    return cast("list[Fields]", message.get("tool_calls") or [])


def command_of(call: Fields) -> str:
    arguments = cast("Fields", call["function"])["arguments"]
    return str(json.loads(str(arguments))["command"])


def call_message(tool: str, command: str) -> Fields:
    function: Fields = {"name": tool, "arguments": json.dumps({"command": command}, ensure_ascii=False)}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
    }


def result_message(call: Fields, text: str) -> Fields:
    return {"role": "tool", "tool_call_id": call["id"], "content": text}


def clean_message(message: Fields, tool: str) -> Fields:
    """An assistant's message with what training needs: content, thinking, calls. Raises `Malformed`."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        raise Malformed("content is no text", json.dumps(content))
    if match := MARKUP.search(content):
        raise Malformed("markup in the text", content[match.start() :])
    calls: list[JsonValue] = []
    for number, call in enumerate(cast("Sequence[JsonValue]", message.get("tool_calls") or ()), start=1):
        function = call.get("function") if isinstance(call, Mapping) else None
        arguments = function.get("arguments") if isinstance(function, Mapping) else None
        shown = json.dumps(call, ensure_ascii=False)
        if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(arguments, str):
            raise Malformed("malformed tool call", shown)
        try:
            given = json.loads(arguments)
        except ValueError:
            raise Malformed("malformed tool call", shown) from None
        if function.get("name") != tool or not isinstance(given, dict) or set(given) != {"command"}:
            raise Malformed("malformed tool call", shown)
        if not isinstance(given["command"], str) or "\0" in given["command"]:
            raise Malformed("malformed tool call", shown)
        called: Fields = {"name": tool, "arguments": json.dumps(given, ensure_ascii=False)}
        calls.append({"id": str(call.get("id") or f"call_{number}"), "type": "function", "function": called})
    if not content and not calls:
        raise Malformed("empty message", "")
    cleaned: dict[str, JsonValue] = {"role": "assistant", "content": content}
    if isinstance(thinking := message.get("reasoning_content"), str) and thinking:
        cleaned["reasoning_content"] = thinking
    return cleaned | ({"tool_calls": calls} if calls else {})
