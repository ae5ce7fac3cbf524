"""The syntaxes in which models write tool calls, each with its streaming parser; and which one a chat template uses.

    hermes    <tool_call>{"name": "f", "arguments": {"k": "v"}}</tool_call>          chatml.py
    minimax   <minimax:tool_call><invoke name="f"><parameter name="k">v…             minimax_m2.py
    xml       <tool_call><function=f><parameter=k>v</parameter></function></tool_call>
    glm       <tool_call>f<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>
    llama3    {"name": "f", "parameters": {"k": "v"}}, perhaps after <|python_tag|>, as the whole content
    mistral   [TOOL_CALLS][{"name": "f", "arguments": {"k": "v"}}] or [TOOL_CALLS]f[ARGS]{"k": "v"}, up to the end

Arguments in XML are bare text, typed by the tool's schema; in JSON they arrive typed. A malformed call is dropped and
reported, as everywhere (`parser`).

A syntax is recognised by probing: the template renders a call, and the syntax whose parser reads the same call back is
the template's.
"""

import json
import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Protocol

from m2forge.records import JsonValue
from m2forge.text.argument import read_argument, type_problem
from m2forge.text.chatml import HermesParser
from m2forge.text.message import Tool, ToolCall, parse_json
from m2forge.text.minimax_m2 import XmlCallParser
from m2forge.text.parser import CompletionParser, ProblemKind, markers_of, snippet

PROBE_TOOL = Tool(
    "probe",
    "Probes.",
    {"type": "object", "properties": {"text": {"type": "string"}, "number": {"type": "integer"}}},
)
PROBE_CALL = ToolCall("probe", {"text": "one two", "number": 3}, "probe0001")


class CallSyntax(Protocol):
    """A parser's class."""

    def __call__(
        self, tools: Sequence[Tool], *, end_marker: str, other_ends: tuple[str, ...], starts_thinking: bool
    ) -> CompletionParser: ...


class PlainParser(CompletionParser):
    """Reads thinking and content; the syntax of calls is unknown."""

    call_markers = (None, None)

    def _enter_call(self) -> None:
        raise AssertionError("no marker opens a call")

    def _close_call(self) -> bool:
        return False


# -- tags around XML ---------------------------------------------------------------------------------------------------


class _TaggedXmlParser(HermesParser):
    """Reads calls between the tags of Hermes whose arguments are bare text."""

    name_pattern: re.Pattern[str]
    """Matches from the beginning of a call up to its arguments; its group is the name."""
    argument_pattern: re.Pattern[str]
    """Its groups are name and text of an argument."""
    tail_pattern: re.Pattern[str]
    """Matches what follows the arguments."""

    def _read_call(self, body: str) -> None:
        found = self.name_pattern.match(body)
        if found is None:
            self._report(ProblemKind.MALFORMED_CALL, f"expected the name of a function: {snippet(body)}")
            return
        name, at = found.group(1).strip(), found.end()
        arguments: dict[str, JsonValue] = {}
        problems: list[str] = []
        while argument := self.argument_pattern.match(body, at):
            at = argument.end()
            key = argument.group(1).strip()
            value, problem = read_argument(argument.group(2), key, self._tools.get(name))
            problems += [] if problem is None else [f"{name}: {problem}"]
            problems += [f"{name}: {key!r} is given twice; the last counts"] if key in arguments else []
            arguments[key] = value
        if not self.tail_pattern.fullmatch(body, at):
            self._report(
                ProblemKind.MALFORMED_CALL, f"expected arguments and the end of the call: {snippet(body[at:])}"
            )
            return
        if self._started != name:
            self._start_call(name)
        for problem in problems:
            self._report(ProblemKind.BAD_ARGUMENT, problem)
        self._finish_call(name, arguments)


class FunctionXmlParser(_TaggedXmlParser):
    early_name = name_pattern = re.compile(r"\s*<function=([^>\n]+)>")
    argument_pattern = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
    tail_pattern = re.compile(r"\s*</function>\s*")


class KeyValueXmlParser(_TaggedXmlParser):
    early_name = re.compile(r"\s*([^\s<{][^\n<]*)(?:\n|<arg_key>)")
    name_pattern = re.compile(r"\s*([^\s<{][^\n<]*)")
    argument_pattern = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
    tail_pattern = re.compile(r"\s*")


# -- JSON up to the end ------------------------------------------------------------------------------------------------


class _TailCallParser(CompletionParser):
    """Reads calls that extend to the end of the completion."""

    def _prepare(self) -> None:
        self._body_end = markers_of(*self._ends)
        self._parts: list[str] = []

    def _enter_call(self) -> None:
        self._parts = []
        self._state = self._body

    def _close_call(self) -> bool:
        if self._state != self._body:
            return False
        self._cut_off("".join(self._parts))
        return True

    def _cut_off(self, body: str) -> None:
        self._report(ProblemKind.UNCLOSED_CALL, f"the text ended before {self._ends[0]}")

    def _body(self, final: bool) -> bool:
        text, marker = self._take(self._body_end, final)
        self._parts.append(text)
        if marker is None:
            return False
        self._read_calls("".join(self._parts))
        return self._end()

    @abstractmethod
    def _read_calls(self, body: str) -> None:
        """Read the calls in the text after the marker that opens them."""

    def _read_call(self, name: object, arguments: JsonValue, body: str) -> None:
        if isinstance(arguments, str):
            try:
                arguments = parse_json(arguments)
            except ValueError:
                arguments = None
        if not isinstance(name, str) or not isinstance(arguments, Mapping):
            self._report(ProblemKind.MALFORMED_CALL, f"expected a name and an object of arguments: {snippet(body)}")
            return
        self._start_call(name)
        tool = self._tools.get(name)
        for key, value in arguments.items() if tool is not None else ():
            problem = type_problem(value, key, tool) if tool is not None else None
            if problem is not None:
                self._report(ProblemKind.BAD_ARGUMENT, f"{name}: {problem}")
        self._finish_call(name, dict(arguments))


