"""ChatML with the model's Jinja chat template (SmolLM2, Qwen): messages in, token ids out; parsed by `HermesParser`.

    <|im_start|>role⏎…<|im_end|>⏎

The template determines the text. Three things are added:

- **Stable turns.** Templates such as Qwen3's render an assistant message differently while it is the last and later,
  without its thinking. Here every assistant turn is what the template renders for the last message, so thinking stays
  and history is never rewritten. With `drop_thinking` the template's text is used as it is, and if it does not support
  thinking, the thinking of turns before the last user message is dropped; then the turns up to the last rewritten one
  are not trained, because no sampler would produce them, and `extend` raises if the history would be rendered
  differently.
- **The end.** What follows the last `<|im_end|>`, a newline, belongs to the next message, so that a sampled completion,
  which ends in that token, is a whole turn.
- **What the template lacks.** If it does not support thinking, it is written before the content between `<think>` tags;
  if it does not support tools, they are described in the system message in Hermes style, and tool calls and results
  are written into assistant and user messages.

An assistant message that could not be parsed back, because it contains a tag where the parser would read one, is
refused. The name of a special token inside any message is plain text.

`HermesParser` reads calls written as JSON between tags, as by Hermes and Qwen models:

    <tool_call>
    {"name": "f", "arguments": {"k": "v"}}
    </tool_call>

A newline before `<tool_call>` belongs to it. A call ends at the first `</tool_call>`, even inside a string. Its
arguments arrive typed; a type that the tool's schema does not allow is reported and left unchanged.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NoReturn

from m2forge.errors import FormatError, PrefixError
from m2forge.records import JsonValue
from m2forge.text.argument import type_problem
from m2forge.text.chat_template import ChatTemplate, Data, Guard
from m2forge.text.message import MAX_DEPTH, Message, Tool, ToolCall, is_deeper, parse_json, tool_to_openai
from m2forge.text.parser import THINK_CLOSE, THINK_OPEN, CompletionParser, ProblemKind, markers_of, snippet
from m2forge.text.tokenizer import Rendered, Segment, Tokenizer, encode_segments, plain

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
_EARLY_NAME = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]*)"')
_EARLY_LENGTH = 256
"""Number of leading characters in which the name is searched while the call is still streaming."""


class HermesParser(CompletionParser):
    early_name = _EARLY_NAME
    """Finds the name in the leading characters of a call; the text between the tags is read by `_read_call`."""

    call_markers = (CALL_OPEN, CALL_CLOSE)
    call_lead = "\n"

    def _prepare(self) -> None:
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
        self._closed = self._closed or "".join(self._parts).endswith(self._ends)
        self._report(ProblemKind.UNCLOSED_CALL, f"the text ended before {CALL_CLOSE}")
        return True

    def _body(self, final: bool) -> bool:
        text, marker = self._take(self._body_end, final)
        self._parts.append(text)
        if self._started is None and len(self._head) < _EARLY_LENGTH:
            self._head = (self._head + text)[:_EARLY_LENGTH]
            found = self.early_name.match(self._head)
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


OPEN, END = "<|im_start|>", "<|im_end|>"
_PROBE = Message("user", "x")
_HERMES_HEAD = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
_HERMES_TAIL = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    f'{CALL_OPEN}{CALL_CLOSE} XML tags:\n{CALL_OPEN}\n{{"name": <function-name>, "arguments": <args-json-object>}}\n'
    f"{CALL_CLOSE}"
)


class ChatMLFormat:
    """See `ChatFormat`."""

    name = "chatml"

    def __init__(self, tokenizer: Tokenizer, *, drop_thinking: bool = False) -> None:
        if tokenizer.chat_template is None:
            raise FormatError("the tokenizer has no chat template, which the chatml format renders")
        missing = [text for text in (OPEN, END) if text not in tokenizer.special_ids]
        if missing:
            raise FormatError(f"the tokenizer lacks {', '.join(missing)}, special tokens of the chatml format")
        self.tokenizer = tokenizer
        self.stop_ids: tuple[int, ...] = (tokenizer.special(END),)
        self.closing_ids: tuple[int, ...] = self.stop_ids
        self._drop_thinking = drop_thinking
        self._template = ChatTemplate(tokenizer.chat_template, tokenizer.names, tokenizer.special_ids)
        prompt = self._rendered([_PROBE], (), generation=True)
        starts = [at for at in range(len(prompt)) if _is_assistant(prompt, at)]
        self._prompt = prompt[starts[-1] :] if starts else []
        """The template's generation prompt, with which every assistant turn begins."""
        if not starts or END in (segment.text for segment in self._prompt):
            raise FormatError(f"the generation prompt of the model's chat template does not begin with {OPEN}assistant")

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, generation: bool = False) -> Rendered:
        self._check(messages, tools)
        turns = self._turns(messages, tools)
        return encode_segments(self._segments(messages, tools, turns, generation), self.tokenizer)

    def extend(
        self,
        history: Sequence[Message],
        new: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        generation: bool = False,
    ) -> Rendered:
        messages = [*history, *new]
        self._check(messages, tools)
        # Stable turns of the history do not change, so they need not be rendered for the comparison.
        num_known = 0 if self._drop_thinking else sum(message.role == "assistant" for message in history)
        turns = [None] * num_known + self._turns(messages if self._drop_thinking else new, tools)
        before = self._segments(history, tools, turns, generation=False)
        full = self._segments(messages, tools, turns, generation)
        if full[: len(before)] != before:
            raise PrefixError(
                f"message {len(history)} ({new[0].role if new else 'none'}): appending it changes how the model's "
                "chat template renders earlier messages; render the full conversation, and append tool results together"
            )
        return encode_segments(full[len(before) :], self.tokenizer)

    def parser(self, tools: Sequence[Tool] = ()) -> HermesParser:
        starts_thinking = "".join(segment.text for segment in self._prompt).rstrip().endswith(THINK_OPEN)
        return HermesParser(tools, end_marker=END, starts_thinking=starts_thinking)

    # -- segments -----------------------------------------------------------------------------------------------------

    def _segments(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        stable_turns: Sequence[list[Segment] | None],
        generation: bool,
    ) -> list[Segment]:
        """The conversation, with each assistant turn replaced by the stable one unless thinking is dropped. A turn
        that is None is omitted."""
        if not messages and not generation:
            return []
        shown = messages if not self._drop_thinking or self._template.takes_thinking else _without_thinking(messages)
        rendered = self._rendered(shown, tools, generation=generation)
        num_written = sum(message.role == "assistant" for message in messages)
        turns = _assistant_turns(rendered)
        if len(turns) != num_written:
            raise FormatError(
                f"the model's chat template writes {len(turns)} assistant turns for {num_written} assistant messages"
            )
        pairs = list(zip(stable_turns, turns, strict=False))
        rewritten = [
            number for number, (turn, (start, end)) in enumerate(pairs, start=1) if rendered[start:end] != turn
        ]
        num_untrained = max(rewritten, default=0) if self._drop_thinking else 0
        segments, at = [], 0
        for number, (turn, (start, end)) in enumerate(pairs):
            segments += rendered[at:start]
            if turn is not None:
                segments += rendered[start:end] if number < num_untrained else self._trained(turn)
            at = end
        return segments + rendered[at:]

    def _turns(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[list[Segment] | None]:
        """Each assistant turn as the template renders it for a message that was just sampled."""
        return [self._turn(message, tools) for message in messages if message.role == "assistant"]

    def _turn(self, message: Message, tools: Sequence[Tool]) -> list[Segment]:
        rendered = self._rendered([_PROBE, message], tools)
        turns = _assistant_turns(rendered)
        return rendered[slice(*turns[-1])] if turns else []

    def _trained(self, turn: list[Segment]) -> list[Segment]:
        """Split `turn` after the generation prompt and mark the rest as sampled."""
        last = len(self._prompt) - 1
        head, border = turn[:last], turn[last] if last < len(turn) else None
        prompt_border = self._prompt[last]
        if head != self._prompt[:last] or border is None or not border.text.startswith(prompt_border.text):
            raise FormatError(
                "the model's chat template renders assistant turns that do not begin with its generation prompt"
            )
        remainder = [plain(border.text[len(prompt_border.text) :])] if border.text != prompt_border.text else []
        sampled = [Segment(part.text, part.special, trained=True) for part in [*remainder, *turn[last + 1 :]]]
        return [*self._prompt, *sampled]

    def _rendered(
        self, messages: Sequence[Message], tools: Sequence[Tool], *, generation: bool = False
    ) -> list[Segment]:
        """The template's rendering of the messages, without what follows the last end marker."""
        described = [tool_to_openai(tool) for tool in tools]
        texts = [[message.content, message.thinking] for message in messages]
        guard = self._template.guard([*described, *texts, *_call_data(messages)])
        data = [self._data(message, guard) for message in messages]
        offered = [guard.data(tool) for tool in described]
        if offered and not self._template.takes_tools:
            data, offered = _describe_tools(data, offered), []
        segments = self._template.render(data, offered, guard, generation=generation)
        if not generation and segments and segments[-1].text.isspace():
            segments.pop()
        return segments

    # -- messages as template data ------------------------------------------------------------------------------------

    def _data(self, message: Message, guard: Guard) -> dict[str, JsonValue]:
        content = guard.text(message.content)
        role: str = message.role
        data: dict[str, JsonValue] = {}
        if message.thinking:
            thinking = guard.text(message.thinking)
            if self._template.takes_thinking:
                data["reasoning_content"] = thinking
            else:
                content = f"{THINK_OPEN}\n{thinking}\n{THINK_CLOSE}\n\n{content}"
        if message.tool_calls and self._template.takes_tools:
            data["tool_calls"] = [_function(call, guard) for call in message.tool_calls]
        elif message.tool_calls:
            calls = "\n".join(_hermes(call, guard) for call in message.tool_calls)
            content = f"{content}\n{calls}" if content else calls
        if role == "tool" and not self._template.takes_tools:
            role, content = "user", f"<tool_response>\n{content}\n</tool_response>"
        return {"role": role, "content": content} | data

    # -- what cannot be expressed -------------------------------------------------------------------------------------

    def _check(self, messages: Sequence[Message], tools: Sequence[Tool]) -> None:
        """Raise for messages that the parser would read differently."""
        if (tools or any(message.tool_calls for message in messages)) and not self._writes_hermes:
            raise FormatError(
                f"the model's chat template does not write tool calls as JSON between {CALL_OPEN} tags, which is "
                "what the chatml format parses"
            )
        for index, message in enumerate(messages):
            if message.role == "assistant":
                _check_assistant(index, message)

    @property
    def is_readable(self) -> bool:
        """Whether the template's tool calls, if it takes tools, can be parsed."""
        return self._writes_hermes

    @cached_property
    def _writes_hermes(self) -> bool:
        probe = Message("assistant", "", "", (ToolCall("f", {"k": "v", "n": 1}),))
        parser = self.parser()
        for segment in self._trained(self._turn(probe, [Tool("f")])):
            if segment.trained:
                parser.feed(segment.text)
        return parser.finish().tool_calls == probe.tool_calls


def _check_assistant(index: int, message: Message) -> None:
    found = [(END, "thinking"), (THINK_CLOSE, "thinking"), (END, "content"), (CALL_OPEN, "content")]
    for marker, part in found:
        if marker in getattr(message, part):
            _refuse(index, f"{part} holds {marker!r}, which would be read as a marker")
    if message.content.startswith(THINK_OPEN) and not message.thinking:
        _refuse(index, f"content begins with {THINK_OPEN!r}; give it as thinking")
    for call in message.tool_calls:
        # The parser reads them inside the object that names the call, one level deeper.
        if is_deeper(call.arguments, MAX_DEPTH - 1):
            _refuse(index, f"arguments of {call.name!r} are nested deeper than {MAX_DEPTH - 1}")
        try:
            text = json.dumps([call.name, call.arguments], ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError) as error:
            _refuse(index, f"arguments of {call.name!r} are not JSON values ({error})")
        if CALL_CLOSE in text:
            _refuse(index, f"a call of {call.name!r} holds {CALL_CLOSE!r}, which would end it")


def _refuse(index: int, reason: str) -> NoReturn:
    raise FormatError(f"message {index} (assistant): {reason}")


def _is_assistant(segments: Sequence[Segment], at: int) -> bool:
    opened = at + 1 < len(segments) and segments[at].special and segments[at].text == OPEN
    return opened and segments[at + 1].text.startswith("assistant\n")


def _without_thinking(messages: Sequence[Message]) -> list[Message]:
    """The messages without thinking before the last user message."""
    last = max((index for index, message in enumerate(messages) if message.role == "user"), default=-1)
    return [replace(message, thinking="") if index < last else message for index, message in enumerate(messages)]


def _assistant_turns(segments: Sequence[Segment]) -> list[tuple[int, int]]:
    """Start and end of each closed assistant turn."""
    turns, start = [], None
    for at, segment in enumerate(segments):
        if _is_assistant(segments, at):
            start = at
        elif segment.special and segment.text == END and start is not None:
            turns.append((start, at + 1))
            start = None
    return turns


def _call_data(messages: Sequence[Message]) -> list[JsonValue]:
    return [[call.name, call.arguments] for message in messages for call in message.tool_calls]


def _function(call: ToolCall, guard: Guard) -> dict[str, JsonValue]:
    function: dict[str, JsonValue] = {"name": guard.text(call.name), "arguments": guard.data(call.arguments)}
    return {"type": "function", "id": call.id, "function": function}


def _hermes(call: ToolCall, guard: Guard) -> str:
    body = json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)
    return f"{CALL_OPEN}\n{guard.text(body)}\n{CALL_CLOSE}"


def _describe_tools(data: Sequence[dict[str, JsonValue]], tools: Sequence[Data]) -> list[dict[str, JsonValue]]:
    """The messages with the tools described in the system message, which is added if there is none."""
    listed = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in tools)
    description = f"{_HERMES_HEAD}{listed}{_HERMES_TAIL}"
    if data and data[0]["role"] == "system":
        content = f"{data[0]['content']}\n\n{description}" if data[0]["content"] else description
        return [data[0] | {"content": content}, *data[1:]]
    return [{"role": "system", "content": description}, *data]
