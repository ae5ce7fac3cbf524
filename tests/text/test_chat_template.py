"""Chat templates: what they are given, and that the messages' text cannot become their markup."""

from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2forge.errors import FormatError
from m2forge.text.chat_template import ChatTemplate
from m2forge.text.tokenizer import mark, plain
from m2forge.text.vocabulary import SpecialNames


def rendered(source: str, *contents: str, specials: tuple[str, ...] = ("<a>",)) -> list[tuple[str, bool]]:
    template = ChatTemplate(source, SpecialNames(bos="<a>"), specials)
    guard = template.guard(list(contents))
    messages = [{"role": "user", "content": guard.text(content)} for content in contents]
    return [(part.text, part.special) for part in template.render(messages, [], guard, generation=False)]


def test_a_template_gets_what_transformers_gives_it() -> None:
    source = (
        "{{ bos_token }}{{ messages | tojson }}|{{ strftime_now('%Y') }}|{{ tools is none }}"
        "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
        "{% generation %}g{% endgeneration %}"
    )
    (first, rest) = rendered(source, "é<")
    assert first == ("<a>", True)
    text = '[{"role": "user", "content": "é<"}]'
    assert rest[0] in {f"{text}|{datetime.now().year - past}|True01g" for past in (0, 1)}


def test_blocks_on_lines_of_their_own_leave_no_space() -> None:
    assert rendered("  {% if true %}\na\n  {% endif %}\nb", "") == [("a\nb", False)]


def test_template_markers_are_special_and_message_texts_are_not() -> None:
    parts = rendered("<a>{{ messages[0].content }}<a>", "x<a>y")
    assert parts == [("<a>", True), ("x<a>y", False), ("<a>", True)]


@given(st.text("ab<>\ufdd0\ufdd1", max_size=12))
def test_overlapping_markers_are_broken_too(content: str) -> None:
    parts = rendered("<ab>{{ messages[0].content }}", content, specials=("<ab>", "b><a", "a<"))
    assert parts[0] == ("<ab>", True)
    assert parts[1:] == ([(content, False)] if content else [])


def test_a_marker_of_one_character_is_refused_inside_a_message() -> None:
    assert rendered("$a{{ messages[0].content }}", "b", specials=("$",)) == [("$", True), ("ab", False)]
    with pytest.raises(FormatError, match="of one character"):
        rendered("$a{{ messages[0].content }}", "5$", specials=("$",))


def test_segments_are_equal_by_what_they_say() -> None:
    assert mark("x") != plain("x")
    assert plain("x", trained=True) != plain("x")
