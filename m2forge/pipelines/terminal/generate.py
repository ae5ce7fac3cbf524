"""Generates contents of files and names: a seed in, texts out.

`vary` makes a longer text of the same form as a sample. Numbers and some words are replaced, by the same replacement in
all files of a fixture, so that keys that occur in two files still match.
"""

import hashlib
import json
import random
import re
from collections.abc import Collection, Sequence

from m2forge.records import JsonValue

WORDS = (
    *("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "harbor", "iris", "juniper", "koala", "lotus"),
    *("maple", "nectar", "olive", "prairie", "quartz", "raven", "saffron", "thistle", "umber", "violet", "willow"),
    *("yarrow", "zephyr", "anchor", "beacon", "copper", "dune", "echo", "falcon", "garnet", "hazel", "indigo"),
)
NUM_COPIES = 3
_NUMBER = re.compile(r"(?<![\w.:/\-@#])\d+(?![\w:/\-]|\.\d)")
_ADDRESS = re.compile(r"(?<![\d.])(\d{1,3}\.\d{1,3}\.\d{1,3})\.\d{1,3}(?![\d.])")
_WORD = re.compile(r"(?<![\w<>/\\\[{$&%-])[A-Za-z]{3,}(?![\w:=>(\[\]}/-])")


def hashed(*parts: object) -> int:
    return int.from_bytes(hashlib.sha256("\0".join(map(str, parts)).encode()).digest()[:8], "big")


def vary(text: str, seed: int, keep: Collection[str]) -> str:
    """A text of the same form. `keep`: words that stay. Sorted lines stay sorted."""
    if (as_json := _vary_json(text, seed, keep)) is not None:
        return as_json
    lines = text.rstrip("\n").split("\n")
    is_whole = any(re.match(r"\s*(?:\[[^\]]+\]\s*$|<[\w/?!]|\S.*[{;]\s*$|/\*)", line) for line in lines)
    if is_whole:
        return _replaced(text.rstrip("\n"), f"{seed}/1", keep) + "\n"
    has_header = len(lines) > 2 and not re.search(r"\d", lines[0]) and all(re.search(r"\d", one) for one in lines[1:])
    head, body = (lines[:1], lines[1:]) if has_header else ([], lines)
    rows = list(body)
    for copy in range(1, NUM_COPIES + 1):
        rows += [_replaced(line, f"{seed}/{copy}", keep) for line in body]
    if len(body) > 2 and all(line.strip().isdigit() for line in body) and body == sorted(body, key=int):
        rows = sorted(set(rows), key=int)
    elif len(body) > 2 and body == sorted(body):
        rows.sort()
    return "\n".join(head + rows) + "\n"


def _vary_json(text: str, seed: int, keep: Collection[str]) -> str | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    if isinstance(value, list):
        copies = [_vary_value(one, f"{seed}/{copy}", keep) for copy in range(1, NUM_COPIES + 1) for one in value]
        return json.dumps([*value, *copies], indent=2) + "\n"
    return json.dumps(_vary_value(value, f"{seed}/1", keep), indent=2) + "\n" if isinstance(value, dict) else None


def _vary_value(value: JsonValue, seed: str, keep: Collection[str]) -> JsonValue:
    match value:
        case dict():
            return {name: _vary_value(one, seed, keep) for name, one in value.items()}
        case list():
            return [_vary_value(one, seed, keep) for one in value]
        case str():
            return _replaced(value, seed, keep)
        case bool() | None | float():
            return value
    return int(_other_number(str(value), seed))


def _replaced(text: str, seed: str, keep: Collection[str]) -> str:
    def number(match: re.Match[str]) -> str:
        return match[0] if match[0] in keep else _other_number(match[0], seed)

    def word(match: re.Match[str]) -> str:
        return match[0] if match[0] in keep else _other_word(match[0], seed)

    def address(match: re.Match[str]) -> str:
        return f"{match[1]}.{hashed(seed, match[0]) % 250 + 2}"

    return _ADDRESS.sub(address, _WORD.sub(word, _NUMBER.sub(number, text)))


def _other_number(digits: str, seed: str) -> str:
    zeros = len(digits) - len(digits.lstrip("0"))
    rest = digits[zeros:]
    if not rest:
        return digits
    low = 10 ** (len(rest) - 1)
    return "0" * zeros + str(low + hashed(seed, digits) % (9 * low))


def _other_word(word: str, seed: str) -> str:
    """Another word in the same case, or the same word: half of them stay, so that groups have several members."""
    draw = hashed(seed, word.lower())
    if draw % 2 or word.isupper():
        return word
    other = WORDS[(draw // 2) % len(WORDS)]
    return other.capitalize() if word[0].isupper() else other


def text(rng: random.Random, literals: Sequence[str], num_lines: int, *, has_returns: bool = False) -> str:
    """Prose that contains the literals, repeated lines, blank lines, white space of all kinds and long lines."""
    lines = list[str]()
    for number in range(num_lines):
        kind = rng.randrange(12)
        words = [rng.choice(WORDS) for _ in range(rng.randrange(2, 9))]
        if literals and rng.randrange(3) == 0:
            words.insert(rng.randrange(len(words)), rng.choice(list(literals)))
        line = " ".join(words)
        if kind == 0 and lines:
            line = rng.choice(lines)
        elif kind == 1:
            line = rng.choice(("", "   ", "\t"))
        elif kind == 2:
            line = f"\t{line}\t# {rng.choice(WORDS)}"
        elif kind == 3:
            line += rng.choice((" ", "  ", "\t"))
        elif kind == 4:
            line = line.upper()
        elif kind == 5:
            line = " ".join(rng.choice(WORDS) for _ in range(20))
        elif kind == 6:
            line = f"{rng.randrange(1, 1000)},{line.replace(' ', ',', 1)},{number}"
        lines.append(line)
    for position, literal in enumerate(literals[:num_lines]):
        lines[(position * 5 + 2) % num_lines] += f" {literal}"
    end = "\r\n" if has_returns else "\n"
    return "".join(line + end for line in lines)


def code(rng: random.Random, literals: Sequence[str]) -> str:
    """A small Python file, with trailing white space."""
    lines = ["import os", ""]
    for number in range(rng.randrange(2, 5)):
        name = rng.choice(WORDS)
        lines += [f"def {name}_{number}(value):" + rng.choice(("", "  ", "\t")), f"    return value + {number} "]
    lines += [f"# {literal}" for literal in literals]
    return "\n".join(lines) + "\n"


def rows(rng: random.Random, literals: Sequence[str]) -> str:
    """A CSV table with a header."""
    lines = ["id,name,amount"]
    for number in range(1, 13):
        name = rng.choice([*WORDS, *literals])
        lines.append(f"{number},{name},{rng.randrange(1, 500)}")
    return "\n".join(lines) + "\n"


def objects(rng: random.Random) -> str:
    found = [{"id": number, "name": rng.choice(WORDS), "amount": rng.randrange(100)} for number in range(1, 6)]
    return json.dumps(found, indent=2) + "\n"


def fill(pattern: str, rng: random.Random, index: int) -> str:
    """A name that matches a glob."""
    has_space = index == 1 and pattern.startswith("*") and len(pattern) > 1
    out, position = "", 0
    while position < len(pattern):
        sign = pattern[position]
        if sign == "*":
            word = rng.choice(WORDS)
            out += f"{word} {rng.choice(WORDS)}" if has_space and not out else f"{word}{index}"
        elif sign == "?":
            out += str(rng.randrange(10))
        elif sign == "[" and (end := pattern.find("]", position + 2)) > 0:
            inside = pattern[position + 1 : end]
            out += inside[-1] if inside[0] not in "!^" else "z"
            position = end
        else:
            out += sign
        position += 1
    return out
