"""Completions in pieces: the same result for every cut, problems instead of exceptions, and work linear in the text."""

import functools
import gc
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2forge.text.call_syntax import SYNTAXES
from m2forge.text.chatml import HermesParser
from m2forge.text.message import Message, Tool, ToolCall
from m2forge.text.minimax_m2 import XmlCallParser
from m2forge.text.parser import (
    CallFinished,
    CallStarted,
    Completion,
    CompletionParser,
    ContentDelta,
    Event,
    Problem,
    ProblemKind,
    ThinkingDelta,
)
from tests.text.draw import FRAGMENTS, TOOLS, called, cut, joined

F = Tool("f", "", {"type": "object", "properties": {"k": {"type": "string"}, "n": {"type": "integer"}}})


def xml() -> CompletionParser:
    return XmlCallParser([*TOOLS, F], end_marker="[e~[", starts_thinking=True)


def hermes() -> CompletionParser:
    return HermesParser([*TOOLS, F], end_marker="<|im_end|>", starts_thinking=False)


def hermes_thinking() -> CompletionParser:
    return HermesParser([*TOOLS, F], end_marker="<|im_end|>", starts_thinking=True)


def run(make: Callable[[], CompletionParser], pieces: list[bytes]) -> tuple[list[Event], Completion]:
    parser = make()
    events = [event for piece in pieces for event in parser.feed(piece)]
    completion = parser.finish()
    return joined([*events, *completion.final_events]), completion


def parse(make: Callable[[], CompletionParser], text: str) -> Completion:
    return run(make, [text.encode()])[1]


def kinds(completion: Completion) -> list[ProblemKind]:
    return [problem.kind for problem in completion.problems]


def other(name: str) -> CompletionParser:
    return SYNTAXES[name]([*TOOLS, F], end_marker="<|im_end|>", other_ends=("</s>",), starts_thinking=False)


OTHERS = [functools.partial(other, name) for name in ("xml", "glm", "mistral", "llama3")]
PARSERS = pytest.mark.parametrize("make", [xml, hermes, hermes_thinking, *OTHERS])
SHAPED = st.lists(
    st.sampled_from(
        [
            *FRAGMENTS,
            '<invoke name="f">',
            '<parameter name="k">',
            '<parameter name="n">',
            "<tool_call>",
            '{"name": "f", "arguments": {"k": "v"}}',
            '{"name": "f',
            '{"name": "f", "parameters": {"k": "v"}}',
            "<|python_tag|>",
            "[TOOL_CALLS]",
            "f[ARGS]",
            "<function=f>",
            "<parameter=n>",
            "</function>",
            "<arg_key>n</arg_key><arg_value>",
            "</arg_value>",
            "</s>",
        ]
    ).map(str.encode)
    | st.binary(max_size=4),
    max_size=14,
).map(b"".join)


@PARSERS
@given(data=SHAPED | st.binary(), sizes=st.lists(st.integers(0, 9), min_size=1, max_size=5))
def test_any_bytes_in_any_cut_give_the_same_and_never_raise(
    make: Callable[[], CompletionParser], data: bytes, sizes: list[int]
) -> None:
    whole_events, whole = run(make, [data])
    events, completion = run(make, cut(data, sizes))
    assert events == whole_events
    assert (completion.message(), completion.problems, completion.closed) == (
        whole.message(),
        whole.problems,
        whole.closed,
    )
    assert "".join(event.text for event in events if isinstance(event, ThinkingDelta)) == whole.thinking
    assert "".join(event.text for event in events if isinstance(event, ContentDelta)) == whole.content
    assert called(events) == list(whole.tool_calls)
    Message("assistant", whole.content, whole.thinking, whole.tool_calls)
    (whole.thinking + whole.content + repr(whole.tool_calls)).encode()


def test_events_arrive_as_soon_as_they_are_certain() -> None:
    parser = xml()
    assert parser.feed(b"I th") == [ThinkingDelta("I th")]
    assert parser.feed(b"ink\n") == [ThinkingDelta("ink")]
    assert parser.feed(b"\n</thi") == [ThinkingDelta("\n")]
    assert parser.feed(b"nk>\n") == []
    assert parser.feed(b"\nLook: \xc3") == [ContentDelta("Look: ")]
    assert parser.feed(b"\xa9 <minimax:") == [ContentDelta("é ")]
    assert parser.feed(b"tool_call>\n<invoke name=") == []
    assert parser.feed(b'"f">\n<para') == [CallStarted("f")]
    assert parser.feed(b'meter name="n">1</parameter>\n</invoke>') == [CallFinished(ToolCall("f", {"n": 1}))]
    assert parser.feed(b"\n</minimax:tool_call>[e~[") == []
    completion = parser.finish()
    assert completion == Completion("I think\n", "Look: é ", (ToolCall("f", {"n": 1}),), (), True)


