"""The minimax_m2 format: its exact text, stable prefixes at every cut, and completions read back as they were."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2forge.errors import FormatError
from m2forge.text.format import ChatFormat, Rendered, make_format
from m2forge.text.message import Message, Tool, ToolCall
from m2forge.text.parser import Completion
from m2forge.text.tokenizer import train_tokenizer
from tests.text.draw import TOOLS, TRAINING_TEXTS, as_json, assistants, conversations, m2_tokenizer, nested

FORMAT = make_format("minimax_m2", m2_tokenizer())
DROPPING = make_format("minimax_m2", m2_tokenizer(), drop_thinking=True)
ASSISTANT = assistants(
    content=("<minimax:tool_call>", "[e~"), thinking=("</think>", "[e~["), arguments=("</parameter>",)
)
PROMPT = "]~b]ai\n<think>\n"


def text_of(rendered: Rendered) -> str:
    return FORMAT.tokenizer.decode(rendered.ids)


def read(rendered_ids: list[int], format: ChatFormat = FORMAT) -> Completion:
    parser = format.parser(TOOLS)
    parser.feed(format.tokenizer.decode_bytes(rendered_ids))
    return parser.finish()


def plus(first: Rendered, second: Rendered) -> Rendered:
    return Rendered(first.ids + second.ids, first.trained + second.trained)


CALLS = (ToolCall("search", {"query": " a\n", "limit": 3, "tags": ["é"]}), ToolCall("stop", {}))
CONVERSATION = [
    Message("system", "Be brief."),
    Message("user", "Hi"),
    Message("assistant", "Hello", "greet"),
    Message("user", "Find a"),
    Message("assistant", "Searching", "look", CALLS),
    Message("tool", "r1"),
    Message("tool", "r2"),
    Message("assistant", "Done"),
]
WHOLE = """]~!b[]~b]system
Be brief.[e~[
]~b]user
Hi[e~[
]~b]ai
<think>
greet
</think>

Hello[e~[
]~b]user
Find a[e~[
]~b]ai
<think>
look
</think>

Searching
<minimax:tool_call>
<invoke name="search">
<parameter name="query"> a
</parameter>
<parameter name="limit">3</parameter>
<parameter name="tags">["é"]</parameter>
</invoke>
<invoke name="stop">
</invoke>
</minimax:tool_call>[e~[
]~b]tool
<response>r1</response>
<response>r2</response>[e~[
]~b]ai
<think>

</think>

Done[e~["""


def test_a_conversation_has_the_published_text() -> None:
    assert text_of(FORMAT.render(CONVERSATION)) == WHOLE
    assert text_of(FORMAT.render(CONVERSATION[:2], generation=True)) == WHOLE[: WHOLE.index("greet")]


def test_dropping_thinking_is_what_the_published_template_does() -> None:
    dropped = WHOLE.replace("<think>\ngreet\n</think>\n\n", "")
    assert text_of(DROPPING.render(CONVERSATION)) == dropped
    rendered = DROPPING.render(CONVERSATION)
    # Nobody would sample the rewritten turn, so only those after the last user's message are trained.
    sampled = [id for id, trained in zip(rendered.ids, rendered.trained, strict=True) if trained]
    assert text_of(Rendered(sampled)).startswith("look\n</think>")


def test_tools_stand_in_the_system_message_as_published() -> None:
    tool = Tool("get", "d", {"type": "object", "properties": {}})
    expected = """]~!b[]~b]system
You are a helpful assistant.

# Tools
You may call one or more tools to assist with the user query.
Here are the tools available in JSONSchema format:

<tools>
<tool>{"name": "get", "description": "d", "parameters": {"type": "object", "properties": {}}}</tool>
<tool>{"name": "é", "description": "", "parameters": {}}</tool>
</tools>

When making tool calls, use XML format to invoke tools and pass parameters:

