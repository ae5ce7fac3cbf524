"""Which scripts a text is written in, and how much of it in each: a cheap way to tell languages apart.

In: prose (`reward/prose.py`). Out: its letters per script, all of them or those that tell of a language. A script is
the first word of a letter's Unicode name; digits, signs, emoji, mathematical alphabets and letters of scripts not
listed here have none. Han, kana and bopomofo are one script here, since Japanese is written in all of them. An
ideograph says more than a letter of an alphabet, so letters are counted by what they take the place of: a Han or kana
character as 3, a Hangul syllable as 2, any other letter as 1.

These tell of no language:
- a word, of Latin a phrase, that the context contains: a name or a quotation;
- a single letter of an alphabet, of Greek up to three, which are symbols, alone or multiplied;
- Latin words where fewer than `min_latin_words` follow one another: terms and names.

What it cannot see: two languages of one script (English and French, Chinese and Japanese).
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
"""Letters that one character stands for; 1 unless named."""
_GREEK_SYMBOLS = 3
"""Letters of Greek that are taken for a product of symbols."""
_LATIN_GAP = r"[ ,;:'’()\-]+"
"""What stands between the words of one Latin phrase."""


@cache
def script_of(character: str) -> str | None:
    if unicodedata.category(character)[0] not in "LM":
        return None
    return _SCRIPT_OF_NAME.get(unicodedata.name(character, "").partition(" ")[0])


def count_letters(text: str) -> Counter[str]:
    """Letters of each script."""
    letters: Counter[str] = Counter()
    for character, count in Counter(text).items():
        script = script_of(character)
        if script is not None:
            letters[script] += count * _LETTERS.get(script, 1)
    return letters


def dominant(letters: Counter[str]) -> str | None:
    """The script of most letters; of equals, the first by name."""
    return min(letters, key=lambda script: (-letters[script], script), default=None)


def count_written(text: str, scripts: Collection[str], context: str, min_latin_words: int) -> Counter[str]:
    """Letters of each of `scripts`, less those that tell of no language: names, quotations, symbols and terms."""
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