def test_a_hermes_call_is_named_before_it_ends() -> None:
    parser = hermes()
    assert parser.feed('Sure.\n<tool_call>\n{"name": "f"') == [ContentDelta("Sure."), CallStarted("f")]
    assert parser.feed(', "arguments": {"n": 1}}\n</tool_call>') == [CallFinished(ToolCall("f", {"n": 1}))]
    assert parser.feed("<|im_end|>") == []
    assert parser.finish() == Completion("", "Sure.", (ToolCall("f", {"n": 1}),), (), True)


def test_text_that_only_looked_like_a_marker_comes_out_last() -> None:
    parser = xml()
    assert parser.feed("</think>a <minimax:tool") == [ContentDelta("a ")]
    completion = parser.finish()
    assert completion.final_events == (ContentDelta("<minimax:tool"),)
    assert (completion.content, completion.closed, completion.problems) == ("a <minimax:tool", False, ())


@pytest.mark.parametrize(
    ("make", "text", "thinking", "content"),
    [
        (xml, "t\n</think>\n\nc[e~[", "t", "c"),
        (xml, "</think>c", "", "c"),
        (xml, "\n</think>\n\n", "", ""),
        (xml, "t\n\n</think>\n\n\nc\n", "t\n", "\nc\n"),
        (xml, "t</think> c", "t", " c"),
        (hermes, "<think>\nt\n</think>\n\nc<|im_end|>", "t", "c"),
        (hermes, "<think>t</think>c", "t", "c"),
        (hermes, "c", "", "c"),
        (hermes, "<thin", "", "<thin"),
        (hermes, "", "", ""),
        (hermes_thinking, "t\n</think>\n\nc", "t", "c"),
    ],
)
def test_thinking_and_content_part_at_the_tag(
    make: Callable[[], CompletionParser], text: str, thinking: str, content: str
) -> None:
    completion = parse(make, text)
    assert (completion.thinking, completion.content, completion.problems) == (thinking, content, ())


def xml_call(inside: str) -> str:
    return f"</think><minimax:tool_call>{inside}</minimax:tool_call>[e~["


@pytest.mark.parametrize(
    ("text", "calls", "problems"),
    [
        ("no end", 0, ["unclosed_thinking"]),
        ("no end[e~[", 0, ["unclosed_thinking"]),
        ("a <think> b</think>", 0, ["stray_tag"]),
        ("<minimax:tool_call></think>c", 0, ["call_in_thinking"]),
        ("</think>c</think><think>d</think>", 0, ["stray_tag"] * 3),
        ("</think></invoke></parameter></minimax:tool_call>", 0, ["stray_tag"] * 3),
        ("</think>c[e~[ more", 0, ["text_after_end"]),
        ("</think>c[e~[\n", 0, []),
        ("</think><minimax:tool_call>", 0, ["unclosed_call"]),
        ('</think><minimax:tool_call><invoke name="f', 0, ["unclosed_call"]),
        ('</think><minimax:tool_call><invoke name="f">', 0, ["unclosed_call"]),
        ('</think><minimax:tool_call><invoke name="f"><parameter name="k">v[e~[', 0, ["unclosed_call"]),
        ('</think><minimax:tool_call><invoke name="f">[e~[', 0, ["unclosed_call"]),
        (xml_call('<invoke name="f"></invoke>'), 1, []),
        (xml_call("<invoke name='f' ></invoke><invoke name=f></invoke>"), 2, []),
        (xml_call('<invoke name="f">'), 1, ["unclosed_call"]),
        (xml_call('<invoke name="f"><invoke name="f"></invoke>'), 2, ["unclosed_call"]),
        (xml_call(""), 0, ["malformed_call"]),
        (xml_call("<invoke></invoke>"), 0, ["malformed_call"]),
        (xml_call('<invoke name="f"><parameter>v</parameter></invoke>'), 0, ["malformed_call"]),
        (xml_call('hm <invoke name="f">so</invoke>'), 1, ["text_in_call"] * 2),
        (xml_call('<invoke name="g"></invoke>'), 1, ["unknown_tool"]),
        (xml_call('<invoke name="f"><parameter name="n">x</parameter></invoke>'), 1, ["bad_argument"]),
        (xml_call('<invoke name="f"><parameter name="z">x</parameter></invoke>'), 1, ["bad_argument"]),
        (
            xml_call('<invoke name="f"><parameter name="k">1</parameter><parameter name="k">2</parameter></invoke>'),
            1,
            ["bad_argument"],
        ),
        (xml_call('<invoke name="f"></invoke>').replace("[e~[", " and [e~["), 1, ["text_after_call"]),
        (xml_call('<invoke name="f"></invoke>').replace("[e~[", "\n<minimax:tool_call>") + "x", 1, ["unclosed_call"]),
        (xml_call('<invoke name="f"></invoke>').replace("[e~[", " </think>"), 1, ["text_after_call", "stray_tag"]),
    ],
)
def test_tags_that_are_wrong_are_problems(text: str, calls: int, problems: list[str]) -> None:
    completion = parse(xml, text)
    assert len(completion.tool_calls) == calls
    assert kinds(completion) == problems
    assert completion.closed == ("[e~[" in text)


