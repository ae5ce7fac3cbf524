"""Tokens cut into parts: thinking, calls and observations apart, every token in one part, whatever was sampled."""

import random

from hypothesis import given
from hypothesis import strategies as st

from m2forge.page.message_part import Part, TokenText, cut_completion, cut_prompt
from m2forge.tasks.catalog import find_family
from m2forge.text.format import ChatFormat
from m2forge.text.message import Message, ToolCall


def shown(parts: list[Part], texts: list[str]) -> list[tuple[str, str]]:
    """Kinds and texts, less the markers."""
    found = [(part.kind, "".join(texts[part.start : part.end])) for part in parts]
    return [(kind, text) for kind, text in found if kind != "marker"]


def test_a_prompt_is_cut_by_its_roles(format: ChatFormat) -> None:
    call = Message("assistant", "", "I look.", (ToolCall("look", {"key": "4B"}),))
    messages = [Message("system", "Be brief."), Message("user", "Do it."), call, Message("tool", "1J")]
    ids = format.render(messages, generation=True).ids
    texts = TokenText(format).texts(ids)
    kinds = shown(cut_prompt(ids, texts, [], format), texts)
    assert [kind for kind, _ in kinds] == ["system", "user", "assistant", "observation"]
    assert kinds[0][1] == "Be brief."
    assert kinds[1][1] == "Do it."
    assert kinds[3][1] == "<response>1J</response>"


def test_a_leg_that_begins_inside_a_message_keeps_its_role(format: ChatFormat) -> None:
    ids = format.render([Message("user", "one two three four five six")], generation=True).ids
    cut = len(ids) - 12
    texts = TokenText(format).texts(ids[cut:])
    kinds = shown(cut_prompt(ids[cut:], texts, ids[:cut], format), texts)
    assert [kind for kind, _ in kinds] == ["user"]


def test_a_completion_is_cut_by_the_formats_parser(format: ChatFormat) -> None:
    family = find_family("chain")
    task = family.draw(1, 3)
    messages = family.demonstrate(task, random.Random(0))
    first = next(index for index, message in enumerate(messages) if message.role == "assistant")
    prompt = format.render(messages[:first], family.tools(task), generation=True).ids
    ids = format.render(messages[: first + 1], family.tools(task)).ids[len(prompt) :]
    texts = TokenText(format).texts(ids)
    parts, completion = cut_completion(texts, format, family.tools(task))
    kinds = shown(parts, texts)
    assert [kind for kind, _ in kinds] == ["thinking", "call"]
    assert kinds[0][1] == messages[first].thinking
    assert kinds[1][1].startswith("<minimax:tool_call>")
    assert kinds[1][1].endswith("</minimax:tool_call>")
    assert completion is not None
    assert (completion.tool_calls[0].name, completion.problems) == (messages[first].tool_calls[0].name, ())


@given(st.lists(st.integers(0, 605), max_size=40), st.booleans())
def test_every_token_is_in_one_part(format: ChatFormat, ids: list[int], knows_text: bool) -> None:
    known = format if knows_text else None
    texts = TokenText(known).texts(ids)
    assert len(texts) == len(ids)
    for parts in (cut_prompt(ids, texts, [], known), cut_completion(texts, known, ())[0]):
        places = [place for part in parts for place in range(part.start, part.end)]
        assert places == list(range(len(ids)))


def test_characters_belong_to_the_token_that_completes_them(format: ChatFormat) -> None:
    ids = format.tokenizer.encode("Grüße 你好 🙂!")
    texts = TokenText(format).texts(ids)
    assert "".join(texts) == "Grüße 你好 🙂!"
    assert "�" not in "".join(texts)
    assert TokenText(format).texts([10**6]) == ["⟨1000000⟩"]
