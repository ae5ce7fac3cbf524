"""The template format: text as transformers has it, and what probing finds: ends, thinking, calls, rewritten turns."""

import functools
import json
import logging
import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from m2forge.errors import FormatError, PrefixError
from m2forge.records import JsonValue
from m2forge.text.format import make_format
from m2forge.text.message import Message, Tool, ToolCall, tool_to_openai
from m2forge.text.rewrite import check_rewrites, find_rewrites
from m2forge.text.template import TemplateFormat, UnknownFormError
from m2forge.text.tokenizer import Tokenizer, load_tokenizer
from m2forge.text.vocabulary import SpecialNames
from tests.text.draw import TOOLS, smollm2_tokenizer
from tests.text.own_template import (
    CODER,
    GLM,
    LLAMA,
    MISTRAL,
    QWEN,
    R1,
    TEMPLATES,
    template_format,
    tokenizer_of,
)

FOLDER = os.environ.get("M2FORGE_TEMPLATES", "")
"""Folder of public chat templates, NAME.jinja; one named NAME-tool_use.jinja is used for conversations with tools."""
PUBLIC = sorted(Path(FOLDER).glob("*.jinja")) if FOLDER else []
USER, RESULT = Message("user", "Find a."), Message("tool", "3 results", tool_call_id="abcdef012")
CALL = ToolCall("search", {"query": "a b", "limit": 3}, "abcdef012")


def peer_of(tokenizer: Tokenizer) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(Path(folder))
        return AutoTokenizer.from_pretrained(folder)


@functools.cache
def pair(template: str) -> tuple[TemplateFormat, Any]:
    format = template_format(template)
    return format, peer_of(format.tokenizer)


# -- as transformers renders -------------------------------------------------------------------------------------------


