"""Tool-call validity: what counts, what a prompt file may hold, and a whole suite with a scripted network."""

import json
from pathlib import Path

import numpy as np
import pytest

from m2forge.errors import DataError, FormatError
from m2forge.evaluate.config import CompletionConfig
from m2forge.evaluate.prompts.prompt_file import read_prompts
from m2forge.evaluate.prompts.scored_sample import Sample
from m2forge.evaluate.suites.suite import measure_tool_calls, render_tool_prompts
from m2forge.evaluate.suites.tool_call import ToolPrompt, judge, parse_tool_prompt
from m2forge.records import JsonValue
from m2forge.text.format import MINIMAX_M2_SPECIALS, ChatFormat, make_format
from m2forge.text.message import Message, Tool, ToolCall
from m2forge.text.parser import Completion, Problem, ProblemKind
from m2forge.text.tokenizer import train_tokenizer
from tests.evaluate.oracle import Oracle

WEATHER = Tool(
    "weather",
    "Tell the weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "places": {"items": {"type": "string"}},
        },
        "required": ["city"],
    },
)
ROME = ToolCall("weather", {"city": "Rome", "days": 2})


def completion(*calls: ToolCall, problems: tuple[Problem, ...] = ()) -> Completion:
    return Completion("", "", calls, problems, closed=True)


@pytest.mark.parametrize(
    ("made", "is_equal", "reason"),
    [
        (completion(ROME), True, ""),
        (completion(ToolCall("weather", {"days": 2, "city": "Rome"}, id="7")), True, ""),
        (completion(ToolCall("weather", {"city": "Oslo"})), False, ""),
        (completion(ROME, ROME), False, ""),
        (completion(), False, "no tool call"),
        (completion(ToolCall("wether", {})), False, "unknown tool 'wether'"),
        (completion(ToolCall("weather", {})), False, "weather: city: missing"),
        (completion(ToolCall("weather", {"city": 3})), False, "weather: city: expected string, received 3"),
        (completion(ToolCall("weather", {"city": "Rome", "x": 1})), False, "weather: unknown argument 'x'"),
        (completion(ToolCall("weather", {"city": "Rome", "places": [1]})), False, "places[0]: expected string"),
        (completion(ROME, problems=(Problem(ProblemKind.STRAY_TAG, "tag"),)), True, "stray_tag: tag"),
        (completion(ToolCall("f", {}), problems=(Problem(ProblemKind.UNKNOWN_TOOL, "f"),)), False, "unknown_tool: f"),
    ],
)
def test_what_makes_a_call_valid(made: Completion, is_equal: bool, reason: str) -> None:
    verdict = judge(made, [WEATHER], [ROME])
    assert verdict.is_equal is is_equal
    assert verdict.is_valid is (reason == "")
    assert len(verdict.reasons) == (reason != "")
    assert all(reason in told for told in verdict.reasons)


def call_message(city: str) -> dict[str, JsonValue]:
    arguments: dict[str, JsonValue] = {"city": city}
    return {"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": arguments}}]}


USER: dict[str, JsonValue] = {"role": "user", "content": "How is the weather?"}
RESULT: dict[str, JsonValue] = {"role": "tool", "content": "Fine."}
TOOLS: list[JsonValue] = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER.parameters}}]


