"""Parses calls written as XML tags, each argument as the bare text of its tag:

    <minimax:tool_call>
    <invoke name="f">
    <parameter name="k">v</parameter>
    </invoke>
    </minimax:tool_call>

An argument ends at the first `</parameter>` and is typed by the tool's schema; see `argument`. No other tag is parsed
inside it, not even the end marker, so a call may contain any other text of this format.
"""

import re
from collections.abc import Callable, Sequence

from m2forge.records import JsonValue
from m2forge.text.argument import read_argument
from m2forge.text.completion import ProblemKind
from m2forge.text.message import Tool
from m2forge.text.parser import CompletionParser, markers_of, snippet

CALLS_OPEN, CALLS_CLOSE = "<minimax:tool_call>", "</minimax:tool_call>"
CALL_LEAD = "\n"
"""Separates content and calls, and belongs to neither."""
PARAMETER_CLOSE = "</parameter>"
_INVOKE, _INVOKE_CLOSE, _PARAMETER = "<invoke", "</invoke>", "<parameter"
_NAME = re.compile(r"""\s+name\s*=\s*(?:"(?P<double>[^"]*)"|'(?P<single>[^']*)'|(?P<bare>[^\s"'>]+))\s*""")


class XmlCallParser(CompletionParser):
    def __init__(self, tools: Sequence[Tool], *, end_marker: str, starts_thinking: bool) -> None:
        super().__init__(
            tools,
            end_marker=end_marker,
            call_markers=(CALLS_OPEN, CALLS_CLOSE),
            call_lead=CALL_LEAD,
            starts_thinking=starts_thinking,
        )
        self._between_markers = markers_of(_INVOKE, CALLS_CLOSE, end_marker)
        self._inside_markers = markers_of(_PARAMETER, _INVOKE_CLOSE, _INVOKE, CALLS_CLOSE, end_marker)
        self._tag_end, self._value_end = markers_of(">"), markers_of(PARAMETER_CLOSE)
        self._parts: list[str] = []
        self._name: str | None = None
        self._parameter = ""
        self._arguments: dict[str, JsonValue] = {}
        self._num_in_block = 0
        self._awaited: tuple[tuple[Callable[[bool], bool], str], ...] = (
            (self._between, CALLS_CLOSE),
            (self._invoke_tag, ">"),
            (self._inside, _INVOKE_CLOSE),
            (self._parameter_tag, ">"),
            (self._value, PARAMETER_CLOSE),
        )

    def _strays(self) -> tuple[str, ...]:
        return (*super()._strays(), _INVOKE_CLOSE, PARAMETER_CLOSE)

    def _enter_call(self) -> None:
        self._num_in_block = 0
        self._state = self._between

    def _close_call(self) -> bool:
        awaited = next((tag for state, tag in self._awaited if state == self._state), None)
        if awaited is None:
            return False
        # Where the end marker has no meaning, at the very end of the text it still ends the completion.
        text = "".join(self._parts)
        self._closed = self._closed or text.endswith(self._end_marker)
        self._report(ProblemKind.UNCLOSED_CALL, f"the text ended before {awaited}")
        return True

    # -- states -------------------------------------------------------------------------------------------------------

    def _between(self, final: bool) -> bool:
        """Inside the block, outside every call."""
        text, marker = self._take(self._between_markers, final)
        self._parts.append(text)
        if marker is None:
            return False
        self._drop_parts()
        if marker == _INVOKE:
            self._num_in_block += 1
            self._state = self._invoke_tag
        elif marker == CALLS_CLOSE:
            self._leave_block()
        else:
            self._report(ProblemKind.UNCLOSED_CALL, f"{marker} before {CALLS_CLOSE}")
            return self._end()
        return True

    def _invoke_tag(self, final: bool) -> bool:
        text, marker = self._take(self._tag_end, final)
        self._parts.append(text)
        if marker is None:
            return False
        self._name, self._arguments = self._read_name(_INVOKE), {}
        if self._name is not None:
            self._start_call(self._name)
        self._state = self._inside
        return True

    def _inside(self, final: bool) -> bool:
        """Inside a call, outside its parameters."""
        text, marker = self._take(self._inside_markers, final)
        self._parts.append(text)
        if marker is None:
            return False
        self._drop_parts()
        if marker == _PARAMETER:
            self._state = self._parameter_tag
            return True
        if marker == self._end_marker:
            self._report(ProblemKind.UNCLOSED_CALL, f"{marker} before {_INVOKE_CLOSE}")
            return self._end()
        if marker != _INVOKE_CLOSE:
            self._report(ProblemKind.UNCLOSED_CALL, f"{marker} before {_INVOKE_CLOSE}")
        if self._name is not None:
            self._finish_call(self._name, self._arguments)
        self._state = self._between
        if marker == _INVOKE:
            self._num_in_block += 1
            self._state = self._invoke_tag
        elif marker == CALLS_CLOSE:
            self._leave_block()
        return True

    def _parameter_tag(self, final: bool) -> bool:
        text, marker = self._take(self._tag_end, final)
        self._parts.append(text)
        if marker is None:
            return False
        name = self._read_name(_PARAMETER)
        if name is None:
            # Without its name an argument is lost, and so is the call.
            self._name = None
        self._parameter = name or ""
        self._state = self._value
        return True

    def _value(self, final: bool) -> bool:
        text, marker = self._take(self._value_end, final)
        self._parts.append(text)
        if marker is None:
            return False
        if self._name is not None:
            self._add_argument(self._name, self._parameter, "".join(self._parts))
        self._parts.clear()
        self._state = self._inside
        return True

    # -- results ------------------------------------------------------------------------------------------------------

    def _leave_block(self) -> None:
        if not self._num_in_block:
            self._report(ProblemKind.MALFORMED_CALL, f"no call between {CALLS_OPEN} and {CALLS_CLOSE}")
        self._state = self._after_call

    def _drop_parts(self) -> None:
        text = "".join(self._parts)
        self._parts.clear()
        if text and not text.isspace():
            self._report(ProblemKind.TEXT_IN_CALL, snippet(text))

    def _read_name(self, tag: str) -> str | None:
        attributes = "".join(self._parts)
        self._parts.clear()
        found = _NAME.fullmatch(attributes)
        if found is None:
            self._report(ProblemKind.MALFORMED_CALL, f"{tag} with {snippet(attributes)} has no name")
            return None
        return next(name for name in found.groups() if name is not None)

    def _add_argument(self, call: str, name: str, text: str) -> None:
        value, problem = read_argument(text, name, self._tools.get(call))
        if problem is not None:
            self._report(ProblemKind.BAD_ARGUMENT, f"{call}: {problem}")
        if name in self._arguments:
            self._report(ProblemKind.BAD_ARGUMENT, f"{call}: {name!r} is given twice; the last counts")
        self._arguments[name] = value
