"""Letters and their scripts."""

import pytest

from m2forge.reward.rule import EAST_ASIAN, HANGUL, LATIN, count_letters, count_written, dominant, script_of


@pytest.mark.parametrize(
    ("characters", "script"),
    [
        ("aZéßĳøđ", LATIN),
        ("аЯёѣ", "CYRILLIC"),
        ("λΩ", "GREEK"),
        ("漢字々ひらカター", EAST_ASIAN),
        ("한글", HANGUL),
        ("אבע", "HEBREW"),
        ("رب", "ARABIC"),
        ("हूँ", "DEVANAGARI"),
        ("1 ,。·+−∑€🙂👍🏽①𝒙𝔸µ", None),
    ],
)
def test_every_character_has_its_script_or_none(characters: str, script: str | None) -> None:
    assert {script_of(character) for character in characters} == {script}


def test_letters_are_counted_by_what_they_take_the_place_of() -> None:
    assert count_letters("ab 1 漢字 한 हूँ!") == {LATIN: 2, EAST_ASIAN: 6, HANGUL: 2, "DEVANAGARI": 3}


def test_of_equals_the_first_by_name_is_dominant() -> None:
    assert dominant(count_letters("да no")) == "CYRILLIC"
    assert dominant(count_letters("да not")) == LATIN
    assert dominant(count_letters("1 + 1")) is None


def test_only_what_tells_of_a_language_is_written_in_it() -> None:
    text = "мы видим α и Москва, one two three, four five six seven"
    assert count_written(text, {"CYRILLIC", "GREEK"}, "Москва слезам", 4) == {"CYRILLIC": 7}
    assert count_written(text, {LATIN}, "", 4) == {LATIN: 27}
    assert count_written(text, {LATIN}, "", 8) == {}
    assert count_written(text, {LATIN}, f"<{text}>", 4) == {}