def test_a_conversation_is_cut_before_its_last_call() -> None:
    messages: list[JsonValue] = [
        USER,
        call_message("Rome"),
        RESULT,
        call_message("Oslo"),
        RESULT,
        {"role": "assistant", "content": "Fine."},
    ]
    prompt = parse_tool_prompt({"messages": messages, "tools": TOOLS})
    assert [message.role for message in prompt.messages] == ["user", "assistant", "tool"]
    assert [call.arguments for call in prompt.reference] == [{"city": "Oslo"}]
    assert parse_tool_prompt({"messages": [USER], "tools": TOOLS}) == ToolPrompt(
        (Message("user", "How is the weather?"),), (Tool("weather", "", WEATHER.parameters),), ()
    )


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"messages": [USER]}, "tools: expected a list"),
        ({"messages": "x", "tools": TOOLS}, "messages: expected a list"),
        ({"messages": [], "tools": TOOLS}, "at least one message"),
        ({"messages": [USER], "tools": []}, "one tool"),
        ({"messages": [USER, {"role": "assistant", "content": "Hi"}], "tools": TOOLS}, "never calls a tool"),
        ({"messages": [call_message("Rome")], "tools": TOOLS}, "never calls a tool after"),
        ({"messages": [{"role": "clown"}], "tools": TOOLS}, "role"),
    ],
)
def test_records_without_a_call_to_ask_for_are_refused(record: dict[str, JsonValue], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        parse_tool_prompt(record)


@pytest.fixture(scope="module")
def chat() -> ChatFormat:
    texts = ["How is the weather in Rome? It is fine in Oslo, city by city."] * 4
    return make_format("auto", train_tokenizer(texts, 300, MINIMAX_M2_SPECIALS))


def test_a_suite_reads_prompts_completes_them_and_judges(tmp_path: Path, chat: ChatFormat) -> None:
    cities = ["Rome", "Oslo", "Bern", "Kyiv", "Lima", "Bonn", "Cork", "Nice"]
    lines = [json.dumps({"messages": [USER, call_message(city)], "tools": TOOLS}) for city in cities]
    lines = [line.replace("How is", f"In {city}: how is") for line, city in zip(lines, cities, strict=True)]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join([*lines, "", "{broken", '{"messages": []}']) + "\n")
    file = read_prompts(path, parse_tool_prompt)
    assert len(file.problems) == 2
    assert "line 10: " in file.problems[0]
    samples = []
    for index, (_, prompt) in enumerate(file.prompts):
        made = prompt.reference if index < 5 else (ToolCall("weather", {"city": "Paris"}),) if index < 6 else ()
        turn = Message("assistant", "", "It is asked.", made)
        start = len(chat.render(prompt.messages, prompt.tools, generation=True).ids)
        whole = chat.render([*prompt.messages, turn], prompt.tools)
        ids = whole.ids[: 1 + max(place for place, trained in enumerate(whole.trained) if trained)]
        samples.append(Sample(np.array(ids, np.int32), ((start, len(ids)),), 0))
    oracle = Oracle(samples, vocab_size=chat.tokenizer.vocab_size)
    config = CompletionConfig(prompts=path, max_new_tokens=200)
    asked = render_tool_prompts(chat, file)
    measured = measure_tool_calls(oracle, chat, asked, config, seed=0, max_pack_tokens=1 << 14)
    valid, equal = measured.cells
    assert (valid.suite, valid.score, valid.num_samples) == ("tool_calls", 6 / 8, 8)
    assert (equal.suite, equal.score) == ("tool_calls_equal", 5 / 8)
    assert [failure.line for failure in measured.failures] == [7, 8]
    assert measured.failures[0].reasons == ("no tool call",)
    assert "It is asked." in measured.failures[0].completion
    assert measured.notes[0].startswith("2 lines were left out; the first: ")


def test_a_file_without_a_usable_line_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'"text"\n\xff\n')
    with pytest.raises(DataError, match=r"no usable line .*line 1: expected an object, received str"):
        read_prompts(path, parse_tool_prompt)
    with pytest.raises(DataError, match="cannot be read"):
        read_prompts(tmp_path / "none", parse_tool_prompt)


def test_inexpressible_lines_are_reported_and_skipped(tmp_path: Path, chat: ChatFormat) -> None:
    path = tmp_path / "prompts.jsonl"
    records: list[JsonValue] = [
        {"messages": [USER, {"role": "system", "content": "late"}], "tools": TOOLS},
        {"messages": [{"role": "user", "content": "\ud800"}], "tools": TOOLS},
        {"messages": [USER], "tools": TOOLS},
    ]
    path.write_text("\n".join(map(json.dumps, records)))
    asked = render_tool_prompts(chat, read_prompts(path, parse_tool_prompt))
    assert asked.lines == (3,)
    assert sorted(problem.split(": ")[0] for problem in asked.problems) == [f"{path}, line {n}" for n in (1, 2)]
    path.write_text(json.dumps(records[0]))
    with pytest.raises(DataError, match=r"can express no line .*line 1: message 1 \(system\)"):
        render_tool_prompts(chat, read_prompts(path, parse_tool_prompt))


def test_only_so_many_prompts_are_taken(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"messages": [USER], "tools": TOOLS}) + "\n" + "{}\n" * 3)
    assert read_prompts(path, parse_tool_prompt, max_prompts=1).problems == ()
