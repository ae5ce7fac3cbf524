"""Parses calls written as JSON between tags, as by Hermes and Qwen models:

    <tool_call>
    {"name": "f", "arguments": {"k": "v"}}
    </tool_call>

A newline before `<tool_call>` belongs to it. A call ends at the first `</tool_call>`, even inside a string. Its
arguments arrive typed; a type that the tool's schema does not allow is reported and kept.
"""

import re
from collections.abc import Mapping, Sequence

from m2forge.records import JsonValue
from m2forge.text.argument import type_problem
from m2forge.text.completion import ProblemKind
from m2forge.text.json_value import parse_json
from m2forge.text.message import Tool
from m2forge.text.parser import CompletionParser, markers_of, snippet

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
_EARLY_NAME = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]*)"')
_EARLY_LENGTH = 256
"""Number of leading characters in which the name is searched while the call is still streaming."""


class HermesParser(CompletionParser):
    def __init__(self, tools: Sequence[Tool], *, end_marker: str, starts_thinking: bool) -> None:
        super().__init__(
            tools,
            end_marker=end_marker,
            call_markers=(CALL_OPEN, CALL_CLOSE),
            call_lead="\n",
            starts_thinking=starts_thinking,
        )
        self._body_end = markers_of(CALL_CLOSE)
        self._parts: list[str] = []
        self._head = ""
        self._started: str | None = None

    def _enter_call(self) -> None:
        self._parts, self._head, self._started = [], "", None
        self._state = self._body

    def _close_call(self) -> bool:
        if self._state != self._body:
            return False
        # The end marker has no meaning inside JSON, but at the very end of the text it still ends the completion.
        self._closed = self._closed or "".join(self._parts).endswith(self._end_marker)
        self._report(ProblemKind.UNCLOSED_CALL, f"the text ended before {CALL_CLOSE}")
        return True

    def _body(self, final: bool) -> bool:
        text, marker = self._take(self._body_end, final)
        self._parts.append(text)
        if self._started is None and len(self._head) < _EARLY_LENGTH:
            self._head = (self._head + text)[:_EARLY_LENGTH]
            found = _EARLY_NAME.match(self._head)
            if found:
                self._started = found.group(1)
                self._start_call(self._started)
        if marker is None:
            return False
        self._read_call("".join(self._parts))
        self._state = self._after_call
        return True

    def _read_call(self, body: str) -> None:
        try:
            call = parse_json(body.strip())
            name = call.get("name") if isinstance(call, Mapping) else None
            arguments = call.get("arguments", {}) if isinstance(call, Mapping) else None
            if isinstance(arguments, str):
                arguments = parse_json(arguments)
        except ValueError as error:
            self._report(ProblemKind.MALFORMED_CALL, f"not JSON ({error}): {snippet(body)}")
            return
        if not isinstance(name, str) or not isinstance(arguments, Mapping):
            self._report(ProblemKind.MALFORMED_CALL, f"expected a name and an object of arguments: {snippet(body)}")
            return
        if self._started != name:
            # The name came late, or the object has two names and the last counts.
            self._start_call(name)
        self._check_types(name, arguments)
        self._finish_call(name, dict(arguments))

    def _check_types(self, name: str, arguments: Mapping[str, JsonValue]) -> None:
        tool = self._tools.get(name)
        for parameter, value in arguments.items() if tool is not None else ():
            problem = type_problem(value, parameter, tool) if tool is not None else None
            if problem is not None:
                self._report(ProblemKind.BAD_ARGUMENT, f"{name}: {problem}")
