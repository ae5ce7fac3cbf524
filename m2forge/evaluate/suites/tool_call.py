"""Tool-call validity: conversations truncated before a call of the assistant; does the model make a well-formed call?

A completion is *valid* if it ends, the chat format's parser finds no problem in it, it has at least one call, and every
call names a known tool, gives all required arguments, no unknown ones, and values that fit the schema. It is *equal*
if its calls match the reference in names and arguments.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from m2forge.errors import FormatError
from m2forge.evaluate.prompts.prompt_file import require_list
from m2forge.records import JsonValue
from m2forge.text.json_schema import argument_violations
from m2forge.text.message import Message, Tool, ToolCall, message_from_openai, tool_from_openai
from m2forge.text.parser import Completion, ProblemKind

_PARSER_PROBLEMS = (ProblemKind.UNKNOWN_TOOL, ProblemKind.BAD_ARGUMENT)
"""Problems for which the parser's message is enough. It checks the arguments, but not values nested in them."""


@dataclass(frozen=True, slots=True)
class ToolPrompt:
    messages: tuple[Message, ...]
    """The messages before the call."""
    tools: tuple[Tool, ...]
    reference: tuple[ToolCall, ...]
    """The calls of the reference turn; empty if the record ends before one."""


@dataclass(frozen=True, slots=True)
class Verdict:
    reasons: tuple[str, ...]
    """Why the completion is invalid; empty if it is valid."""
    is_equal: bool

    @property
    def is_valid(self) -> bool:
        return not self.reasons


def parse_tool_prompt(record: Mapping[str, JsonValue]) -> ToolPrompt:
    """Parse a line of {"messages", "tools"}: truncated before the last assistant turn that calls a tool or, if there is
    no assistant message, all of it."""
    messages = tuple(message_from_openai(message) for message in require_list(record, "messages"))
    tools = tuple(tool_from_openai(tool) for tool in require_list(record, "tools"))
    if not messages or not tools:
        raise FormatError("expected at least one message and one tool")
    calling = [index for index, message in enumerate(messages) if message.tool_calls]
    if calling and calling[-1] > 0:
        return ToolPrompt(messages[: calling[-1]], tools, messages[calling[-1]].tool_calls)
    if any(message.role == "assistant" for message in messages):
        raise FormatError("the assistant never calls a tool after a message: there is no call to ask for")
    return ToolPrompt(messages, tools, ())


def judge(completion: Completion, tools: Sequence[Tool], reference: Sequence[ToolCall]) -> Verdict:
    reasons = [f"{problem.kind}: {problem.detail}" for problem in completion.problems]
    if not completion.tool_calls:
        reasons.append("no tool call")
    if not completion.closed:
        reasons.append("the completion does not end")
    if not any(problem.kind in _PARSER_PROBLEMS for problem in completion.problems):
        reasons += _call_violations(completion.tool_calls, tools)
    made = [(call.name, call.arguments) for call in completion.tool_calls]
    return Verdict(tuple(reasons), made == [(call.name, call.arguments) for call in reference])


def _call_violations(calls: Sequence[ToolCall], tools: Sequence[Tool]) -> list[str]:
    by_name = {tool.name: tool for tool in tools}
    violations = []
    for call in calls:
        if call.name not in by_name:
            violations.append(f"unknown tool {call.name!r}")
        else:
            wrong = argument_violations(call.arguments, by_name[call.name].parameters)
            violations += [f"{call.name}: {violation}" for violation in wrong]
    return violations
