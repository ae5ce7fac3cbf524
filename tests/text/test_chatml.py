"""The chatml format against transformers, and what it adds: stable turns, tools where a template has none."""

import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from m2forge.errors import FormatError
from m2forge.text.format import ChatFormat, Rendered, make_format
from m2forge.text.message import Message, Tool, ToolCall, message_to_openai, tool_to_openai
from m2forge.text.tokenizer import Tokenizer, train_tokenizer
from tests.text.draw import (
    CHATML_SPECIALS,
    TOOLS,
    TRAINING_TEXTS,
    as_json,
    assistants,
    conversations,
    nested,
    smollm2_tokenizer,
    with_chat_template,
)

# The features of Qwen3's template: tools, calls, results sharing a turn, and thinking that goes when a user follows.
QWEN_LIKE = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n\\n<tools>' }}
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
        {%- if loop.index0 > seen.user and (loop.last or thought) %}
            {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + message.content.lstrip('\\n') }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- if message.content or not loop.first %}{{- '\\n' }}{%- endif %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
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
# The features of SmolLM2's: neither tools nor thinking.
PLAIN = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}{{ '<|im_start|>system\\nI am.<|im_end|>\\n' }}"
    "{% endif %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
THINKING_PROMPT = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}"
    "{{ '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' }}"
    "{{ m.content + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"
)


@functools.cache
def trained() -> Tokenizer:
    return train_tokenizer(TRAINING_TEXTS, 400, CHATML_SPECIALS)


@functools.cache
def qwen_like() -> Tokenizer:
    return with_chat_template(trained(), QWEN_LIKE)


@functools.cache
def chat_format(template: str, *, drop_thinking: bool = False) -> ChatFormat:
    return make_format("chatml", with_chat_template(trained(), template), drop_thinking=drop_thinking)


@functools.cache
def smollm2_format() -> ChatFormat:
    return make_format("auto", smollm2_tokenizer())


def peer_of(tokenizer: Tokenizer) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(Path(folder))
        return AutoTokenizer.from_pretrained(folder)


def openai(message: Message) -> dict[str, Any]:
    """With arguments as objects, as templates want them."""
    data: dict[str, Any] = dict(message_to_openai(message))
    if message.tool_calls:
        calls = [{"name": call.name, "arguments": call.arguments} for call in message.tool_calls]
        data["tool_calls"] = [{"type": "function", "id": "", "function": call} for call in calls]
    return data


def peer_ids(peer: Any, messages: Sequence[Message], tools: Sequence[Tool], generation: bool) -> list[int]:
    ids: list[int] = peer.apply_chat_template(
        [openai(message) for message in messages],
        tools=[tool_to_openai(tool) for tool in tools] or None,
        add_generation_prompt=generation,
        return_dict=False,
    )
    return ids


def sampled_ids(rendered: Rendered) -> list[int]:
    return [id for id, was_sampled in zip(rendered.ids, rendered.trained, strict=True) if was_sampled]


WORDS = st.lists(st.sampled_from(["Hi", " there", ",\n", " 12 é", "\n\n", " 東京", "."]), max_size=5).map(
    lambda words: "".join(["I", *words]).rstrip("\n")
)


@st.composite
def tame_conversations(draw: st.DrawFn, tools: Sequence[Tool]) -> list[Message]:
    """Texts without markers, and without line ends at their edges, which templates trim."""
    messages = [Message("system", draw(WORDS))] if draw(st.booleans()) else []
    messages.append(Message("user", draw(WORDS)))
    for _ in range(draw(st.integers(0, 4))):
        calls = tuple(ToolCall("search", {"query": draw(WORDS), "limit": 3}) for _ in range(draw(st.integers(0, 2))))
        calls = calls if tools else ()
        messages.append(Message("assistant", draw(WORDS), draw(WORDS) if tools else "", calls))
        messages += [Message("tool", draw(WORDS)) for _ in calls]
        if not calls:
            messages.append(Message("user", draw(WORDS)))
    return messages