@pytest.mark.parametrize(
    ("text", "calls", "problems"),
    [
        ('<tool_call>{"name": "f", "arguments": {"k": "v"}}</tool_call>', 1, []),
        ('<tool_call>{"arguments": {"k": "v"}, "name": "f"}</tool_call>', 1, []),
        ('<tool_call>{"name": "f"}</tool_call>', 1, []),
        ('<tool_call>{"name": "f", "arguments": "{\\"n\\": 1}"}</tool_call>', 1, []),
        ('<tool_call>{"name": "f"}</tool_call>\n\n<tool_call>{"name": "f"}</tool_call>', 2, []),
        ('<tool_call>{"name": "f"}', 0, ["unclosed_call"]),
        ('<tool_call>{"name": "f"}<|im_end|>', 0, ["unclosed_call"]),
        ('<tool_call>{"name": "f"</tool_call>', 0, ["malformed_call"]),
        ("<tool_call>[]</tool_call>", 0, ["malformed_call"]),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', 0, ["malformed_call"]),
        ('<tool_call>{"name": 1}</tool_call>', 0, ["malformed_call"]),
        ('<tool_call>{"name": "g"}</tool_call>', 1, ["unknown_tool"]),
        ('<tool_call>{"name": "f", "arguments": {}, "name": "g"}</tool_call>', 1, ["unknown_tool"]),
        ('<tool_call>{"name": "f", "arguments": {"n": "1"}}</tool_call>', 1, ["bad_argument"]),
        ('<tool_call>{"name": "f"}</tool_call> so', 1, ["text_after_call"]),
        ("a</tool_call>", 0, ["stray_tag"]),
        ("<think><tool_call></think>", 0, ["call_in_thinking"]),
    ],
)
def test_hermes_calls_that_are_wrong_are_problems(text: str, calls: int, problems: list[str]) -> None:
    completion = parse(hermes, text)
    assert len(completion.tool_calls) == calls
    assert kinds(completion) == problems
    assert completion.closed == ("<|im_end|>" in text)


def test_a_problem_says_what_and_where() -> None:
    (problem,) = parse(xml, xml_call('<invoke name="serch"></invoke>')).problems
    assert problem == Problem(ProblemKind.UNKNOWN_TOOL, "'serch' was not offered; did you mean 'search'?")


def test_text_after_a_call_is_kept() -> None:
    completion = parse(xml, "</think>a" + xml_call('<invoke name="f"></invoke>')[8:].replace("[e~[", "\n b[e~["))
    assert completion.content == "a\n b"


@pytest.mark.slow
def test_a_long_completion_in_small_pieces_takes_linear_time() -> None:
    noise = b"<think> abc [e~ \n word </thi < <min"
    for head in (b"", b"</think>", b'</think><minimax:tool_call><invoke name="f"><parameter name="k">'):
        data = head + noise * (200_000 // len(noise))
        short_s, long_s = (min(processor_s(part) for _ in range(3)) for part in (data[: len(data) // 4], data))
        # Quadratic work needs 16 times as much, linear 4.
        assert long_s < 10 * short_s + 0.05


def processor_s(data: bytes) -> float:
    """Measure CPU time, which other processes do not change, with garbage collection off."""
    gc.disable()
    try:
        started_s = time.process_time()
        run_cut(xml(), data)
        return time.process_time() - started_s
    finally:
        gc.enable()


def run_cut(parser: CompletionParser, data: bytes) -> None:
    for at in range(0, len(data), 4):
        parser.feed(data[at : at + 4])
    parser.finish()