<minimax:tool_call>
<invoke name="tool-name-1">
<parameter name="param-key-1">param-value-1</parameter>
<parameter name="param-key-2">param-value-2</parameter>
...
</invoke>
</minimax:tool_call>[e~[
]~b]user
Hi[e~["""
    rendered = FORMAT.render([Message("user", "Hi")], [tool, Tool("é")])
    assert text_of(rendered) == expected
    assert rendered.ids.count(FORMAT.tokenizer.special("<minimax:tool_call>")) == 1


def test_an_empty_system_message_stays_empty() -> None:
    assert text_of(FORMAT.render([Message("system"), Message("user", "x")])).startswith("]~!b[]~b]system\n[e~[\n")


@given(conversations(ASSISTANT), st.sampled_from([(), TOOLS]), st.booleans())
def test_appended_ids_make_the_whole_at_every_cut(
    messages: list[Message], tools: tuple[Tool, ...], generation: bool
) -> None:
    whole = FORMAT.render(messages, tools, generation=generation)
    for at in range(len(messages) + 1):
        start = FORMAT.render(messages[:at], tools)
        assert plus(start, FORMAT.extend(messages[:at], messages[at:], tools, generation=generation)) == whole


@given(conversations(ASSISTANT))
def test_a_prompt_and_what_is_sampled_make_the_whole(messages: list[Message]) -> None:
    for at, message in enumerate(messages):
        if message.role != "assistant":
            continue
        prompt = FORMAT.render(messages[:at], TOOLS, generation=True)
        whole = FORMAT.render(messages[: at + 1], TOOLS)
        sampled = whole.ids[len(prompt.ids) :]
        assert whole.ids[: len(prompt.ids)] == prompt.ids
        assert whole.trained == prompt.trained + [True] * len(sampled)
        assert sampled[-1] in FORMAT.stop_ids
        assert text_of(prompt).endswith(PROMPT)
        completion = read(sampled)
        assert completion.closed
        assert completion.message() == message
        assert as_json([call.arguments for call in completion.tool_calls]) == as_json(
            [call.arguments for call in message.tool_calls]
        )


@given(conversations(ASSISTANT))
def test_no_message_can_write_a_special_token(messages: list[Message]) -> None:
    rendered = FORMAT.render(messages, TOOLS)
    roles = [message.role for message in messages]
    num_blocks = len(roles) - sum(pair == ("tool", "tool") for pair in itertools.pairwise(roles))
    num_opened = num_blocks + (roles[0] != "system")
    specials = FORMAT.tokenizer.special_ids
    assert rendered.ids.count(specials["]~b]"]) == num_opened
    assert rendered.ids.count(specials["[e~["]) == num_opened - (roles[-1] == "tool")
    assert rendered.ids.count(specials["<think>"]) == roles.count("assistant")
    assert rendered.ids.count(specials["]~!b["]) == 1


@given(conversations(ASSISTANT))
def test_dropping_thinking_extends_only_unrewritten_history(messages: list[Message]) -> None:
    whole = DROPPING.render(messages)
    for at in range(len(messages) + 1):
        history = DROPPING.render(messages[:at])
        if history.ids == whole.ids[: len(history.ids)]:
            assert plus(history, DROPPING.extend(messages[:at], messages[at:])) == whole
        else:
            with pytest.raises(FormatError, match="drops its thinking"):
                DROPPING.extend(messages[:at], messages[at:])


def assistant(**parts: Any) -> Message:
    return Message("assistant", **parts)


CALLED = assistant(tool_calls=(ToolCall("stop", {}, "a"), ToolCall("stop", {}, "b")))
USER = Message("user", "x")


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ([USER, Message("system", "s")], "message 1 (system): only the first message"),
        ([Message("tool", "r")], "message 0 (tool): no open tool call"),
        ([USER, Message("tool", "r")], "message 1 (tool): no open tool call"),
        ([USER, assistant(), Message("tool", "r")], "message 2 (tool): no open tool call"),
        ([USER, CALLED, USER, Message("tool", "r")], "message 3 (tool): no open tool call"),
        ([USER, CALLED, *[Message("tool", "r")] * 3], "message 4 (tool): no open tool call for this result; .* made 2"),
        ([USER, CALLED, Message("tool", "r", tool_call_id="b")], "message 2 (tool): answers call 'b' but 'a' is next"),
        ([assistant(thinking="a</think>")], "message 0 (assistant): thinking holds '</think>'"),
        ([assistant(thinking="a[e~[")], r"message 0 (assistant): thinking holds '\[e~\['"),
        (
            [USER, assistant(content="<minimax:tool_call>")],
            "message 1 (assistant): content holds '<minimax:tool_call>'",
        ),
        ([assistant(content="a[e~")], r"message 0 (assistant): content holds '\[e~\['"),
        ([assistant(tool_calls=(ToolCall('f"', {}),))], "message 0 (assistant): a tool or parameter is called 'f\"'"),
        ([assistant(tool_calls=(ToolCall("f", {"a>": 1}),))], "is called 'a>'"),
        ([assistant(tool_calls=(ToolCall("f", {"a": "</parameter>"}),))], "argument 'a' holds '</parameter>'"),
        ([assistant(tool_calls=(ToolCall("f", {"a": float("nan")}),))], "argument 'a' is not a JSON value"),
        ([assistant(tool_calls=(ToolCall("f", {"a": nested(101)}),))], "argument 'a' is nested deeper than 100"),
        ([assistant(tool_calls=(ToolCall("f", {"a": nested(5000)}),))], "argument 'a' is nested deeper than 100"),
    ],
)
def test_what_the_format_cannot_say_is_refused_with_the_message(messages: list[Message], error: str) -> None:
    with pytest.raises(FormatError, match=error.replace("(", r"\(").replace(")", r"\)")):
        FORMAT.render(messages)


def test_a_result_may_join_the_block_of_the_one_before() -> None:
    history = [USER, CALLED, Message("tool", "r1", tool_call_id="a")]
    new = [Message("tool", "r2", tool_call_id="b")]
    assert text_of(FORMAT.extend(history, new)) == "\n<response>r2</response>"
    assert text_of(FORMAT.extend(history, [], generation=True)) == f"[e~[\n{PROMPT}"


def test_tags_inside_json_arguments_come_back() -> None:
    message = assistant(tool_calls=(ToolCall("search", {"tags": ["</parameter>", "</invoke>"]}),))
    completion = read(FORMAT.extend([USER], [message]).ids[len(FORMAT.extend([USER], [], generation=True).ids) :])
    assert completion.message() == message
    assert completion.problems == ()


def test_the_deepest_arguments_come_back() -> None:
    message = assistant(tool_calls=(ToolCall("search", {"tags": nested(100)}),))
    prompt = FORMAT.render([USER], generation=True).ids
    assert read(FORMAT.render([USER, message]).ids[len(prompt) :]).message() == message


def test_nothing_is_rendered_for_no_messages() -> None:
    assert FORMAT.render([]) == Rendered()
    assert text_of(FORMAT.render([], generation=True)).endswith(f"[e~[\n{PROMPT}")


def test_a_tokenizer_without_the_markers_is_refused() -> None:
    bare = train_tokenizer(TRAINING_TEXTS, 300, ["]~b]", "<think>"])
    with pytest.raises(FormatError, match=r"lacks \]~!b\[, \[e~\[, </think>"):
        make_format("minimax_m2", bare)
    with pytest.raises(FormatError, match="'xml' is not known; known: auto, chatml, minimax_m2"):
        make_format("xml", bare)  # type: ignore[arg-type]  # a user's mistake


def test_auto_knows_the_format_by_the_tokenizer() -> None:
    assert make_format("auto", m2_tokenizer()).name == "minimax_m2"