class MistralParser(_TailCallParser):
    """Content may precede the calls. An id that the model writes is not used."""

    open, args, id = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
    call_markers = (open, None)

    def _read_calls(self, body: str) -> None:
        if not body.lstrip().startswith("["):
            for part in body.split(self.open):
                self._read_named(part)
            return
        try:
            calls = parse_json(body.strip())
        except ValueError as error:
            self._report(ProblemKind.MALFORMED_CALL, f"not JSON ({error}): {snippet(body)}")
            return
        for call in calls if isinstance(calls, list) else ():
            fields = call if isinstance(call, Mapping) else {}
            self._read_call(fields.get("name"), fields.get("arguments", {}), body)

    def _read_named(self, part: str) -> None:
        """`name[ARGS]{…}`, perhaps with an id after the name; older models write the object right after the name."""
        name, found, text = part.partition(self.args)
        if not found:
            name, found, text = part.partition("{")
            text = found + text
        try:
            arguments = parse_json(text.strip())
        except ValueError as error:
            self._report(ProblemKind.MALFORMED_CALL, f"not JSON ({error}): {snippet(part)}")
            return
        name = name.partition(self.id)[0].strip()
        self._read_call(name or None, arguments, part)


_CALL_HEAD = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"[^"]*"\s*,\s*"(?:parameters|arguments)"'
)
_SEPARATORS = re.compile(r"[\s;]*")
_DECODER = json.JSONDecoder(strict=False)


def _skip_separators(text: str, at: int) -> int:
    found = _SEPARATORS.match(text, at)
    return at if found is None else found.end()


class Llama3Parser(_TailCallParser):
    """JSON is a call if it is the whole content and tools are offered; text that begins like JSON is held back until
    its end shows what it is. Several calls are separated by semicolons or newlines."""

    call_markers = ("<|python_tag|>", None)

    def _prepare(self) -> None:
        super()._prepare()
        self._is_begun = False
        self._is_tagged = False

    def _write(self, final: bool) -> bool:
        if self._is_begun or not self._tools:
            return super()._write(final)
        head = self._text[self._at :].lstrip()
        if not head and not final:
            return False
        self._is_begun = True
        if head.startswith("{"):
            super()._enter_call()
            return True
        return super()._write(final)

    def _enter_call(self) -> None:
        self._is_tagged = True
        super()._enter_call()

    def _cut_off(self, body: str) -> None:
        if self._is_tagged or _CALL_HEAD.match(body.lstrip()):
            super()._cut_off(body)
        else:
            self._add_content(body)

    def _read_calls(self, body: str) -> None:
        calls, at = [], 0
        try:
            while (start := _skip_separators(body, at)) < len(body):
                at = _DECODER.raw_decode(body, start)[1]
                calls.append(parse_json(body[start:at]))
        except (ValueError, RecursionError) as error:
            if self._is_tagged or _CALL_HEAD.match(body.lstrip()):
                self._report(ProblemKind.MALFORMED_CALL, f"not JSON ({error}): {snippet(body)}")
            else:
                self._add_content(body)
            return
        named = [call for call in calls if isinstance(call, Mapping) and {"parameters", "arguments"} & {*call}]
        if not self._is_tagged and (len(named) < len(calls) or not all("name" in call for call in named)):
            self._add_content(body)
            return
        for call in calls:
            fields = call if isinstance(call, Mapping) else {}
            self._read_call(fields.get("name"), fields.get("parameters", fields.get("arguments", {})), body)


SYNTAXES: Mapping[str, CallSyntax] = {
    "hermes": HermesParser,
    "minimax": XmlCallParser,
    "xml": FunctionXmlParser,
    "glm": KeyValueXmlParser,
    "mistral": MistralParser,
    "llama3": Llama3Parser,
}


def recognise(completion: str, ends: tuple[str, ...], *, starts_thinking: bool, think_lead: str) -> str | None:
    """The name of the syntax in which `completion` calls `PROBE_CALL`; None if it is none of these."""
    for name, syntax in SYNTAXES.items():
        parser = syntax([PROBE_TOOL], end_marker=ends[0], other_ends=ends[1:], starts_thinking=starts_thinking)
        parser.think_lead = think_lead
        parser.feed(completion)
        read = parser.finish()
        calls = [(call.name, call.arguments) for call in read.tool_calls]
        if calls == [(PROBE_CALL.name, PROBE_CALL.arguments)] and not read.content.strip():
            return name
    return None
