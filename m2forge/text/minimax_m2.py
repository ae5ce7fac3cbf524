"""The chat format of MiniMax-M2: messages in, token ids out; completions are parsed by `XmlCallParser`.

    ]~!b[]~b]system⏎…[e~[⏎
    ]~b]user⏎…[e~[⏎
    ]~b]ai⏎<think>⏎thinking⏎</think>⏎⏎content⏎<minimax:tool_call>⏎…</minimax:tool_call>[e~[⏎
    ]~b]tool⏎<response>…</response>⏎<response>…</response>[e~[⏎
    ]~b]ai⏎<think>⏎                                                  (the generation prompt)

The text is that of the published chat template, except for what keeps a conversation's prefix stable:

- Every assistant message begins with the generation prompt, so one without thinking has an empty `<think>` block. The
  template writes none.
- Thinking stays in the history. With `drop_thinking` it is dropped as in the template: messages before the last user
  message lose their block. That rewrites what was sent before, so `extend` refuses a user message after them, and
  since no sampler would produce them that way, they are not trained.
- What follows a message belongs to the next: the newline after `[e~[`, and after tool results the `[e~[` itself,
  because another result may join the block. So a sampled completion, which ends in `[e~[`, is a whole message, and
  render(history) followed by extend(history, new) equals render(history + new) wherever the history ends.

Results have no ids, so they answer the calls in order. String arguments are written verbatim, others as JSON. A message
that could not be parsed back unchanged is refused: one with the tags of thinking and calls or the end marker where the
parser would read them as such.

`XmlCallParser` reads calls written as XML tags, each argument as the bare text of its tag:

    <minimax:tool_call>
    <invoke name="f">
    <parameter name="k">v</parameter>
    </invoke>
    </minimax:tool_call>

An argument ends at the first `</parameter>` and is typed by the tool's schema; see `argument`. No other tag is parsed
inside it, not even the end marker, so a call may contain any other text of this format.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

from m2forge.errors import FormatError, PrefixError, suggest
from m2forge.records import JsonValue
from m2forge.text.argument import read_argument
from m2forge.text.message import MAX_DEPTH, Message, Tool, ToolCall, is_deeper, tool_to_openai
from m2forge.text.parser import THINK_CLOSE, THINK_OPEN, CompletionParser, ProblemKind, markers_of, snippet
from m2forge.text.tokenizer import END_OF_TEXT, Rendered, Segment, Tokenizer, encode_segments, mark, plain

CALLS_OPEN, CALLS_CLOSE = "<minimax:tool_call>", "</minimax:tool_call>"
CALL_LEAD = "\n"
"""Separates content and calls, and belongs to neither."""
PARAMETER_CLOSE = "</parameter>"
_INVOKE, _INVOKE_CLOSE, _PARAMETER = "<invoke", "</invoke>", "<parameter"
_NAME = re.compile(r"""\s+name\s*=\s*(?:"(?P<double>[^"]*)"|'(?P<single>[^']*)'|(?P<bare>[^\s"'>]+))\s*""")


class XmlCallParser(CompletionParser):
    call_markers = (CALLS_OPEN, CALLS_CLOSE)
    call_lead = CALL_LEAD

    def _prepare(self) -> None:
        self._between_markers = markers_of(_INVOKE, CALLS_CLOSE, *self._ends)
        self._inside_markers = markers_of(_PARAMETER, _INVOKE_CLOSE, _INVOKE, CALLS_CLOSE, *self._ends)
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
        self._closed = self._closed or text.endswith(self._ends)
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
        if marker in self._ends:
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


BEGIN, OPEN, END = "]~!b[", "]~b]", "[e~["
_NEEDED = (BEGIN, OPEN, END, THINK_OPEN, THINK_CLOSE, CALLS_OPEN, CALLS_CLOSE)
MINIMAX_M2_SPECIALS: tuple[str, ...] = (END_OF_TEXT, *_NEEDED)
"""Special tokens that a tokenizer trained for this format needs: its markers, and the document separator."""

DEFAULT_SYSTEM = "You are a helpful assistant."
"""Used if a conversation has no system message; an empty one stays empty."""