def hugging_face(format: TemplateFormat, messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages as a user of transformers writes them."""
    data: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    for message in messages:
        one: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.thinking and format.has_thinking_fields:
            one["reasoning_content"] = message.thinking
        elif message.thinking:
            one["content"] = f"<think>\n{message.thinking}\n</think>\n\n{message.content}"
        if message.tool_calls:
            names |= {call.id: call.name for call in message.tool_calls}
            calls = [{"name": call.name, "arguments": call.arguments} for call in message.tool_calls]
            ids = [call.id for call in message.tool_calls]
            one["tool_calls"] = [
                {"type": "function", "id": id, "function": call} for id, call in zip(ids, calls, strict=True)
            ]
        if message.role == "tool":
            one |= {"name": names[message.tool_call_id], "tool_call_id": message.tool_call_id}
        data.append(one)
    return data


words = st.lists(
    st.sampled_from(
        ["Hi", " there", ",\n", " 12 é", "\n\n", " 東京", ".", "{x}", "'\"\\", "<|im_end|>", "</s>", "</b>"]
    ),
    max_size=5,
).map(lambda parts: "".join(["I", *parts]))


@st.composite
def exchanges(draw: st.DrawFn, text: st.SearchStrategy[str] = words) -> tuple[list[Message], list[Tool], bool]:
    """A conversation in which roles alternate as every template demands, its tools, and whether an answer follows."""
    tools = list(TOOLS) if draw(st.booleans()) else []
    messages = [Message("system", draw(text))] if draw(st.booleans()) else []
    number = 0
    for _ in range(draw(st.integers(1, 3))):
        messages.append(Message("user", draw(text)))
        for _ in range(draw(st.integers(0, 2)) if tools else 0):
            calls = []
            for _ in range(draw(st.integers(1, 2))):
                number += 1
                arguments: dict[str, JsonValue] = {
                    "query": draw(text),
                    "limit": draw(st.integers(0, 9)),
                    "tags": [draw(text)],
                }
                calls.append(ToolCall("search", arguments, f"call{number:05d}"))
            content, thinking = (draw(text) if draw(st.booleans()) else "" for _ in range(2))
            messages.append(Message("assistant", content, thinking, tuple(calls)))
            messages += [Message("tool", draw(text), tool_call_id=call.id) for call in calls]
        messages.append(Message("assistant", draw(text), draw(text) if draw(st.booleans()) else ""))
    ends = draw(st.sampled_from(["answer", "question", "result"]))
    while ends != "answer" and messages[-1].role not in ("user", "tool")[: 1 if ends == "question" else 2]:
        messages.pop()
    return messages, tools, draw(st.booleans()) and messages[-1].role != "assistant"


def check_text(format: TemplateFormat, peer: Any, case: tuple[list[Message], list[Tool], bool]) -> None:
    messages, tools, generation = case
    described = [tool_to_openai(tool) for tool in tools] or None
    try:
        expected = peer.apply_chat_template(
            hugging_face(format, messages), tools=described, add_generation_prompt=generation, tokenize=False
        )
    except Exception:  # noqa: BLE001  (a template raises anything)
        with pytest.raises(FormatError):
            format.text(messages, tools, generation=generation)
        return
    assert format.text(messages, tools, generation=generation) == expected


def check_tokens(format: TemplateFormat, peer: Any, case: tuple[list[Message], list[Tool], bool]) -> None:
    """Prompts have the ids of transformers; an answer's text begins and ends at a border, so it has no space there."""
    messages, tools, _ = case
    while messages[-1].role == "assistant":
        messages = messages[:-1]
    described = [tool_to_openai(tool) for tool in tools] or None
    try:
        text = format.text(messages, tools, generation=True)
        ours = format.render(messages, tools, generation=True).ids
    except FormatError:
        return
    assert ours == peer.encode(text, add_special_tokens=False)
    ids = peer.apply_chat_template(
        hugging_face(format, messages), tools=described, add_generation_prompt=True, return_dict=False
    )
    assert ours == ids


@pytest.mark.parametrize("name", TEMPLATES)
@given(case=exchanges())
def test_text_is_that_of_transformers(name: str, case: tuple[list[Message], list[Tool], bool]) -> None:
    check_text(*pair(TEMPLATES[name]), case)


plain_words = st.lists(st.sampled_from(["Hi", " there", ", 12 é", " 東京", ".", "{x}"]), max_size=4).map(
    lambda parts: "".join(["I", *parts])
)


@pytest.mark.parametrize("name", TEMPLATES)
@given(case=exchanges(plain_words))
def test_ids_are_those_of_transformers(name: str, case: tuple[list[Message], list[Tool], bool]) -> None:
    check_tokens(*pair(TEMPLATES[name]), case)


def test_ids_of_smollm2_are_those_of_transformers() -> None:
    tokenizer = smollm2_tokenizer()
    format, peer = TemplateFormat(tokenizer), peer_of(tokenizer)

    @given(case=exchanges(plain_words))
    def run(case: tuple[list[Message], list[Tool], bool]) -> None:
        check_tokens(format, peer, (case[0], [], False))

    run()


@functools.cache
def public_pair(path: Path) -> tuple[TemplateFormat, Any]:
    source = path.read_text(encoding="utf-8")
    is_llama = "<|start_header_id|>" in source
    names = SpecialNames(bos="<|begin_of_text|>", eos="<|eot_id|>") if is_llama else SpecialNames("<s>", "</s>")
    marks = ("<start_of_turn>", "<end_of_turn>", "<think>", "</think>", "<|endoftext|>", "<｜end▁of▁sentence｜>")
    tool_use = source if path.stem.endswith("tool_use") else None
    tokenizer = tokenizer_of(QWEN if tool_use else source, names=names, tool_use=tool_use, specials=marks)
    format = TemplateFormat(tokenizer)
    return format, peer_of(tokenizer)


@pytest.mark.skipif(not PUBLIC, reason="M2FORGE_TEMPLATES names no folder of chat templates")
@pytest.mark.parametrize("path", PUBLIC or [Path("none")], ids=lambda path: path.stem)
@given(case=exchanges(), plain_case=exchanges(plain_words))
def test_public_templates_render_as_in_transformers(
    path: Path, case: tuple[list[Message], list[Tool], bool], plain_case: tuple[list[Message], list[Tool], bool]
) -> None:
    check_text(*public_pair(path), case)
    check_tokens(*public_pair(path), plain_case)


# -- what probing finds ------------------------------------------------------------------------------------------------


def test_ends_thinking_and_calls_are_found() -> None:
    found = {
        name: (
            format.call_syntax,
            format.tokenizer.decode(format.closing_ids),
            format.tokenizer.decode(format.stop_ids),
            format.has_thinking_fields,
        )
        for name, format in ((name, template_format(template)) for name, template in TEMPLATES.items())
    }
    assert found == {
        "llama": ("llama3", "<|eot_id|>", "<|eot_id|></s>", False),
        "mistral": ("mistral", "</s>", "</s>", False),
        "qwen": ("hermes", "<|im_end|>", "<|im_end|></s>", True),
        "coder": ("xml", "<|im_end|>", "<|im_end|></s>", False),
        "r1": (None, "<|end|>", "<|end|></s>", True),
        "glm": ("glm", "<|user|><|observation|>", "<|user|><|observation|></s>", True),
    }


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name != "r1"])
def test_a_rendered_call_is_read_back(name: str) -> None:
    format = template_format(TEMPLATES[name])
    rendered = format.render([USER, Message("assistant", "", "", (CALL,))], TOOLS)
    sampled = [id for id, was_sampled in zip(rendered.ids, rendered.trained, strict=True) if was_sampled]
    assert sampled[-1] in format.closing_ids
    parser = format.parser(TOOLS)
    parser.feed(format.tokenizer.decode_bytes(sampled))
    completion = parser.finish()
    assert [(call.name, call.arguments) for call in completion.tool_calls] == [(CALL.name, CALL.arguments)]
    assert (completion.content, completion.closed, completion.problems) == ("", True, ())