@given(tame_conversations(()), st.booleans())
def test_smollm2_has_the_ids_of_transformers(messages: list[Message], generation: bool) -> None:
    format = smollm2_format()
    assert format.name == "chatml"
    ours = format.render(messages, generation=generation).ids
    # The line end after the last end marker belongs to the next message.
    ours += [] if generation else format.tokenizer.encode("\n")
    assert ours == peer_ids(smollm2_peer(), messages, (), generation)


@functools.cache
def smollm2_peer() -> Any:
    return peer_of(smollm2_tokenizer())


@given(tame_conversations(TOOLS), st.sampled_from([(), TOOLS]), st.booleans())
def test_a_qwen_like_template_has_the_ids_of_transformers(
    messages: list[Message], tools: tuple[Tool, ...], generation: bool
) -> None:
    format = chat_format(QWEN_LIKE, drop_thinking=True)
    ours = format.render(messages, tools, generation=generation).ids
    ours += [] if generation else format.tokenizer.encode("\n")
    assert ours == peer_ids(qwen_peer(), messages, tools, generation)


@functools.cache
def qwen_peer() -> Any:
    return peer_of(qwen_like())


ASSISTANT = assistants(
    content=("<tool_call>", "<|im_end|>", "<think>"),
    thinking=("</think>", "<|im_end|>"),
    arguments=("</tool_call>",),
)


def check_cuts(format: ChatFormat, messages: list[Message], *, results_share_a_turn: bool) -> None:
    whole = format.render(messages, TOOLS, generation=True)
    for at in range(len(messages) + 1):
        start = format.render(messages[:at], TOOLS)
        inside = 0 < at < len(messages) and messages[at - 1].role == messages[at].role == "tool"
        if inside and results_share_a_turn:
            with pytest.raises(FormatError, match="append tool results together"):
                format.extend(messages[:at], messages[at:], TOOLS)
            continue
        new = format.extend(messages[:at], messages[at:], TOOLS, generation=True)
        assert start.ids + new.ids == whole.ids
        assert start.trained + new.trained == whole.trained


@given(conversations(ASSISTANT))
def test_thinking_stays_and_appended_ids_make_the_whole(messages: list[Message]) -> None:
    check_cuts(chat_format(QWEN_LIKE), messages, results_share_a_turn=True)


@given(conversations(ASSISTANT))
def test_a_template_without_tools_is_extended_anywhere(messages: list[Message]) -> None:
    check_cuts(chat_format(PLAIN), messages, results_share_a_turn=False)


@pytest.mark.parametrize("template", [QWEN_LIKE, PLAIN])
@given(messages=conversations(ASSISTANT))
def test_what_is_sampled_follows_the_prompt_and_reads_back(template: str, messages: list[Message]) -> None:
    format = chat_format(template)
    for at, message in enumerate(messages):
        if message.role != "assistant":
            continue
        prompt, whole = format.render(messages[:at], TOOLS, generation=True), format.render(messages[: at + 1], TOOLS)
        sampled = whole.ids[len(prompt.ids) :]
        assert whole.ids[: len(prompt.ids)] == prompt.ids
        assert whole.trained == prompt.trained + [True] * len(sampled)
        assert sampled[-1] in format.stop_ids
        parser = format.parser(TOOLS)
        parser.feed(format.tokenizer.decode_bytes(sampled))
        completion = parser.finish()
        assert completion.closed
        read = completion.message()
        if template == QWEN_LIKE:
            # This template trims line ends itself.
            assert read.thinking.strip("\n") == message.thinking.strip("\n")
            assert read.content.strip("\n") == message.content.strip("\n")
        else:
            assert read == message
        read_arguments = [call.arguments for call in read.tool_calls]
        assert as_json(read_arguments) == as_json([call.arguments for call in message.tool_calls])