_TOOLS_HEAD = (
    "\n\n# Tools\nYou may call one or more tools to assist with the user query.\n"
    "Here are the tools available in JSONSchema format:\n\n<tools>\n"
)
_TOOLS_TAIL = "</tools>\n\nWhen making tool calls, use XML format to invoke tools and pass parameters:\n\n"
_TOOLS_EXAMPLE = (
    '\n<invoke name="tool-name-1">\n<parameter name="param-key-1">param-value-1</parameter>\n'
    '<parameter name="param-key-2">param-value-2</parameter>\n...\n</invoke>\n'
)
_GENERATION = (mark(OPEN), plain("ai\n"), mark(THINK_OPEN), plain("\n"))


class MiniMaxM2Format:
    """See `ChatFormat`."""

    name = "minimax_m2"

    def __init__(self, tokenizer: Tokenizer, *, drop_thinking: bool = False) -> None:
        missing = [text for text in _NEEDED if text not in tokenizer.special_ids]
        if missing:
            raise FormatError(
                f"the tokenizer lacks {', '.join(missing)}, special tokens of the minimax_m2 format; "
                f"{suggest(missing[0], tokenizer.special_ids)}"
            )
        self.tokenizer = tokenizer
        self.stop_ids: tuple[int, ...] = (tokenizer.special(END),)
        self.closing_ids: tuple[int, ...] = self.stop_ids
        self._drop_thinking = drop_thinking

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, generation: bool = False) -> Rendered:
        return self.extend((), messages, tools, generation=generation)

    def extend(
        self,
        history: Sequence[Message],
        new: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        generation: bool = False,
    ) -> Rendered:
        segments = list(self._segments(history, new, tools, generation))
        return encode_segments(segments, self.tokenizer)

    def parser(self, tools: Sequence[Tool] = ()) -> XmlCallParser:
        return XmlCallParser(tools, end_marker=END, starts_thinking=True)

    def _segments(
        self, history: Sequence[Message], new: Sequence[Message], tools: Sequence[Tool], generation: bool
    ) -> Iterator[Segment]:
        messages = [*history, *new]
        last_user = _last_user(messages) if self._drop_thinking else -1
        if self._drop_thinking:
            _refuse_rewriting(history, last_user)
        if not history and (new or generation):
            system = messages[0].content if messages and messages[0].role == "system" else DEFAULT_SYSTEM
            yield from _system(system, tools)
        first = _first_result(history)
        for index in range(len(history), len(messages)):
            message, before = messages[index], messages[index - 1].role if index else None
            if message.role == "system":
                if index:
                    _refuse(index, message, "only the first message may be the system's")
            elif message.role == "tool":
                first = first if before == "tool" else index
                yield from _result(messages, index, first)
            else:
                yield from _opening(before)
                yield from _user(message) if message.role == "user" else _assistant(index, message, index < last_user)
        if generation:
            yield from _opening(messages[-1].role if messages else None)
            yield from _GENERATION


# -- the parts of a conversation --------------------------------------------------------------------------------------


def _system(content: str, tools: Sequence[Tool]) -> Iterator[Segment]:
    yield from (mark(BEGIN), mark(OPEN))
    if tools:
        listed = "".join(f"<tool>{_json(tool_to_openai(tool)['function'])}</tool>\n" for tool in tools)
        yield plain(f"system\n{content}{_TOOLS_HEAD}{listed}{_TOOLS_TAIL}")
        yield from (mark(CALLS_OPEN), plain(_TOOLS_EXAMPLE), mark(CALLS_CLOSE))
    else:
        yield plain(f"system\n{content}")
    yield mark(END)


def _opening(before: str | None) -> Iterator[Segment]:
    """The tokens that close the previous message."""
    if before == "tool":
        yield mark(END)
    yield plain("\n")


def _user(message: Message) -> Iterator[Segment]:
    yield from (mark(OPEN), plain(f"user\n{message.content}"), mark(END))


