"""Counts the letters of a text per script: a cheap way to distinguish languages.

In: prose (`reward/prose.py`). Out: its letters per script, all of them or only those that indicate a language. A script
is the first word of a letter's Unicode name; digits, signs, emoji, mathematical alphabets and letters of scripts not
listed here have none. Han, kana and bopomofo are one script here, since Japanese uses all of them. An ideograph carries
more than a letter of an alphabet, so a Han or kana character counts 3, a Hangul syllable 2, any other letter 1.

These indicate no language:
- a word, in Latin a phrase, that the context contains: a name or a quotation;
- a single letter of an alphabet, up to three in Greek: symbols, alone or multiplied;
- runs of fewer than `min_latin_words` Latin words: terms and names.

It cannot distinguish two languages of one script (English and French, Chinese and Japanese).
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Collection
from functools import cache

EAST_ASIAN = "EAST ASIAN"
HANGUL = "HANGUL"
LATIN = "LATIN"
GREEK = "GREEK"

_EAST_ASIAN_NAMES = ("CJK", "HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA", "BOPOMOFO", "IDEOGRAPHIC")
_EUROPEAN = ("LATIN", "GREEK", "CYRILLIC", "ARMENIAN", "GEORGIAN")
_SEMITIC = ("HEBREW", "ARABIC", "SYRIAC", "THAANA", "ETHIOPIC")
_NORTH_INDIC = ("DEVANAGARI", "BENGALI", "GURMUKHI", "GUJARATI", "ORIYA")
_SOUTH_INDIC = ("TAMIL", "TELUGU", "KANNADA", "MALAYALAM", "SINHALA")
_FURTHER = ("THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN", "MONGOLIAN", "CHEROKEE")
_ALPHABETS = frozenset((*_EUROPEAN, *_SEMITIC, *_NORTH_INDIC, *_SOUTH_INDIC, *_FURTHER))
_SCRIPT_OF_NAME = {name: name for name in (*_ALPHABETS, HANGUL)} | dict.fromkeys(_EAST_ASIAN_NAMES, EAST_ASIAN)
_LETTERS = {EAST_ASIAN: 3, HANGUL: 2}
"""Number of letters that one character counts for; 1 if not listed."""
_GREEK_SYMBOLS = 3
"""Maximum Greek letters that count as a product of symbols."""
_LATIN_GAP = r"[ ,;:'’()\-]+"
"""Separator between the words of one Latin phrase."""


@cache
def script_of(character: str) -> str | None:
    if unicodedata.category(character)[0] not in "LM":
        return None
    return _SCRIPT_OF_NAME.get(unicodedata.name(character, "").partition(" ")[0])


def count_letters(text: str) -> Counter[str]:
    """Number of letters of each script."""
    letters: Counter[str] = Counter()
    for character, count in Counter(text).items():
        script = script_of(character)
        if script is not None:
            letters[script] += count * _LETTERS.get(script, 1)
    return letters


def dominant(letters: Counter[str]) -> str | None:
    """The script with most letters; on a tie, the first by name."""
    return min(letters, key=lambda script: (-letters[script], script), default=None)


def count_written(text: str, scripts: Collection[str], context: str, min_latin_words: int) -> Counter[str]:
    """Letters of each of `scripts`, without those that indicate no language: names, quotations, symbols and terms."""
    characters: dict[str, set[str]] = {}
    for character in set(text):
        script = script_of(character)
        if script is not None and script in scripts:
            characters.setdefault(script, set()).add(character)
    written: Counter[str] = Counter()
    for script, members in characters.items():
        word = f"[{''.join(sorted(members))}]+"
        pattern = f"{word}(?:{_LATIN_GAP}{word})*" if script == LATIN else word
        for found, count in Counter(re.findall(pattern, text)).items():
            words = re.findall(word, found)
            num_letters = sum(map(len, words))
            is_symbol = script in _ALPHABETS and num_letters <= (_GREEK_SYMBOLS if script == GREEK else 1)
            is_term = script == LATIN and len(words) < min_latin_words
            if not (is_symbol or is_term or found in context):
                written[script] += num_letters * count * _LETTERS.get(script, 1)
    return written
