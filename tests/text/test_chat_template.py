"""Chat templates: what they are given, and that the messages' text cannot become their markup."""

from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2forge.errors import FormatError
from m2forge.text import chat_template
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


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "ran for more than"),
        (
            "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
            "ran for more than",
        ),
        ("{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}", "recursion|ran for more"),
        ("{% set n = namespace(s='ab') %}{% for a in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}", "characters"),
        ("{% set n = namespace(s='ab') %}{% for a in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}", "characters"),
        ("{% set s = 'x' * 99999 %}{% for a in range(99999) %}{{ s }}{% endfor %}", "characters"),
        ("{{ 'x' * 999999999 }}", "characters"),
        ("{{ 999999999 * 'x' }}", "characters"),
        ("{{ 9 ** 999999999 }}", "too large a number"),
        ("{{ 'x' | center(999999999) }}", "width or count"),
        ("{{ 'x'.ljust(999999999) }}", "width or count"),
        ("{{ '%999999999d' % 1 }}", "width of a formatted"),
        ("{{ '%999999999d' | format(1) }}", "width of a formatted"),
        ("{{ '{:>999999999}'.format(1) }}", "width of a formatted"),
        ("{% set s = 'x' * 99999 %}{{ s.replace('x', s) }}", "characters"),
        ("{% set s = 'x' * 99999 %}{{ s | replace('x', s) }}", "characters"),
        ("{% set s = 'x' * 99999 %}{{ s | join(s) }}", "characters"),
        ("{% set s = 'x' * 99999 %}{{ s.join(s) }}", "characters"),
        ("{{ [1] | tojson(indent=999999999) }}", "width or count"),
        ("{{ lipsum(n=99999) }}", "undefined"),
        ("{{ messages.append(1) }}", "unsafe|not safely"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% set n = namespace() %}{% set n._x = 1 %}", "attribute '_x'"),
    ],
)
def test_a_hostile_template_is_stopped(source: str, error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_S", 0.2)
    monkeypatch.setattr(chat_template, "MAX_CHARS", 1 << 20)
    with pytest.raises(FormatError, match=error):
        rendered(source, "a")


def test_a_template_too_long_is_refused() -> None:
    with pytest.raises(FormatError, match="expected at most"):
        rendered(" " * (chat_template.MAX_SOURCE_CHARS + 1))


def test_what_a_generation_block_sets_stays_inside() -> None:
    """As in transformers, where the block is a call."""
    assert rendered("{% set x = 1 %}{% generation %}{% set x = 2 %}{% endgeneration %}{{ x }}", "") == [("1", False)]


def test_a_breaker_that_is_written_as_an_escape_goes_too() -> None:
    parts = rendered("{{ messages[0].content | tojson(ensure_ascii=true) }}", "x<a>y")
    assert parts == [('"x<a>y"', False)]
