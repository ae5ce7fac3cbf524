"""Process rules: rewards and penalties for a step, independent of the task's result.

A rule measures a step from 0 to 1 and has a weight: the process reward of a step is Σ weight · measure, where positive
weights are by default divided by the number of steps (`reward/judge.py`). A negative weight is a penalty, a
positive one a credit.

    malformed_call   1 if a tool call could not be parsed: no name or arguments, not closed, or with text inside
    bad_argument     1 if an argument is missing, unknown, duplicate or of another type than the tool's schema
    unknown_tool     1 if a call names a tool that was not offered
    language_mixing  how much foreign scripts are mixed in (`reward/rule.py`)
    structured_step  1 if the step has thinking, then a call or content, finished with "stop", and has no problem

No rule measures an aborted step, because the policy did not end it.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol
from unicodedata import normalize

from m2forge.records import Call, Episode, FinishReason
from m2forge.reward.config import MixingConfig, RulesConfig
from m2forge.text.format import ChatFormat
from m2forge.text.message import Message, Tool
from m2forge.text.parser import Completion, ProblemKind

_NO_PROSE = re.compile(
    # An unclosed bracket stops matching at the next one, so that no text makes this quadratic.
    r"```.*?(?:```|\Z)"
    r"|~~~.*?(?:~~~|\Z)"
    r"|`[^`\n]*`"
    r"|\$\$[^$]*\$\$|\$[^$\n]*\$"
    r"|\\\((?:[^\\\n]|\\(?![()]))*+\\\)|\\\[(?:[^\\]|\\(?![\[\]]))*+\\\]"
    r"|^[ \t]*>[^\n]*$"
    r"|\"[^\"\n]*\"|“[^“”\n]*”|„[^„“”\n]*[“”]|«[^«»\n]*»|「[^「」\n]*」|『[^『』\n]*』",
    re.DOTALL | re.MULTILINE,
)
_ASCII_WORD = re.compile(r"[!-~]+")
_EDGE = ".,;:!?()[]{}<>\"'*-|"
"""Punctuation allowed at the edges of a plain word."""
_GAP = " | "
"""Replaces removed text: it is not a word, and no phrase continues across it."""


def prose(text: str) -> str:
    """Extracts the prose of a text: removes everything that is not the writer's natural language.

    It removes fenced and inline code, formulas between dollars or LaTeX brackets, quotations (in quotation marks,
    within a line, or as lines that begin with `>`), and words that look like code: URLs, paths, identifiers, any ASCII
    word with a digit, an inner capital or inner punctuation. Time is linear in the text.
    """
    return _ASCII_WORD.sub(_plain, _NO_PROSE.sub(_GAP, unicodedata.normalize("NFC", text)))


def _plain(phrase: re.Match[str]) -> str:
    word = phrase.group()
    core = word.strip(_EDGE).replace("-", "").replace("'", "")
    is_plain = not core or (core.isalpha() and (core[1:].islower() or len(core) == 1))
    return word if is_plain else _GAP


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
    """Counts the letters of a text per script: a cheap way to distinguish languages.

    In: prose (`reward/rule.py`). Out: its letters per script, all of them or only those that indicate a language. A
    script is the first word of a letter's Unicode name; digits, signs, emoji, mathematical alphabets and letters of
    scripts not listed here have none. Han, kana and bopomofo are one script here, since Japanese uses all of them. An
    ideograph carries more than a letter of an alphabet, so a Han or kana character counts 3, a Hangul syllable 2, any
    other letter 1.

    These indicate no language:
    - a word, in Latin a phrase, that the context contains: a name or a quotation;
    - a single letter of an alphabet, up to three in Greek: symbols, alone or multiplied;
    - runs of fewer than `min_latin_words` Latin words: terms and names.

    It cannot distinguish two languages of one script (English and French, Chinese and Japanese).

    Letters of each of `scripts`, without those that indicate no language: names, quotations, symbols and terms.
    """
    characters: dict[str, set[str]] = {}
    for character in set(text):
        script = script_of(character)
        if script is not None and script in scripts:
            characters.setdefault(script, set()).add(character)
    written: Counter[str] = Counter()
    for script, members in characters.items():
        word = f"[{''.join(sorted(members))}]+"
        pattern = f"{word}(?:{_LATIN_GAP}{word})*" if script == LATIN else word
        for phrase, count in Counter(re.findall(pattern, text)).items():
            words = re.findall(word, phrase)
            num_letters = sum(map(len, words))
            is_symbol = script in _ALPHABETS and num_letters <= (_GREEK_SYMBOLS if script == GREEK else 1)
            is_term = script == LATIN and len(words) < min_latin_words
            if not (is_symbol or is_term or phrase in context):
                written[script] += num_letters * count * _LETTERS.get(script, 1)
    return written


def mixing(completion: Completion, context: Sequence[Message], config: MixingConfig) -> float:
    """Measures how much a completion mixes languages, from 0 to 1, by the scripts it is written in.

    It measures thinking and content without code, formulas and quotations, and ignores tool-call arguments. With home =
    "conversation" the expected scripts are those of the user (without a user, of the system message; without any letter
    there, each text's own): the dominant one, and any other of at least `home_letters` letters. The share of foreign
    letters maps to

        0 up to allowed_share, 1 from full_share on, linear in between.

    With the defaults, in a conversation in English: 90 Latin letters and 3 Han characters, which count 9, are no
    mixing, since 9 foreign letters are fewer than 12; with 5, which count 15, the share is 15 / 105 and the measure (15
    / 105 − 0.02) / 0.18 = 0.683.

    `context`: the messages that the completion answers.
    """
    excess = foreign_share(completion, context, config) - config.allowed_share
    return min(1.0, max(0.0, excess / (config.full_share - config.allowed_share)))


def foreign_share(completion: Completion, context: Sequence[Message], config: MixingConfig) -> float:
    """Foreign letters over all letters; 0 if there are fewer than `min_letters` foreign ones."""
    conversation = _home(context, config) if config.home == "conversation" else frozenset()
    # Without the assistant's own messages: earlier mixing must not excuse later mixing.
    quotable = normalize("NFC", "\n".join(message.content for message in context if message.role != "assistant"))
    num_foreign, num_letters = 0, 0
    for text in map(prose, (completion.thinking, completion.content)):
        letters = count_letters(text)
        home = conversation or _singleton(dominant(letters))
        foreign = count_written(text, letters.keys() - home, quotable, config.min_latin_words).total()
        num_foreign += foreign
        num_letters += foreign + sum(letters[script] for script in home)
    return num_foreign / num_letters if num_foreign >= config.min_letters else 0.0


def _home(context: Sequence[Message], config: MixingConfig) -> frozenset[str]:
    """The scripts of the conversation."""
    for role in ("user", "system"):
        text = prose("\n".join(message.content for message in context if message.role == role))
        letters = count_letters(text)
        # Terms in Latin letters may outnumber the rest; they decide only if the text has nothing else.
        written = count_written(text, letters, "", config.min_latin_words)
        main = dominant(written or letters)
        if main is not None:
            return _singleton(main) | {script for script, count in written.items() if count >= config.home_letters}
    return frozenset()


def _singleton(script: str | None) -> frozenset[str]:
    return frozenset() if script is None else frozenset((script,))


@dataclass(frozen=True, slots=True)
class Step:
    """One step of an episode as rules receive it: parsed completion, finish reason, context messages."""

    completion: Completion
    finish_reason: FinishReason
    context: tuple[Message, ...] = ()
    """The prompt's messages, which the completion may quote and whose language it should keep."""


def read_step(call: Call, format: ChatFormat, tools: Sequence[Tool] = (), context: Sequence[Message] = ()) -> Step:
    """Parse the step of a recorded call; `tools` are those offered in its request."""
    ids = call.response_ids
    # A model's vocabulary may exceed its tokenizer's; these ids have no text, as in the gateway.
    known = ids[ids < format.tokenizer.vocab_size]
    parser = format.parser(tools)
    parser.feed(format.tokenizer.decode_bytes(known.tolist()))
    return Step(parser.finish(), call.finish_reason, tuple(context))


def episode_time_s(episode: Episode) -> float:
    """Wall-clock time from the first request to the last response, so parallel calls count once; 0 without calls."""
    if not episode.calls:
        return 0.0
    return max(call.finished_s for call in episode.calls) - min(call.started_s for call in episode.calls)


class Rule(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def weight(self) -> float: ...

    def measure(self, step: Step) -> float:
        """Measure from 0, the rule does not apply, to 1."""
        ...


@dataclass(frozen=True, slots=True)
class ProblemRule:
    """Measures 1 if the parser found one of these problems."""

    name: str
    weight: float
    kinds: frozenset[ProblemKind]

    def measure(self, step: Step) -> float:
        return float(any(problem.kind in self.kinds for problem in step.completion.problems))


@dataclass(frozen=True, slots=True)
class MixingRule:
    weight: float
    config: MixingConfig
    name: str = "language_mixing"

    def measure(self, step: Step) -> float:
        return mixing(step.completion, step.context, self.config)


@dataclass(frozen=True, slots=True)
class StructureRule:
    weight: float
    name: str = "structured_step"

    def measure(self, step: Step) -> float:
        completion = step.completion
        return float(
            step.finish_reason is FinishReason.STOP
            and not completion.problems
            and bool(completion.thinking.strip())
            and bool(completion.tool_calls or completion.content.strip())
        )


MALFORMED_KINDS = frozenset((ProblemKind.MALFORMED_CALL, ProblemKind.UNCLOSED_CALL, ProblemKind.TEXT_IN_CALL))


def make_rules(config: RulesConfig) -> tuple[Rule, ...]:
    """The rules whose weight is not 0."""
    rules: tuple[Rule, ...] = (
        ProblemRule("malformed_call", config.malformed_call, MALFORMED_KINDS),
        ProblemRule("bad_argument", config.bad_argument, frozenset((ProblemKind.BAD_ARGUMENT,))),
        ProblemRule("unknown_tool", config.unknown_tool, frozenset((ProblemKind.UNKNOWN_TOOL,))),
        MixingRule(config.language_mixing, config.mixing),
        StructureRule(config.structured_step),
    )
    return tuple(rule for rule in rules if rule.weight)


def measure(rules: Sequence[Rule], step: Step) -> dict[str, float]:
    """Nonzero measures of the step, by rule."""
    if step.finish_reason is FinishReason.ABORT:
        return {}
    measures = {rule.name: rule.measure(step) for rule in rules}
    return {name: value for name, value in measures.items() if value}