@pytest.mark.parametrize("name", TEMPLATES)
@given(case=exchanges(plain_words), at=st.integers(0, 9))
def test_ids_are_appended_or_the_rewrite_is_refused(
    name: str, case: tuple[list[Message], list[Tool], bool], at: int
) -> None:
    format = template_format(TEMPLATES[name])
    messages, tools, generation = case
    at = min(at, len(messages) - 1)
    history, new = messages[:at], messages[at:]
    try:
        before, whole = (format.render(part, tools) for part in (history, messages))
        if generation:
            whole = format.render(messages, tools, generation=True)
        added = format.extend(history, new, tools, generation=generation)
    except PrefixError:
        assert whole.ids[: len(before.ids)] != before.ids
        return
    except FormatError:
        return
    assert before.ids + added.ids == whole.ids
    assert added.trained == whole.trained[len(before.ids) :]


def test_a_sampled_answer_is_the_prompt_continued() -> None:
    for template in TEMPLATES.values():
        format = template_format(template)
        answer = Message("assistant", "Two.", "" if format.call_syntax in ("llama3", "mistral") else "Count them.")
        prompt = format.render([USER], generation=True).ids
        rendered = format.render([USER, answer])
        assert rendered.ids[: len(prompt)] == prompt
        assert rendered.trained == [False] * len(prompt) + [True] * (len(rendered.ids) - len(prompt))
        parser = format.parser()
        parser.feed(format.tokenizer.decode_bytes(rendered.ids[len(prompt) :]))
        assert parser.finish().message() == answer


def test_answers_before_a_rewritten_one_have_no_loss() -> None:
    format = template_format(QWEN)
    thinking = Message("assistant", "Two.", "Count them.")
    rendered = format.render([USER, thinking, USER, replace(thinking, content="Three.")])
    trained = format.tokenizer.decode(
        [id for id, is_trained in zip(rendered.ids, rendered.trained, strict=True) if is_trained]
    )
    assert trained == "<think>\nCount them.\n</think>\n\nThree.<|im_end|>"


def test_an_answer_that_the_template_does_not_show_is_refused() -> None:
    with pytest.raises(FormatError, match="content would be read differently"):
        template_format(LLAMA).render([USER, Message("assistant", "I look.", "", (CALL,))], TOOLS)


def test_special_tokens_in_messages_are_text() -> None:
    format = template_format(LLAMA)
    ids = format.render([Message("user", "<|eot_id|><|start_header_id|>")], generation=True).ids
    assert ids.count(format.tokenizer.special("<|eot_id|>")) == 2


def test_the_template_for_tools_is_used_with_tools(tmp_path: Path) -> None:
    tokenizer_of(LLAMA, tool_use=QWEN).save(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    format = TemplateFormat(tokenizer)
    assert format.call_syntax == "hermes"
    assert "<|im_start|>" in format.text([USER], TOOLS)
    assert "<|im_start|>" not in format.text([USER])
    peer: Any = AutoTokenizer.from_pretrained(tmp_path)
    for tools in ([], [tool_to_openai(tool) for tool in TOOLS]):
        expected = peer.apply_chat_template([{"role": "user", "content": "a"}], tools=tools or None, tokenize=False)
        assert format.text([Message("user", "a")], TOOLS if tools else ()) == expected


def test_eos_ids_of_the_generation_config_stop_too(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(LLAMA)
    tokenizer.save(tmp_path)
    id = tokenizer.special("<|user|>")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [id, 99999]}))
    assert TemplateFormat(load_tokenizer(tmp_path)).stop_ids[-1] == id


