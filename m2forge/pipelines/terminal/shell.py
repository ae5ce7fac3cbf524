"""Reads shell scripts: a text in, its simple commands out, with their words and redirections.

The commands of pipelines, loops, conditions, substitutions, `xargs`, `find -exec` and `sh -c` are listed one by one in
the order in which they stand. Words are unquoted and not expanded. It is no interpreter: what a variable holds is not
known. A text that is not a script in this sense raises `ShellError`.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

KEYWORDS = frozenset(("if", "then", "elif", "else", "fi", "while", "until", "do", "!", "{", "}", "time", "esac"))
"""Words that may stand before a command."""
WRAPPERS = {"sudo": "ugCDhp", "env": "uCS", "nice": "n", "nohup": "", "command": "", "exec": "a", "timeout": "ks"}
"""Programs that run the rest of their words, with the short options that take a value."""
_XARGS_VALUES = "InLPdEsa"
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*\+?=")
_OPERATORS = ("&&", "||", ";;", "|&", "|", "&", ";", "\n", "(", ")")
_REDIRECT = re.compile(r"\d*(?:&>>|&>|<<<|<<-|<<|>>|>\||<>|<&|>&|>|<)")
_FUNCTION = re.compile(r"(?:^|[;\n])\s*(?:function\s+)?([A-Za-z_][\w-]*)\s*\(\)\s*\{")


class ShellError(ValueError):
    """The text is not a script, or one that cannot be read here."""


@dataclass(frozen=True, slots=True)
class Word:
    text: str
    """Without quotes; substitutions stay as they are written."""
    raw: str
    """As it is written."""

    @property
    def is_quoted(self) -> bool:
        return self.text != self.raw

    @property
    def is_glob(self) -> bool:
        return bool(re.search(r"[*?]|\[[^\]]+\]", re.sub(r"'[^']*'|\"[^\"]*\"|\\.", "", self.raw)))

    @property
    def is_literal(self) -> bool:
        """Whether it stands for itself: no variable, substitution, glob or brace expansion."""
        return "$" not in self.text and "`" not in self.text and not self.is_glob and "{" not in self.raw


@dataclass(frozen=True, slots=True)
class Redirect:
    operator: str
    """Without the descriptor: <, >, >>, …"""
    target: Word


@dataclass(frozen=True, slots=True)
class SimpleCommand:
    program: str
    """Name without its folder; `for` lists the words that its loop runs over; empty: only redirections."""
    arguments: tuple[Word, ...] = ()
    redirects: tuple[Redirect, ...] = ()
    outer: str = ""
    """The program that runs it, such as find or xargs."""

    @property
    def texts(self) -> list[str]:
        return [word.text for word in self.arguments]


@dataclass(slots=True)
class _Pending:
    words: list[Word] = field(default_factory=list)
    redirects: list[Redirect] = field(default_factory=list)


def functions(script: str) -> set[str]:
    """Names of the functions that a script defines."""
    return set(_FUNCTION.findall(script))


def read_commands(script: str) -> list[SimpleCommand]:
    return _Reader(script).read()


class _Reader:
    def __init__(self, script: str, depth: int = 0) -> None:
        if depth > 8:
            raise ShellError("nested too deeply")
        self._text, self._at, self._depth = script.replace("\\\n", ""), 0, depth
        self._heredocs: list[tuple[str, bool]] = []
        self._inner: list[str] = []
        self._found: list[SimpleCommand] = []

    def read(self) -> list[SimpleCommand]:
        pending = _Pending()
        while self._at < len(self._text):
            sign = self._text[self._at]
            if sign in " \t":
                self._at += 1
            elif sign == "#" and (self._at == 0 or self._text[self._at - 1] in " \t\n;"):
                end = self._text.find("\n", self._at)
                self._at = len(self._text) if end < 0 else end
            elif self._text.startswith(("<(", ">("), self._at):
                pending.words.append(self._word())
            elif (redirect := _REDIRECT.match(self._text, self._at)) and not self._is_digit_word(redirect):
                pending.redirects.append(self._redirect(redirect))
            elif operator := next((op for op in _OPERATORS if self._text.startswith(op, self._at)), None):
                self._operator(operator, pending)
            else:
                pending.words.append(self._word())
        self._end(pending)
        if self._heredocs:
            raise ShellError("a here-document without its end")
        return self._found

    def _is_digit_word(self, match: re.Match[str]) -> bool:
        return match[0][:1].isdigit() and self._at > 0 and self._text[self._at - 1] not in " \t;|&(\n"

    def _operator(self, operator: str, pending: _Pending) -> None:
        if operator == "(" and self._text.startswith("((", self._at):
            self._at = self._balanced(self._at, "(", ")")
            return
        self._at += len(operator)
        self._end(pending)
        if operator == "\n" and self._heredocs:
            self._skip_heredocs()

    def _skip_heredocs(self) -> None:
        for delimiter, strips in self._heredocs:
            while True:
                if self._at >= len(self._text):
                    raise ShellError("a here-document without its end")
                end = self._text.find("\n", self._at)
                end = len(self._text) if end < 0 else end
                line = self._text[self._at : end]
                self._at = min(end + 1, len(self._text))
                if (line.lstrip("\t") if strips else line) == delimiter:
                    break
        self._heredocs = []

    def _redirect(self, match: re.Match[str]) -> Redirect:
        self._at = match.end()
        while self._at < len(self._text) and self._text[self._at] in " \t":
            self._at += 1
        if self._at >= len(self._text) or self._text[self._at] in "\n;|":
            raise ShellError(f"a redirection without a target: {match[0]}")
        operator, target = match[0].lstrip("0123456789"), self._word()
        if operator in ("<<", "<<-"):
            self._heredocs.append((target.text, operator == "<<-"))
        return Redirect(operator, target)

    # -- words ---------------------------------------------------------------------------------------------------------

    def _word(self) -> Word:
        start, parts = self._at, list[str]()
        while self._at < len(self._text):
            sign = self._text[self._at]
            if sign in " \t\n;|&()<>":
                if sign in "<>" and self._text[self._at + 1 : self._at + 2] == "(" and self._at == start:
                    parts.append(self._substitution(self._at + 1))
                    continue
                break
            parts.append(self._part(sign))
        if self._at == start:
            raise ShellError(f"unexpected {self._text[start : start + 1]!r}")
        return Word("".join(parts), self._text[start : self._at])

    def _part(self, sign: str) -> str:
        at, text = self._at, self._text
        if sign == "\\":
            self._at += 2
            return text[at + 1 : at + 2]
        if sign == "'":
            return self._until("'", at + 1)
        if text.startswith("$'", at):
            return self._until("'", at + 2)
        if sign == '"':
            return self._double()
        if sign == "`":
            inside = self._until("`", at + 1)
            self._inner.append(inside)
            return f"`{inside}`"
        if text.startswith("$((", at):
            self._at = self._balanced(at + 1, "(", ")")
            return text[at : self._at]
        if text.startswith("$(", at):
            return self._substitution(at + 1)
        if text.startswith("${", at):
            self._at = self._balanced(at + 1, "{", "}")
            return text[at : self._at]
        self._at += 1
        return sign

    def _substitution(self, opening: int) -> str:
        start, self._at = self._at, self._balanced(opening, "(", ")")
        self._inner.append(self._text[opening + 1 : self._at - 1])
        return self._text[start : self._at]

    def _until(self, sign: str, start: int) -> str:
        end = self._text.find(sign, start)
        if end < 0:
            raise ShellError(f"a quote without its end: {self._text[start - 1 : start + 30]!r}")
        self._at = end + 1
        return self._text[start:end]

    def _double(self) -> str:
        self._at += 1
        parts = list[str]()
        while self._at < len(self._text):
            sign = self._text[self._at]
            if sign == '"':
                self._at += 1
                return "".join(parts)
            if sign == "\\" and self._text[self._at + 1 : self._at + 2] in ("$", "`", '"', "\\"):
                parts.append(self._text[self._at + 1])
                self._at += 2
            elif sign == "$" and self._text[self._at + 1 : self._at + 2] in ("(", "{"):
                parts.append(self._part(sign))
            else:
                parts.append(sign)
                self._at += 1
        raise ShellError("a quote without its end")

    def _balanced(self, opening: int, begin: str, end: str) -> int:
        """The position after the bracket that closes the one at `opening`; quotes are skipped."""
        depth, at = 0, opening
        while at < len(self._text):
            sign = self._text[at]
            if sign == "\\":
                at += 1
            elif sign == "'" or (sign == '"' and begin == "("):
                at = self._text.find(sign, at + 1)
                if at < 0:
                    break
            elif sign == begin:
                depth += 1
            elif sign == end:
                depth -= 1
                if depth == 0:
                    return at + 1
            at += 1
        raise ShellError(f"a bracket without its end: {self._text[opening : opening + 30]!r}")

    # -- commands ------------------------------------------------------------------------------------------------------

    def _end(self, pending: _Pending) -> None:
        words, redirects = list(pending.words), tuple(pending.redirects)
        pending.words.clear()
        pending.redirects.clear()
        while words and (words[0].raw in KEYWORDS or _ASSIGNMENT.match(words[0].raw)):
            words.pop(0)
        if words and words[0].raw == "for":
            self._found.append(SimpleCommand("for", tuple(words[3:]), redirects))
        elif words and words[0].raw == "case":
            pass
        elif words or redirects:
            name = words[0].text.rpartition("/")[2] or words[0].text if words else ""
            self._found += expand(SimpleCommand(name, tuple(words[1:]), redirects), self._depth)
        inner, self._inner = self._inner, []
        for script in inner:
            self._found += _Reader(script, self._depth + 1).read()


def expand(command: SimpleCommand, depth: int = 0) -> Iterator[SimpleCommand]:
    """The command, and those that it runs."""
    yield command
    words = command.arguments
    match command.program:
        case "find":
            for position, word in enumerate(words):
                if word.text in ("-exec", "-execdir", "-ok", "-okdir"):
                    ends = [n for n, w in enumerate(words) if n > position and w.text in (";", "+")]
                    yield from _run_words(words[position + 1 : ends[0] if ends else len(words)], "find", depth)
        case "xargs":
            yield from _run_words(words[_num_options(words, _XARGS_VALUES) :], "xargs", depth)
        case "sh" | "bash" | "dash":
            texts = [word.text for word in words]
            if "-c" in texts[:-1]:
                yield from _Reader(texts[texts.index("-c") + 1], depth + 1).read()
        case program if program in WRAPPERS:
            rest = words[_num_options(words, WRAPPERS[program]) :]
            while rest and _ASSIGNMENT.match(rest[0].raw):
                rest = rest[1:]
            yield from _run_words(rest[1:] if program == "timeout" else rest, program, depth)


def _run_words(words: Sequence[Word], outer: str, depth: int) -> Iterator[SimpleCommand]:
    if words:
        name = words[0].text.rpartition("/")[2]
        yield from expand(SimpleCommand(name, tuple(words[1:]), outer=outer), depth + 1)


def _num_options(words: Sequence[Word], with_value: str) -> int:
    """How many words at the beginning are options, or their values."""
    number = 0
    while number < len(words) and words[number].text.startswith("-"):
        text = words[number].text
        number += 1
        if text == "--":
            break
        if len(text) == 2 and text[1] in with_value:
            number += 1
    return number
