"""Conversations between a client and a model of which every token is known: two chat formats, completions that are cut
into other tokens than the tokenizer would, and the harmless ways in which clients send history back."""

import functools
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from m2forge.gateway.history.history import History, Opening
from m2forge.records import IntArray, JsonValue
from m2forge.text.format import ChatFormat, make_format
from m2forge.text.message import Message, Tool, ToolCall, message_from_openai, message_to_openai
from m2forge.text.parser import Completion
from m2forge.text.tokenizer import Tokenizer, train_tokenizer
from tests.text.draw import CHATML_SPECIALS, TOOLS, TRAINING_TEXTS, m2_tokenizer, with_chat_template

# What Qwen's templates do: tools, results that share a turn, thinking that goes when another user's message follows.
TEMPLATE = """
{%- if tools %}
    {{- '<|im_start|>system\\n' + (messages[0].content if messages[0].role == 'system' else '') + '\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set seen = namespace(user=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set seen.user = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set thought = message.reasoning_content if message.reasoning_content is string else '' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > seen.user and thought %}{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}{%- endif %}
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


@functools.cache
def chatml(template: str = TEMPLATE, *, drop_thinking: bool = False) -> ChatFormat:
    tokenizer = with_chat_template(train_tokenizer(TRAINING_TEXTS, 400, CHATML_SPECIALS), template)
    return make_format("chatml", tokenizer, drop_thinking=drop_thinking)


@functools.cache
def minimax(*, drop_thinking: bool = False) -> ChatFormat:
    return make_format("minimax_m2", m2_tokenizer(), drop_thinking=drop_thinking)


FORMATS = {"minimax_m2": minimax, "chatml": chatml}


@functools.cache
def byte_ids(tokenizer: Tokenizer) -> dict[int, int]:
    specials = set(tokenizer.special_ids.values())
    pieces = {id: tokenizer.decode_bytes([id]) for id in range(tokenizer.vocab_size) if id not in specials}
    return {piece[0]: id for id, piece in pieces.items() if len(piece) == 1}


def in_bytes(tokenizer: Tokenizer, ids: Sequence[int], rng: random.Random, share: float = 0.7) -> list[int]:
    """The same text in other tokens: most are taken apart into their bytes."""
    specials = set(tokenizer.special_ids.values())
    result: list[int] = []
    for id in ids:
        if id in specials or rng.random() > share:
            result.append(id)
        else:
            result += [byte_ids(tokenizer)[byte] for byte in tokenizer.decode_bytes([id])]
    return result


def array(ids: Sequence[int]) -> IntArray:
    result = np.array(ids, np.int32)
    result.flags.writeable = False
    return result


def sample(format: ChatFormat, message: Message, rng: random.Random, tools: Sequence[Tool] = TOOLS) -> IntArray:
    """`message` as a model writes it, in tokens of its own choice."""
    rendered = format.render([Message("user", "x"), message], tools)
    written = [id for id, was_sampled in zip(rendered.ids, rendered.trained, strict=True) if was_sampled]
    return array(in_bytes(format.tokenizer, written, rng))


def read(format: ChatFormat, ids: IntArray, number: int = 0, tools: Sequence[Tool] = TOOLS) -> Completion:
    """What a client is told of sampled ids: calls have ids."""
    parser = format.parser(tools)
    parser.feed(format.tokenizer.decode_bytes(ids.tolist()))
    completion = parser.finish()
    calls = [replace(call, id=f"call_{number}_{index}") for index, call in enumerate(completion.tool_calls)]
    return replace(completion, tool_calls=tuple(calls))


def reordered(value: JsonValue) -> Any:
    """Objects with their keys the other way round; numbers as JavaScript writes them."""
    if isinstance(value, dict):
        return {name: reordered(value[name]) for name in reversed(value)}
    if isinstance(value, list):
        return [reordered(item) for item in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return int(value)
    return value


def echo(message: Message, rng: random.Random, *, keeps_thinking: bool) -> Message:
    """The message after a client had it: through JSON, and changed where it does not matter."""
    data: dict[str, Any] = json.loads(json.dumps(message_to_openai(message)))
    if not keeps_thinking and rng.random() < 0.7:
        data.pop("reasoning_content", None)
    if not data["content"]:
        data["content"] = rng.choice([None, "", []])
    elif rng.random() < 0.5:
        middle = rng.randrange(len(data["content"]) + 1)
        parts = [data["content"][:middle], data["content"][middle:]]
        data["content"] = [{"type": "text", "text": part} for part in parts]
    for call in data.get("tool_calls", []):
        arguments = json.loads(call["function"]["arguments"])
        call["function"]["arguments"] = rng.choice(
            [json.dumps(reordered(arguments), indent=2), json.dumps(arguments, separators=(",", ":")), arguments]
        )
    if rng.random() < 0.3:
        for call in data.get("tool_calls", []):
            call.pop("id")
    return message_from_openai(data)


class Dialogue:
    """One conversation, with the ids that the engine must be asked to continue worked out independently."""

    def __init__(
        self, format: ChatFormat, history: History, messages: Sequence[Message], tools: Sequence[Tool]
    ) -> None:
        self.format, self.history, self.tools = format, history, tuple(tools)
        self.sent = list(messages)
        """As the client keeps it."""
        self.said = list(messages)
        """As the model said it."""
        self.ids = format.render(messages, tools, generation=True).ids
        self.num_new = len(self.ids)
        self.ends = {0: 0}
        """After how many tokens the answer ends that is so many messages into the conversation."""

    def open(self) -> Opening:
        return self.history.open(self.sent, self.tools)

    def answer(self, opening: Opening, ids: IntArray, client_message: Message | None = None) -> Completion:
        """`client_message`: the message in the client's history, if it differs from the response."""
        completion = read(self.format, ids, len(self.sent), self.tools)
        self.history.record(opening, ids, completion)
        self.said.append(completion.message())
        self.sent.append(completion.message() if client_message is None else client_message)
        self.ids = [*opening.ids.tolist(), *ids.tolist()]
        if not ids.size or int(ids[-1]) not in self.format.stop_ids:
            self.ids.append(self.format.stop_ids[0])
        self.ends[len(self.said)] = len(self.ids)
        return completion

    def say(self, *new: Message) -> None:
        added = self.format.extend(self.said, new, self.tools, generation=True).ids
        self.sent += new
        self.said += new
        self.ids = self.ids + added
        self.num_new = len(added)


def call(name: str = "search", id: str = "", **arguments: JsonValue) -> ToolCall:
    return ToolCall(name, arguments, id)


SYSTEM, USER = Message("system", "Be brief."), Message("user", "Find a.")


def tool_loop(format: ChatFormat, history: History, num_turns: int, *, drops_thinking: bool = False) -> Dialogue:
    """A conversation in which the model calls a tool in each turn; the last result is not answered yet."""
    rng = random.Random(num_turns)
    dialogue = Dialogue(format, history, [SYSTEM, USER], TOOLS)
    for turn in range(num_turns):
        message = Message("assistant", f"Look {turn}", f"Think {turn}", (call(query=f"q{turn}"),))
        completion = dialogue.answer(dialogue.open(), sample(format, message, rng))
        if drops_thinking:
            dialogue.sent[-1] = replace(completion.message(), thinking="")
        dialogue.say(Message("tool", f"Result {turn}"))
    return dialogue