def test_tokens_that_take_in_space_do_so() -> None:
    from tokenizers import AddedToken

    tokenizer = tokenizer_of(LLAMA)
    core = tokenizer._vocabulary.core
    core.add_special_tokens([AddedToken("<|end_header_id|>", special=True, normalized=False, rstrip=True)])
    stripping = Tokenizer(replace(tokenizer._vocabulary, core=core))
    check_tokens(TemplateFormat(stripping), peer_of(stripping), ([Message("user", "Hi there")], [], True))


def test_auto_uses_the_template_where_no_format_of_ours_fits() -> None:
    assert make_format("auto", tokenizer_of(LLAMA)).name == "template"
    assert make_format("auto", tokenizer_of(QWEN)).name == "chatml"
    assert make_format("auto", tokenizer_of(CODER)).name == "template"
    with pytest.raises(FormatError, match="drop_thinking"):
        make_format("template", tokenizer_of(LLAMA), drop_thinking=True)


# -- what is refused ---------------------------------------------------------------------------------------------------

ALPACA = "{% for m in messages %}### {{ m.role }}:\n{{ m.content }}\n\n{% endfor %}### assistant:\n"
CHANNELS = (
    "{% for m in messages %}<|start|>{{ m.role }}<|channel|>final<|message|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "error"),
    [
        ("{% for %}", "cannot be compiled"),
        ("{{ messages[0].content + 1 }}", "cannot express these messages"),
        ("{% for m in messages %}[INST]{{ m.role }}[/INST]{% endfor %}", "does not write the content"),
        (ALPACA, "no special token"),
        (CHANNELS, "a form that is not known"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused(template: str, error: str) -> None:
    with pytest.raises(FormatError, match=error) as caught:
        TemplateFormat(tokenizer_of(template))
    assert isinstance(caught.value, UnknownFormError) == (not error.startswith("cannot"))


def test_tools_without_a_known_syntax_are_refused() -> None:
    odd = QWEN.replace("<tool_call>", "<odd>").replace("</tool_call>", "</odd>")
    with pytest.raises(FormatError, match=r"syntax that is not known .*known: hermes"):
        template_format(odd).render([USER], TOOLS, generation=True)
    with pytest.raises(FormatError, match="takes no tools"):
        template_format(R1).extend([], [USER], TOOLS, generation=True)
    assert template_format(odd).render([USER], generation=True).ids


# -- rewritten prefixes ------------------------------------------------------------------------------------------------


def test_rewritten_prefixes_are_found_with_their_trigger() -> None:
    answered = "a user's message that follows an answer"
    found = {name: [one.trigger for one in find_rewrites(template_format(TEMPLATES[name]))] for name in TEMPLATES}
    assert found == {
        "llama": [],
        "mistral": [f"{answered} where tools are offered", f"{answered} after tool calls"],
        "qwen": [
            f"{answered} with thinking",
            f"{answered} where tools are offered with thinking",
            f"{answered} after tool calls with thinking",
        ],
        "coder": [],
        "r1": [answered],
        "glm": [],
    }
    (lost, *_) = find_rewrites(template_format(R1))
    assert 0 < lost.num_lost < lost.num_tokens


def test_a_rewriting_format_is_announced_or_refused(caplog: pytest.LogCaptureFixture) -> None:
    def check(template: str, policy: Any) -> None:
        check_rewrites(template_format(template), policy, key="gateway.prefix_rewrites", cost="it branches")

    with caplog.at_level(logging.WARNING):
        check(LLAMA, "refuse")
        check(GLM, "refuse")
        assert not caplog.records
        check(QWEN, "allow")
    (record,) = caplog.records
    assert "differently after a user's message that follows an answer with thinking (" in record.getMessage()
    assert "it branches" in record.getMessage()
    with pytest.raises(FormatError, match=r'gateway\.prefix_rewrites = "refuse" forbids it'):
        check(MISTRAL, "refuse")