@pytest.mark.parametrize("template", [QWEN_LIKE, PLAIN])
@given(messages=conversations(ASSISTANT))
def test_no_message_can_write_a_special_token(template: str, messages: list[Message]) -> None:
    format = chat_format(template)
    specials = format.tokenizer.special_ids
    rendered = format.render(messages, TOOLS)
    tame = [
        Message(message.role, "x", "", tuple(ToolCall("stop", {}) for _ in message.tool_calls)) for message in messages
    ]
    expected = format.render(tame, TOOLS)
    for marker in ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<tool_call>"):
        assert rendered.ids.count(specials[marker]) == expected.ids.count(specials[marker])


def test_thinking_goes_as_the_template_has_it_only_when_asked() -> None:
    messages = [
        Message("user", "a"),
        Message("assistant", "b", "why"),
        Message("user", "c"),
        Message("assistant", "d", "so"),
    ]
    keeping, dropping = chat_format(QWEN_LIKE), chat_format(QWEN_LIKE, drop_thinking=True)
    kept = (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n<think>\nwhy\n</think>\n\nb<|im_end|>\n"
        "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n<think>\nso\n</think>\n\nd<|im_end|>"
    )
    assert qwen_like().decode(keeping.render(messages).ids) == kept
    assert qwen_like().decode(sampled_ids(keeping.render(messages))) == (
        "<think>\nwhy\n</think>\n\nb<|im_end|><think>\nso\n</think>\n\nd<|im_end|>"
    )
    dropped = kept.replace("<think>\nwhy\n</think>\n\n", "")
    assert qwen_like().decode(dropping.render(messages).ids) == dropped
    assert qwen_like().decode(sampled_ids(dropping.render(messages))) == "<think>\nso\n</think>\n\nd<|im_end|>"
    with pytest.raises(
        FormatError, match=r"message 2 \(user\): appending it changes how the model's chat template renders"
    ):
        dropping.extend(messages[:2], messages[2:])


def test_thinking_goes_where_the_template_has_no_place_for_it() -> None:
    dropping = chat_format(PLAIN, drop_thinking=True)
    messages = [
        Message("system", "s"),
        Message("user", "a"),
        Message("assistant", "b"),
        Message("user", "c"),
        Message("assistant", "d", "why"),
        Message("user", "e"),
        Message("assistant", "f", "so", (ToolCall("stop", {}),)),
        Message("tool", "r"),
        Message("assistant", "g", "then"),
    ]
    rendered = dropping.render(messages, TOOLS)
    text = trained().decode(rendered.ids)
    assert "why" not in text
    assert text.index("so") < text.index("then")
    # Nobody sampled the third turn as it stands, so training begins after it.
    sampled = trained().decode(sampled_ids(rendered))
    assert sampled.startswith("<think>\nso\n</think>\n\nf")
    with pytest.raises(FormatError, match=r"message 9 \(user\): appending it changes how .* renders earlier messages"):
        dropping.extend(messages, [Message("user", "h")], TOOLS)
    new = dropping.extend(messages[:7], messages[7:], TOOLS)
    assert dropping.render(messages[:7], TOOLS).ids + new.ids == rendered.ids


def test_the_deepest_arguments_come_back() -> None:
    format = chat_format(QWEN_LIKE)
    messages = [Message("user", "x"), Message("assistant", tool_calls=(ToolCall("search", {"tags": nested(98)}),))]
    prompt, whole = format.render(messages[:1], TOOLS, generation=True).ids, format.render(messages, TOOLS).ids
    parser = format.parser(TOOLS)
    parser.feed(format.tokenizer.decode_bytes(whole[len(prompt) :]))
    assert parser.finish().message() == messages[1]


