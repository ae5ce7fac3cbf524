"""Any model's own chat template as a chat format: messages in, token ids out, the text exactly as the template has it.

The text of a prompt is what transformers' `apply_chat_template` returns for the same messages. What a template does not
say is found by probing it with short conversations when the format is made:

- **Stop tokens.** The special token that follows the content of an answer; the one that follows a call, if it differs;
  and the model's EOS tokens. A template may end an answer with no token of its own, as GLM's do: then the token that
  opens the next turn ends it.
- **Thinking.** Passed as `reasoning_content` and `thinking`, as transformers does, if the template shows it; else
  written into the content between `<think>` tags.
- **Tool calls.** Their syntax (`call_syntax`), and whether the template wants arguments as an object or as JSON text.
  If the syntax is not recognised, conversations with tools are refused.

An answer *as sampled* is the generation prompt followed by what the template renders after it for the last message. If
the prompt opens thinking and the template drops it even there, as DeepSeek-R1's does, the answer as sampled begins with
the thinking and `</think>`.

Many templates rewrite: with a later message they render an earlier answer differently than as sampled, for example
without its thinking. The text stays the template's; `extend` raises `PrefixError`, so that a caller which holds sampled
tokens branches instead of changing them. For training, answers up to the last rewritten one have no loss, since no
sampler would produce them. `rewrite` finds out when a format is loaded.

The name of a special token inside any message is plain text. Each answer's first and last token is a border at which
texts are encoded separately, because a sampler saw them so; apart from those borders ids are those of the whole text.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from m2forge.errors import FormatError, PrefixError
from m2forge.records import JsonValue
from m2forge.text.call_syntax import PROBE_CALL, PROBE_TOOL, SYNTAXES, CallSyntax, PlainParser, recognise
from m2forge.text.chat_template import ChatTemplate, Guard
from m2forge.text.message import Message, Tool, ToolCall, tool_to_openai
from m2forge.text.parser import THINK_CLOSE, THINK_OPEN, Completion, CompletionParser, snippet
from m2forge.text.tokenizer import Rendered, Segment, Tokenizer, encode_segments, plain

_USER = Message("user", "Question")
_CONTENT, _THINKING = "Probed answer", "Probed thought"
_ANSWER = Message("assistant", _CONTENT)
_CALLING = Message("assistant", tool_calls=(PROBE_CALL,))
_RESULT = Message("tool", "Result", tool_call_id=PROBE_CALL.id)
_ID = re.compile(r"[A-Za-z0-9]{9}")
"""Ids of calls as Mistral's templates demand them; others accept any."""
_OPENED = re.compile(rf"{THINK_OPEN}\s*(?P<close>{THINK_CLOSE}\s*)?\Z")
"""Thinking that a generation prompt opens, perhaps to leave it empty."""


class _Ends(NamedTuple):
    """Special tokens that end an answer, by name."""

    content: str
    call: str
    is_own: bool
    """Whether they belong to the answer; if not, they open the next turn, and the last answer's text lacks them."""


class UnknownFormError(FormatError):
    """A chat template that renders, but whose completions could not be parsed or would not end."""


