"""Tool calls in the syntaxes of other models: read as written, malformed ones reported, text left as text."""

import pytest

from m2forge.text.call_syntax import SYNTAXES, PlainParser
from m2forge.text.message import Tool
from m2forge.text.parser import CallStarted, Completion, ContentDelta, ProblemKind
from tests.text.draw import TOOLS

F = Tool("f", "", {"type": "object", "properties": {"k": {"type": "string"}, "n": {"type": "integer"}}})
K, N = {"k": "v"}, {"k": "a\nb", "n": 3}


def read(name: str, text: str, *tools: Tool) -> Completion:
    parser = SYNTAXES[name](tools, end_marker="<|end|>", other_ends=("</s>",), starts_thinking=False)
    parser.feed(text)
    return parser.finish()


XML = "<tool_call>\n<function=f>\n<parameter=k>\na\nb\n</parameter>\n<parameter=n>\n3\n</parameter>\n</function>\n"
GLM = "<tool_call>f\n<arg_key>k</arg_key>\n<arg_value>a\nb</arg_value>\n<arg_key>n</arg_key><arg_value>3</arg_value>"


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        ("xml", f"{XML}</tool_call><|end|>", "", [N]),
        ("xml", f"Look.\n{XML}</tool_call>\n{XML}</tool_call></s>", "Look.", [N, N]),
        ("xml", "<tool_call><function=f></function></tool_call><|end|>", "", [{}]),
        ("glm", f"{GLM}\n</tool_call><|end|>", "", [N]),
        ("glm", "\n<tool_call>f</tool_call><|end|>", "", [{}]),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"k": "v"}, "id": "x"}]</s>', "", [K]),
        ("mistral", 'Hi[TOOL_CALLS] [{"name": "f", "arguments": "{}"}, {"name": "f"}]</s>', "Hi", [{}, {}]),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"k": "v"}[TOOL_CALLS]f[CALL_ID]7[ARGS]{}</s>', "", [K, {}]),
        ("mistral", '[TOOL_CALLS]f{"k": "v"}</s>', "", [K]),
        ("llama3", '{"name": "f", "parameters": {"k": "v"}}<|end|>', "", [K]),
        ("llama3", '\n<|python_tag|>{"name": "f", "arguments": {"k": "v"}}<|end|>', "\n", [K]),
        ("llama3", '{"name": "f", "parameters": {}}; {"name": "f", "parameters": {"k": "v"}}</s>', "", [{}, K]),
        ("llama3", '<think>\nt\n</think>\n\n{"name": "f", "parameters": {"k": "v"}}<|end|>', "", [K]),
    ],
)
def test_calls_are_read_as_written(name: str, text: str, content: str, calls: list[object]) -> None:
    completion = read(name, text, F)
    assert [call.arguments for call in completion.tool_calls] == calls
    assert {call.name for call in completion.tool_calls} == {"f"}
    assert (completion.content, completion.closed, completion.problems) == (content, True, ())


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [
        ("xml", "<tool_call>nothing</tool_call><|end|>", ProblemKind.MALFORMED_CALL),
        ("xml", "<tool_call><function=f>and</tool_call><|end|>", ProblemKind.MALFORMED_CALL),
        ("xml", "<tool_call><function=f>", ProblemKind.UNCLOSED_CALL),
        ("xml", XML.replace("3", "x") + "</tool_call><|end|>", ProblemKind.BAD_ARGUMENT),
        ("glm", "<tool_call>{}</tool_call><|end|>", ProblemKind.MALFORMED_CALL),
        ("mistral", "[TOOL_CALLS][{]</s>", ProblemKind.MALFORMED_CALL),
        ("mistral", '[TOOL_CALLS][{"name": 1}]</s>', ProblemKind.MALFORMED_CALL),
        ("mistral", "[TOOL_CALLS]f[ARGS]{</s>", ProblemKind.MALFORMED_CALL),
        ("mistral", '[TOOL_CALLS][{"name": "f"}]', ProblemKind.UNCLOSED_CALL),
        ("mistral", '[TOOL_CALLS][{"name": "g"}]</s>', ProblemKind.UNKNOWN_TOOL),
        ("llama3", '{"name": "f", "parameters": {"k"<|end|>', ProblemKind.MALFORMED_CALL),
        ("llama3", '{"name": "f", "parameters": 3}<|end|>', ProblemKind.MALFORMED_CALL),
        ("llama3", '{"name": "f", "parameters": {"n": "x"}}<|end|>', ProblemKind.BAD_ARGUMENT),
        ("llama3", '{"name": "f", "parameters": {"k"', ProblemKind.UNCLOSED_CALL),
        ("llama3", "<|python_tag|>print(1)<|end|>", ProblemKind.MALFORMED_CALL),
    ],
)
def test_malformed_calls_are_reported(name: str, text: str, kind: ProblemKind) -> None:
    completion = read(name, text, F)
    assert [problem.kind for problem in completion.problems] == [kind]
    assert bool(completion.tool_calls) == (kind in (ProblemKind.BAD_ARGUMENT, ProblemKind.UNKNOWN_TOOL))
    assert completion.content == ""


@pytest.mark.parametrize(
    "text", ['{"a": 1}', '{"name": "x"}', "{not json", '{"name": "f", "parameters": {}} is a call', ' {"a": 1} {"b"']
)
def test_json_that_is_no_call_is_content(text: str) -> None:
    for end in ("<|end|>", ""):
        completion = read("llama3", text + end, F)
        if "parameters" not in text:
            assert (completion.content, completion.tool_calls, completion.problems) == (text, (), ())
    assert read("llama3", '{"name": "f", "parameters": {}}<|end|>').content == '{"name": "f", "parameters": {}}'


def test_an_xml_call_is_named_before_it_ends() -> None:
    parser = SYNTAXES["xml"]([F], end_marker="<|end|>", other_ends=(), starts_thinking=False)
    assert parser.feed("Sure.\n<tool_call>\n<function=f>\n<para") == [ContentDelta("Sure."), CallStarted("f")]


def test_without_a_syntax_everything_is_content() -> None:
    parser = PlainParser(TOOLS, end_marker="<|end|>", starts_thinking=False)
    parser.feed("<think>t</think><tool_call>{}</tool_call>[TOOL_CALLS]<|end|>")
    completion = parser.finish()
    assert (completion.thinking, completion.content) == ("t", "<tool_call>{}</tool_call>[TOOL_CALLS]")
    assert not completion.problems