def test_tools_are_described_where_the_template_knows_none() -> None:
    format = smollm2_format()
    messages = [
        Message("user", "a"),
        Message("assistant", "b", "why", (ToolCall("stop", {"k": "é"}),)),
        Message("tool", "r"),
    ]
    text = smollm2_tokenizer().decode(format.render(messages, [Tool("stop", "d")]).ids)
    head, tail = text.split("<|im_start|>user\na")
    assert head.startswith("<|im_start|>system\n# Tools\n")
    assert '\n{"type": "function", "function": {"name": "stop", "description": "d", "parameters": {}}}\n' in head
    assert tail == (
        "<|im_end|>\n<|im_start|>assistant\n<think>\nwhy\n</think>\n\nb\n"
        '<tool_call>\n{"name": "stop", "arguments": {"k": "é"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nr\n</tool_response><|im_end|>"
    )
    with_system = format.render([Message("system", "Be brief."), *messages], [Tool("stop")])
    assert smollm2_tokenizer().decode(with_system.ids).startswith("<|im_start|>system\nBe brief.\n\n# Tools\n")


def test_a_prompt_that_opens_thinking_is_where_completions_begin() -> None:
    format = make_format("chatml", with_chat_template(trained(), THINKING_PROMPT))
    messages = [Message("user", "a"), Message("assistant", "b", "why")]
    prompt, whole = format.render(messages[:1], generation=True), format.render(messages)
    assert whole.ids[: len(prompt.ids)] == prompt.ids
    parser = format.parser()
    parser.feed(format.tokenizer.decode_bytes(whole.ids[len(prompt.ids) :]))
    assert parser.finish().message() == messages[1]
    assert format.tokenizer.decode(sampled_ids(whole)) == "why\n</think>\n\nb<|im_end|>"


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (Message("assistant", "a<|im_end|>"), r"message 1 \(assistant\): content holds '<\|im_end\|>'"),
        (Message("assistant", "a<tool_call>"), "content holds '<tool_call>'"),
        (Message("assistant", "<think>a"), "content begins with '<think>'"),
        (Message("assistant", "", "a</think>"), "thinking holds '</think>'"),
        (Message("assistant", tool_calls=(ToolCall("f", {"a": "</tool_call>"}),)), "holds '</tool_call>'"),
        (Message("assistant", tool_calls=(ToolCall("f", {"a": float("inf")}),)), "not JSON values"),
        (Message("assistant", tool_calls=(ToolCall("f", {"a": nested(99)}),)), "nested deeper than 99"),
        (Message("assistant", tool_calls=(ToolCall("f", {"a": nested(900)}),)), "nested deeper than 99"),
    ],
)
def test_what_could_not_be_read_back_is_refused(message: Message, error: str) -> None:
    with pytest.raises(FormatError, match=error):
        make_format("chatml", qwen_like()).render([Message("user", "x"), message])


@pytest.mark.parametrize(
    ("template", "error"),
    [
        ("{% for %}", "cannot be compiled"),
        ("{{ raise_exception('no ' + messages[0].role) }}", "cannot express these messages: no user"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages[0].content + 1 }}", "cannot express these messages"),
        ("{% for m in messages %}[{{ m.content }}]{% endfor %}", "does not begin with"),
    ],
)
def test_a_template_that_does_not_serve_is_refused(template: str, error: str) -> None:
    with pytest.raises(FormatError, match=error):
        make_format("chatml", with_chat_template(trained(), template))


def test_calls_written_in_another_way_are_refused() -> None:
    template = QWEN_LIKE.replace('<tool_call>\\n{"name": "', "<tool_call>\\n<function=")
    format = make_format("chatml", with_chat_template(trained(), template))
    assert format.render([Message("user", "x")]).ids
    with pytest.raises(FormatError, match="does not write tool calls as JSON"):
        format.render([Message("user", "x")], TOOLS)


def test_a_tokenizer_without_template_or_markers_is_refused() -> None:
    with pytest.raises(FormatError, match="has no chat template"):
        make_format("chatml", trained())
    bare = with_chat_template(train_tokenizer(TRAINING_TEXTS, 300, []), QWEN_LIKE)
    with pytest.raises(FormatError, match=r"lacks <\|im_start\|>, <\|im_end\|>"):
        make_format("chatml", bare)
    with pytest.raises(FormatError, match="with no special token"):
        make_format("auto", bare)