class TemplateFormat:
    """See `ChatFormat`."""

    name = "template"

    def __init__(self, tokenizer: Tokenizer) -> None:
        if tokenizer.chat_template is None:
            raise FormatError("the tokenizer has no chat template, which the template format renders")
        self.tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer.chat_template, tokenizer.names, tokenizer.special_ids)
        self._tool_template = self._template
        if tokenizer.tool_use_template is not None:
            self._tool_template = ChatTemplate(tokenizer.tool_use_template, tokenizer.names, tokenizer.special_ids)
        self.has_thinking_fields = True
        """Whether thinking is passed as fields of a message; if not, in its content."""
        self.has_text_arguments = False
        """Whether the arguments of calls are passed as JSON text; if not, as an object."""
        self._ends = _Ends("", "", is_own=True)
        self._starts_thinking = self._conversation([_USER]).text(1, generation=True).rstrip().endswith(THINK_OPEN)
        self._ends = self._find_ends()
        self._think_lead = self._find_thinking()
        self.call_syntax = self._find_calls()
        """Name of the syntax of tool calls; None if it is not recognised."""
        special = tokenizer.special_ids
        closing = dict.fromkeys(self._ends[:2])
        eos = [] if tokenizer.names.eos is None else [tokenizer.names.eos]
        self.closing_ids: tuple[int, ...] = tuple(special[name] for name in closing)
        others = (*(special[name] for name in eos if name in special), *tokenizer.eos_ids)
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys((*self.closing_ids, *others)))
        self._end_names = tuple(tokenizer.decode([id]) for id in self.stop_ids)
        self._check_answer()

    def text(self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, generation: bool = False) -> str:
        """The template's own text."""
        conversation = self._conversation(messages, tools)
        return conversation.guard.clean(conversation.text(len(messages), generation=generation))

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, generation: bool = False) -> Rendered:
        self._check_tools(messages, tools)
        conversation = self._conversation(messages, tools)
        whole = conversation.whole(generation=generation)
        answers = conversation.answers(whole, 0)
        # A prompt is the template's text, whatever that shows of earlier answers; what is trained must be readable.
        for answer in [] if generation else _trained(answers):
            text = conversation.guard.clean(whole[answer.start : answer.end])
            self._check_read_back(answer.number, messages[answer.number], text, tools)
        return self._encode(conversation, whole, 0, answers)

    def extend(
        self,
        history: Sequence[Message],
        new: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        generation: bool = False,
    ) -> Rendered:
        messages = [*history, *new]
        self._check_tools(messages, tools)
        conversation = self._conversation(messages, tools)
        before, whole = conversation.closed(len(history)), conversation.whole(generation=generation)
        if not whole.startswith(before):
            raise PrefixError(
                f"message {len(history)} ({new[0].role if new else 'generation prompt'}): appending it changes how the "
                "model's chat template renders earlier messages; render the full conversation"
            )
        borders = {0, len(whole), *(at for at, _ in conversation.template.split(whole, conversation.guard))}
        if len(before) not in borders:
            raise FormatError(
                "the model's chat template joins the text of the last message and of what follows without a special "
                "token, so they cannot be encoded separately"
            )
        return self._encode(conversation, whole, len(before), conversation.answers(whole, len(history)))

    def parser(self, tools: Sequence[Tool] = ()) -> CompletionParser:
        syntax: CallSyntax = PlainParser if self.call_syntax is None else SYNTAXES[self.call_syntax]
        end, *others = self._end_names
        parser = syntax(tools, end_marker=end, other_ends=tuple(others), starts_thinking=self._starts_thinking)
        parser.think_lead = self._think_lead
        return parser

    # -- conversations ------------------------------------------------------------------------------------------------

    def _conversation(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> "_Conversation":
        template = self._tool_template if tools else self._template
        return _Conversation(self, template, messages, tools, self._ends)

    def _encode(
        self, conversation: "_Conversation", whole: str, start: int, answers: Sequence["_Answer | None"]
    ) -> Rendered:
        """The ids of `whole` from `start` on."""
        cuts = {start, *(edge for answer in answers if answer for edge in (answer.start, answer.end))}
        trained = _trained(answers)
        segments: list[Segment] = []
        number = 0
        for at, segment in self._stripped(conversation, whole, sorted(cuts)):
            while number < len(trained) and trained[number].end <= at:
                number += 1
            is_trained = number < len(trained) and trained[number].start <= at
            if at >= start:
                segments.append(Segment(segment.text, segment.special, trained=is_trained))
        return encode_segments(segments, self.tokenizer)

    def _stripped(
        self, conversation: "_Conversation", whole: str, cuts: Sequence[int]
    ) -> Iterator[tuple[int, Segment]]:
        """The segments without the whitespace that a special token takes in, as the tokenizer's file declares it."""
        parts = list(conversation.template.split(whole, conversation.guard, cuts))
        left, right = self.tokenizer.takes_left_space, self.tokenizer.takes_right_space
        for number, (at, segment) in enumerate(parts):
            text = segment.text
            if not segment.special and (left or right):
                before, after = parts[number - 1] if number else None, parts[number + 1 : number + 2]
                if before is not None and before[1].special and before[1].text in right and at not in cuts:
                    text = text.lstrip()
                if after and after[0][1].special and after[0][1].text in left and after[0][0] not in cuts:
                    text = text.rstrip()
            if text:
                yield at, segment if text == segment.text else plain(text)

    # -- probing ------------------------------------------------------------------------------------------------------

    def _find_ends(self) -> _Ends:
        conversation = self._conversation([_USER, _ANSWER, _USER])
        last, followed = conversation.text(2), self._probe([_USER, _ANSWER, _USER])
        if _CONTENT not in last:
            raise UnknownFormError("the model's chat template does not write the content of an assistant's message")
        own = conversation.first_special(last, last.rindex(_CONTENT))
        if own is not None:
            return _Ends(own, own, is_own=True)
        opener = followed and conversation.first_special(followed, followed.rindex(_CONTENT))
        if opener:
            return _Ends(opener, opener, is_own=False)
        raise UnknownFormError(
            "the model's chat template ends an assistant's message with no special token, so a completion would not end"
        )

    def _find_thinking(self) -> str:
        """Sets how thinking is passed; returns the whitespace that the template writes before it."""
        thinking = Message("assistant", _CONTENT, _THINKING)
        prompt = self._conversation([_USER]).text(1, generation=True)
        for has_fields in (True, False):
            self.has_thinking_fields = has_fields
            written = self._probe([_USER, thinking]) or ""
            if _THINKING in written:
                sampled = written[len(prompt) :] if written.startswith(prompt) else ""
                found = re.match(rf"(\s*){THINK_OPEN}", sampled)
                return "" if found is None else found.group(1)
        self.has_thinking_fields = True
        return ""

    def _find_calls(self) -> str | None:
        """Recognises the syntax of calls, and sets how arguments are passed and what ends a call."""
        if not self._tool_template.takes_tools:
            return None
        for has_text in (False, True):
            self.has_text_arguments = has_text
            conversation = self._conversation([_USER, _CALLING, _RESULT], [PROBE_TOOL])
            try:
                prompt, closed = conversation.text(1, generation=True), conversation.closed(2)
            except FormatError:
                continue
            sampled = closed[len(prompt) :] if closed.startswith(prompt) else closed
            for end in dict.fromkeys((self._ends.content, conversation.last_special(closed) or self._ends.content)):
                ends = tuple(dict.fromkeys((self._ends.content, end)))
                is_thinking = self._starts_thinking and closed.startswith(prompt)
                syntax = recognise(sampled, ends, starts_thinking=is_thinking, think_lead=self._think_lead)
                if syntax is not None:
                    self._ends = self._ends._replace(call=self._call_end(conversation, end))
                    return syntax
        self.has_text_arguments = False
        return None

    def _call_end(self, conversation: "_Conversation", own: str) -> str:
        """The token that ends a call, which is the next turn's first if answers have none of their own."""
        if self._ends.is_own:
            return own
        whole, followed = conversation.text(2), self._probe([_USER, _CALLING, _RESULT], [PROBE_TOOL]) or ""
        opener = conversation.first_special(followed, len(whole)) if followed.startswith(whole) else None
        return opener or self._ends.content

    def _probe(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> str | None:
        """The template's text; None if it cannot express the messages."""
        try:
            return self._conversation(messages, tools).text(len(messages))
        except FormatError:
            return None

    def _check_answer(self) -> None:
        """Raises FormatError for a template whose answers cannot be parsed."""
        conversation = self._conversation([_USER, _ANSWER])
        prompt, closed = conversation.text(1, generation=True), conversation.closed(2)
        sampled = closed[len(prompt) :] if closed.startswith(prompt) else None
        if sampled is None or self._read(sampled).content.strip() != _CONTENT:
            raise UnknownFormError(
                "the model's chat template writes answers in a form that is not known, so completions cannot be "
                f"parsed: after the generation prompt {snippet(prompt[-40:])} it writes "
                f"{snippet(closed if sampled is None else sampled)}"
            )

    # -- what cannot be expressed -------------------------------------------------------------------------------------

    def _check_tools(self, messages: Sequence[Message], tools: Sequence[Tool]) -> None:
        if self.call_syntax is not None or not (tools or any(message.tool_calls for message in messages)):
            return
        if not self._tool_template.takes_tools:
            raise FormatError(
                "the model's chat template takes no tools; send none, or use a model whose template does, or for a "
                "ChatML model the chat format chatml, which describes tools itself"
            )
        written = self._probe([_USER, _CALLING], [PROBE_TOOL])
        shown = "it refuses one" if written is None else f"it writes {snippet(written[-120:])}"
        raise FormatError(
            f"the model's chat template writes tool calls in a syntax that is not known ({shown}); known: "
            f"{', '.join(SYNTAXES)}; send no tools"
        )

    def _check_read_back(self, index: int, message: Message, text: str, tools: Sequence[Tool]) -> None:
        """Raises FormatError for a trained message that its own parser would read differently."""
        read = self._read(text, tools)
        ours = [(call.name, call.arguments) for call in message.tool_calls]
        theirs = [(call.name, call.arguments) for call in read.tool_calls]
        parts = {
            "thinking": read.thinking.strip() == message.thinking.strip(),
            "content": read.content.strip() == message.content.strip(),
            "calls": ours == theirs,
        }
        lost = [part for part, is_same in parts.items() if not is_same]
        if lost:
            raise FormatError(
                f"message {index} (assistant): the model's chat template writes it as {snippet(text)}, in which "
                f"{' and '.join(lost)} would be read differently"
            )

    def _read(self, text: str, tools: Sequence[Tool] = ()) -> Completion:
        parser = self.parser(tools)
        parser.feed(text)
        return parser.finish()


# -- one conversation --------------------------------------------------------------------------------------------------


class _Answer(NamedTuple):
    """A message of the assistant as sampled, inside the text of a conversation."""

    number: int
    """Index of the message."""
    start: int
    end: int


def _trained(answers: Sequence[_Answer | None]) -> list[_Answer]:
    """The answers after the last one that is not as sampled."""
    num_rewritten = max((number for number, answer in enumerate(answers, start=1) if answer is None), default=0)
    return [answer for answer in answers[num_rewritten:] if answer is not None]


class _Conversation:
    """Messages as template data, and the template's texts of their beginnings, guarded."""

    def __init__(
        self,
        format: TemplateFormat,
        template: ChatTemplate,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        ends: _Ends,
    ) -> None:
        self.template, self.messages, self._ends = template, messages, ends
        described = [tool_to_openai(tool) for tool in tools]
        texts: list[JsonValue] = [[message.content, message.thinking] for message in messages]
        calls: list[JsonValue] = [[call.name, call.arguments] for message in messages for call in message.tool_calls]
        self.guard = template.guard([*described, *texts, *calls])
        self._tools = [self.guard.data(tool) for tool in described]
        self._data = list(_MessageData(format, messages, self.guard))
        self._specials = format.tokenizer.special_ids
        self._texts: dict[tuple[int, bool], str] = {}

    def text(self, num_messages: int, *, generation: bool = False) -> str:
        """The template's text of the first messages."""
        key = num_messages, generation
        if key not in self._texts:
            data = self._data[:num_messages]
            self._texts[key] = self.template.text(data, self._tools, generation=generation)
        return self._texts[key]

    def whole(self, *, generation: bool) -> str:
        if generation:
            return self.text(len(self.messages), generation=True)
        return self.closed(len(self.messages))

    def closed(self, num_messages: int) -> str:
        """The text of the first messages; an answer at their end is as sampled, up to the token that ends it."""
        if not num_messages:
            return ""
        text, message = self.text(num_messages), self.messages[num_messages - 1]
        if message.role != "assistant":
            return text
        try:
            prompt = self.text(num_messages - 1, generation=True)
        except FormatError:
            return self._ended(text, message)
        if not text.startswith(prompt):
            text = self._sampled_after(prompt, text, message)
        return self._ended(text, message)

    def _sampled_after(self, prompt: str, text: str, message: Message) -> str:
        """The text as sampled of a template that renders an answer without the thinking that its prompt opens; `text`
        itself of any other that does not begin with the prompt."""
        opened = _OPENED.search(prompt)
        if opened is None or not text.startswith(prompt[: opened.start()]):
            return text
        rest, separator = text[opened.start() :], "\n\n"
        if rest.startswith((THINK_OPEN, THINK_CLOSE)):
            rest, separator = rest.partition(THINK_CLOSE)[2], ""
        if opened.group("close"):
            return prompt + rest
        thinking = f"{self.guard.text(message.thinking)}\n" if message.thinking or separator else ""
        return f"{prompt}{thinking}{THINK_CLOSE}{separator}{rest}"

    def answers(self, whole: str, first: int) -> list["_Answer | None"]:
        """Where each assistant message from index `first` on is in `whole` as sampled; None if it is not."""
        answers: list[_Answer | None] = []
        for index in range(first, len(self.messages)):
            if self.messages[index].role != "assistant":
                continue
            try:
                prompt, closed = self.text(index, generation=True), self.closed(index + 1)
            except FormatError:
                # The template refuses this beginning of the conversation, so nothing was sampled after it.
                answers.append(None)
                continue
            is_ended = closed.endswith(tuple(self._ends[:2]))
            is_sampled = is_ended and whole.startswith(closed) and closed.startswith(prompt)
            answers.append(_Answer(index, len(prompt), len(closed)) if is_sampled else None)
        return answers

    def first_special(self, text: str, after: int) -> str | None:
        return next(
            (part.text for at, part in self.template.split(text, self.guard) if at >= after and part.special), None
        )

    def last_special(self, text: str) -> str | None:
        """The last special token, if only whitespace follows it."""
        parts = [part for _, part in self.template.split(text.rstrip(), self.guard)]
        return parts[-1].text if parts and parts[-1].special else None

    def _ended(self, text: str, message: Message) -> str:
        """`text` up to and including the token that ends the answer."""
        if not self._ends.is_own:
            return text + (self._ends.call if message.tool_calls else self._ends.content)
        for at, part in reversed(list(self.template.split(text, self.guard))):
            if part.special and part.text in self._ends[:2]:
                return text[: at + len(part.text)]
            # Whitespace may follow, or the EOS token with which some templates end a whole conversation.
            if not part.special and not part.text.isspace():
                break
        return text


class _MessageData:
    """Iterates over messages as dictionaries of Hugging Face's form, with the markers in their texts broken."""

    def __init__(self, format: TemplateFormat, messages: Sequence[Message], guard: Guard) -> None:
        self._format, self._messages, self._guard = format, messages, guard

    def __iter__(self) -> Iterator[dict[str, JsonValue]]:
        pending: list[tuple[str, str]] = []
        num_calls = 0
        for message in self._messages:
            if message.role == "assistant":
                ids = [_shown_id(call.id, num_calls + number) for number, call in enumerate(message.tool_calls)]
                num_calls += len(ids)
                pending = [(id, call.name) for id, call in zip(ids, message.tool_calls, strict=True)]
                yield self._assistant(message, ids)
            elif message.role == "tool":
                yield self._result(message, pending)
            else:
                yield {"role": message.role, "content": self._text(message.content)}

    def _assistant(self, message: Message, ids: Sequence[str]) -> dict[str, JsonValue]:
        content, thinking = self._text(message.content), self._text(message.thinking)
        data: dict[str, JsonValue] = {"role": "assistant"}
        if thinking and self._format.has_thinking_fields:
            # Under both names, in the order in which transformers adds them.
            data = {"thinking": thinking, "role": "assistant", "content": content}
        elif thinking:
            data["content"] = f"{THINK_OPEN}\n{thinking}\n{THINK_CLOSE}\n\n{content}"
        else:
            data["content"] = content
        if message.tool_calls:
            calls: list[JsonValue] = [self._call(call, id) for call, id in zip(message.tool_calls, ids, strict=True)]
            data["tool_calls"] = calls
        return data | ({"reasoning_content": thinking} if "thinking" in data else {})

    def _call(self, call: ToolCall, id: str) -> dict[str, JsonValue]:
        arguments: JsonValue = self._guard.data(call.arguments)
        if self._format.has_text_arguments:
            arguments = self._text(json.dumps(call.arguments, ensure_ascii=False))
        return {"type": "function", "id": id, "function": {"name": self._text(call.name), "arguments": arguments}}

    def _result(self, message: Message, pending: list[tuple[str, str]]) -> dict[str, JsonValue]:
        """`pending`: ids and names of the calls that have no result yet; the answered one is removed."""
        wanted = _shown_id(message.tool_call_id, 0) if message.tool_call_id else ""
        answered = next((call for call in pending if call[0] == wanted or not wanted), (wanted, ""))
        if answered in pending:
            pending.remove(answered)
        data: dict[str, JsonValue] = {"role": "tool", "content": self._text(message.content)}
        data |= {"name": self._text(answered[1])} if answered[1] else {}
        return data | {"tool_call_id": answered[0] or _shown_id("", 0)}

    def _text(self, text: str) -> str:
        return self._guard.text(text)


def _shown_id(id: str, number: int) -> str:
    """The id of a call as templates show it: nine letters and digits. Calls without an id are numbered."""
    if not id:
        return f"{number:09d}"
    if _ID.fullmatch(id):
        return id
    return hashlib.blake2b(id.encode(errors="replace"), digest_size=5).hexdigest()[:9]