def _assistant(index: int, message: Message, dropped: bool) -> Iterator[Segment]:
    """`dropped`: without its thinking, as the published template renders messages before the last user message."""
    _check_assistant(index, message)
    trained = not dropped
    content = f"{message.content}{CALL_LEAD}" if message.tool_calls else message.content
    if dropped:
        yield from (mark(OPEN), plain(f"ai\n{content}"))
    else:
        yield from _GENERATION
        yield plain(f"{message.thinking}\n", trained=True)
        yield mark(THINK_CLOSE, trained=True)
        yield plain(f"\n\n{content}", trained=True)
    if message.tool_calls:
        calls = "".join(_call(index, message, call) for call in message.tool_calls)
        yield mark(CALLS_OPEN, trained=trained)
        yield plain(f"\n{calls}", trained=trained)
        yield mark(CALLS_CLOSE, trained=trained)
    yield mark(END, trained=trained)


def _check_assistant(index: int, message: Message) -> None:
    for marker in (THINK_CLOSE, END):
        if marker in message.thinking:
            _refuse(index, message, f"thinking holds {marker!r}, which would end it")
    # The end marker may begin in the content and end in the marker that follows it.
    following = "" if message.tool_calls else END[:-1]
    for marker in (CALLS_OPEN, END):
        if marker in message.content + following:
            _refuse(index, message, f"content holds {marker!r}, which would be read as a marker")


def _call(index: int, message: Message, call: ToolCall) -> str:
    for name in (call.name, *call.arguments):
        if '"' in name or ">" in name:
            _refuse(index, message, f"a tool or parameter is called {name!r}; '\"' and '>' would end the name")
    parameters = "".join(
        f'<parameter name="{name}">{_argument(index, message, name, value)}</parameter>\n'
        for name, value in call.arguments.items()
    )
    return f'<invoke name="{call.name}">\n{parameters}</invoke>\n'


def _argument(index: int, message: Message, name: str, value: JsonValue) -> str:
    if not isinstance(value, str):
        if is_deeper(value, MAX_DEPTH):
            _refuse(index, message, f"argument {name!r} is nested deeper than {MAX_DEPTH}")
        try:
            # Inside JSON the tag can only occur in a string, where a slash may be escaped.
            return _json(value).replace(PARAMETER_CLOSE, PARAMETER_CLOSE.replace("/", "\\/"))
        except (TypeError, ValueError) as error:
            _refuse(index, message, f"argument {name!r} is not a JSON value ({error})")
    if PARAMETER_CLOSE in value:
        _refuse(index, message, f"argument {name!r} holds {PARAMETER_CLOSE!r}, which would end it")
    return value


def _first_result(messages: Sequence[Message]) -> int:
    """Index of the first of the tool results that `messages` end with."""
    first = len(messages)
    while first > 0 and messages[first - 1].role == "tool":
        first -= 1
    return first


def _result(messages: Sequence[Message], index: int, first: int) -> Iterator[Segment]:
    """One tool result, in the block that begins at index `first`."""
    message = messages[index]
    calls = messages[first - 1].tool_calls if first > 0 else ()
    if index - first >= len(calls):
        _refuse(index, message, f"no open tool call for this result; the assistant message before it made {len(calls)}")
    awaited = calls[index - first].id
    if message.tool_call_id and awaited and message.tool_call_id != awaited:
        _refuse(
            index,
            message,
            f"answers call {message.tool_call_id!r} but {awaited!r} is next; results carry no names here, so put them "
            "in the order of the calls",
        )
    if index == first:
        yield from (plain("\n"), mark(OPEN), plain("tool"))
    yield plain(f"\n<response>{message.content}</response>")


# -- what cannot be expressed -----------------------------------------------------------------------------------------


def _refuse(index: int, message: Message, reason: str) -> NoReturn:
    raise FormatError(f"message {index} ({message.role}): {reason}")


def _last_user(messages: Sequence[Message]) -> int:
    return max((index for index, message in enumerate(messages) if message.role == "user"), default=-1)


def _refuse_rewriting(history: Sequence[Message], last_user: int) -> None:
    if last_user < len(history):
        return
    for index in range(_last_user(history) + 1, len(history)):
        if history[index].role == "assistant":
            raise PrefixError(
                f"message {index} (assistant): a later user's message drops its thinking; render the whole conversation"
            )


def _json(value: JsonValue) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
